"""What ``measure`` times. ``profile`` lists the cases (no torch), ``sweep`` runs them on every
rank; each of the other modules builds the work of one kind of operation."""
