"""Times what ``measure`` asks for. ``cases`` lists it, ``importers`` reads what others timed (no
torch), ``loop`` takes the cases on every rank; most other modules build the work of one kind."""
