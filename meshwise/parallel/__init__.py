"""Apply a layout to a module, so that each rank holds and computes its part of every tensor."""
