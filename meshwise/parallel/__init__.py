"""Applies a layout to a module: which parts of which tensor each rank holds and computes."""
