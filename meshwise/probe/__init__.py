"""Time what ``measure`` asks for. ``cases`` lists it, ``importers`` reads other tools' results (no
torch), ``loop`` runs the cases on every rank. Most other modules build the work of one kind."""
