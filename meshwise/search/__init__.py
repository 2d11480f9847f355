"""Find the best layout: enumerate the legal ones, price each, rank by predicted step time."""

from meshwise.search.bill import bill
from meshwise.search.explain import explain
from meshwise.search.find import NoLayout, find, given, misfit
from meshwise.search.goodput import goodput
from meshwise.search.predict import predict
from meshwise.search.sizes import best_attention, best_batch, cheapest, fewest
from meshwise.search.space import check
from meshwise.search.spans import spans
from meshwise.search.varying import by_length, by_load
from meshwise.search.what_if import what_if
from meshwise.search.why_not import why_not
from meshwise.search.within import Space, space_of

__all__ = [
    "NoLayout", "Space", "best_attention", "best_batch", "bill", "by_length", "by_load", "cheapest",
    "check", "explain", "fewest", "find", "given", "goodput", "misfit", "predict", "space_of",
    "spans", "what_if", "why_not",
]  # fmt: skip
