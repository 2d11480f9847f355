"""Meshwise: measure a GPU cluster, price it, plan a model's layout, run it, compare."""
