"""What ``measure`` times. ``cases`` lists it and ``importers`` reads what others timed (no torch),
``sweep`` runs the cases on every rank; each other module builds the work of one kind."""
