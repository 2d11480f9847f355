"""A mixture of experts in a forward graph, in place of a feed-forward.

    scores = softmax(x router^T) in fp32;  the best top_k of each token
    y = sum over these of score * down(act(first(x)));  and shared(x) beside it

Rows are copies of tokens, sorted by expert. They are moved into a buffer of ``room`` rows, where
each expert's group is aligned. They pass through one grouped product per weight and are moved back.
``nn/experts.py`` is the same mathematics as a torch module. If ranks hold different experts,
``dispatch`` sends rows to them and ``combine`` brings them back. In this graph every expert gets
the same number of rows: the router's choice is a named load, not a size.

Experts with a capacity have a ``room`` of [experts,groups,capacity] instead: copies are moved there
directly, ``combine`` gives 0 for dropped copies, and products are batched.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from meshwise.models.families.build import STREAM, TOKEN, Build
from meshwise.spec import EXPERT_ALIGNMENT, Experts, LanguageModel, Model

COPIES = (*TOKEN, "top_k")
ROWS = (*COPIES, "hidden")
ROOM, CHOICES = ("room",), ("choices",)


def sizes(model: LanguageModel, batch: int, seq: int) -> dict[str, int]:
    """Return the extents of the dims that experts add. ``choices``: experts that the router
    scores. ``experts``: experts that a rank holds."""
    moe = model.experts
    if moe is None:
        return {}
    found = {
        "batch": batch, "seq": seq, "choices": moe.num_experts, "experts": moe.num_experts,
        "top_k": moe.top_k, "expert_ffn": moe.ffn, "shared_ffn": moe.shared_ffn, "halves": 2,
    }  # fmt: skip
    if moe.group_size is not None:
        found |= {"group": moe.group_size, "capacity": moe.capacity}
    if moe.load == "p95":
        found["p95"] = 1
    elif moe.load != "mean":
        found["per_mille"] = round(1000 * moe.load)
    return found | {"room": room(found)}


def room(sizes: Mapping[str, int]) -> int:
    """Return the number of rows in the buffer that a rank's products read."""
    tokens = sizes["batch"] * sizes["seq"]
    if "capacity" in sizes:  # it receives as many rows as it sends
        return max(1, tokens // sizes["group"]) * sizes["capacity"] * sizes["choices"]
    return arriving(sizes) + EXPERT_ALIGNMENT * sizes["experts"]


def arriving(sizes: Mapping[str, int]) -> int:
    """Return the rows that a rank's experts receive: by default as many as a rank sends. ``p95``:
    the 95th percentile if rows choose experts at random (a binomial, approximated as normal).
    ``per_mille``: the fullest rank's rows over the mean, up to the rows of all ranks."""
    rows = sizes["batch"] * sizes["seq"] * sizes["top_k"]
    if "per_mille" in sizes:
        return min(
            -(-rows * sizes["per_mille"] // 1000), rows * sizes["choices"] // sizes["experts"]
        )
    if "p95" not in sizes:
        return rows
    elsewhere = 1 - sizes["experts"] / sizes["choices"]
    return rows + math.ceil(1.645 * math.sqrt(rows * elsewhere))


def experts(build: Build, model: LanguageModel, x: str, at: str) -> str:
    """Append the experts of a layer to the graph; x is normed."""
    moe = model.experts
    assert moe is not None
    gated, bias = (False, True) if isinstance(model, Model) else (model.gated, model.mlp_bias)
    routes = _route(build, moe, x, f"{at}.router")
    y = _routed(build, x, routes, f"{at}.experts", gated=gated, bias=bias)
    if moe.shared_ffn:
        other = _shared(build, moe, x, f"{at}.shared", gated=gated, bias=bias)
        y = build.elementwise(f"{at}.experts.add", "add", y, other)
    return y


class _Routes(NamedTuple):
    """Each token's experts, their weights, and the mean score of each expert. ``places``, with a
    capacity: the place of each copy in the buffer, and the copy at each place."""

    chosen: str
    weights: str
    mean: str
    places: tuple[str, str] | None


def _route(build: Build, moe: Experts, x: str, at: str) -> _Routes:
    weight = build.parameter(f"{at}.weight", "choices", "hidden")
    if build.dtype != "fp32":
        x = build.elementwise(f"{at}.wide", "cast", x, dtype="fp32")
        weight = build.elementwise(f"{at}.wide_weight", "cast", weight, dtype="fp32")
    logits = build.tensor(f"{at}.y", (*TOKEN, "choices"), "fp32")
    build.node(at, "gemm", (x, weight), logits)
    scores = build.elementwise(f"{at}.scores", "sigmoid" if moe.router_bias else "softmax", logits)
    shares = _normalized(build, scores, f"{at}.shares") if moe.router_bias else scores
    chosen = _constant(build, f"{at}.chosen", COPIES)
    added = [build.tensor(f"{at}.bias", ("choices",), "fp32", "state")] if moe.router_bias else []
    build.node(f"{at}.top_k", "sort", (scores, *added), chosen)
    weights, places = build.tensor(f"{at}.weights", COPIES, "fp32"), None
    build.node(f"{at}.gather", "gather", (scores, chosen), weights)
    if moe.group_size is not None:
        places = _constant(build, f"{at}.place", COPIES), _constant(build, f"{at}.copy", ROOM)
        kept = _constant(build, f"{at}.placed", COPIES, "bool")
        build.node(f"{at}.places", "sort", (chosen,), *places, kept)
        weights = build.elementwise(f"{at}.kept", "mul", weights, kept)
    if moe.normalized:
        weights = _normalized(build, weights, f"{at}.normalized")
    weights = build.elementwise(f"{at}.scaled", "copy", weights)
    mean = build.tensor(f"{at}.mean", ("choices",), "fp32")
    build.node(f"{at}.mean", "mean", (shares,), mean)
    return _Routes(chosen, weights, mean, places)


def _constant(build: Build, name: str, dims: tuple[str, ...], dtype: str = "int64") -> str:
    return build.tensor(name, dims, dtype, "constant")


def _normalized(build: Build, x: str, name: str) -> str:
    """Divide x by its sum over the last dim."""
    *rows, _ = build.tensors[x].dims
    y = build.tensor(f"{name}.y", build.tensors[x].dims, "fp32")
    return build.node(name, "normalize", (x,), y, build.tensor(f"{name}.sum", tuple(rows), "fp32"))


def _routed(build: Build, x: str, routes: _Routes, at: str, *, gated: bool, bias: bool) -> str:
    chosen, weights, mean, places = routes
    counts = build.node(
        f"{at}.count", "count", (chosen,), _constant(build, f"{at}.counts", CHOICES)
    )
    loads = _constant(build, f"{at}.loads", CHOICES, "fp32")
    build.node(f"{at}.balance", "balance", (counts, mean), loads)
    if places is None:
        rows = _sorted(build, x, chosen, counts, at, gated=gated, bias=bias)
    else:
        place, copy = places
        rows = build.move(f"{at}.copies", x, (copy, place), (*ROOM, "hidden"))
        rows = build.elementwise(f"{at}.dispatch", "exchange", rows)
        rows = _products(build, rows, at, None, gated=gated, bias=bias)
        rows = build.elementwise(f"{at}.combine", "exchange", rows)
        rows = build.move(f"{at}.picked", rows, (place, copy), ROWS)
    if build.dtype != "fp32":
        weights = build.elementwise(f"{at}.weights", "cast", weights, dtype=build.dtype)
    weighted = build.elementwise(f"{at}.weighted", "mul", rows, weights)
    return build.node(f"{at}.sum", "sum", (weighted,), build.tensor(f"{at}.y", STREAM))


def _sorted(
    build: Build, x: str, chosen: str, counts: str, at: str, *, gated: bool, bias: bool
) -> str:
    """Return the experts' results for all copies, sorted by expert and aligned for products."""
    order = build.node(f"{at}.order", "sort", (chosen,), _constant(build, f"{at}.order.y", COPIES))
    place = build.node(f"{at}.place", "sort", (order,), _constant(build, f"{at}.place.y", COPIES))
    rows = build.move(f"{at}.copies", x, (order, place), ROWS)
    rows = build.elementwise(f"{at}.dispatch", "exchange", rows, counts)
    into, source = _constant(build, f"{at}.into", COPIES), _constant(build, f"{at}.source", ROOM)
    ends = _constant(build, f"{at}.ends", ("experts",), "int32")
    build.node(f"{at}.groups", "sort", (counts,), into, source, ends)
    rows = build.move(f"{at}.pad", rows, (source, into), (*ROOM, "hidden"))
    rows = _products(build, rows, at, ends, gated=gated, bias=bias)
    rows = build.move(f"{at}.unpad", rows, (into, source), ROWS)
    rows = build.elementwise(f"{at}.combine", "exchange", rows, counts)
    return build.move(f"{at}.picked", rows, (place, order), ROWS)


def _products(
    build: Build, rows: str, at: str, ends: str | None, *, gated: bool, bias: bool
) -> str:
    def product(x: str, name: str, out: tuple[str, ...], into: tuple[str, ...]) -> str:
        """Multiply by one weight per expert. ``ends`` delimits the experts' rows; None: all have
        equally many. With ``ends`` a second product picks the bias, else the first adds it."""
        weight = build.parameter(f"{at}.{name}.weight", "experts", *out, *into)
        added = [build.parameter(f"{at}.{name}.bias", "experts", *out)] if bias else []
        y = build.tensor(f"{at}.{name}.y", (*ROOM, *out))
        build.node(f"{at}.{name}", "gemm", (x, weight, *([ends] if ends else added)), y)
        if not added or ends is None:
            return y
        one_hot = _constant(build, f"{at}.{name}.one_hot", (*ROOM, "experts"), build.dtype)
        build.node(f"{at}.{name}.group", "sort", (ends,), one_hot)
        sums = build.tensor(f"{at}.{name}.sums", (*ROOM, *out))
        return build.node(f"{at}.{name}.add", "gemm", (one_hot, *added, y), sums)

    wide = ("halves", "expert_ffn") if gated else ("expert_ffn",)
    first = product(rows, "gate_up" if gated else "up", wide, ("hidden",))
    return product(_activated(build, first, at), "down", ("hidden",), ("expert_ffn",))


def _activated(build: Build, first: str, at: str) -> str:
    """Return silu(gate) * up of first = [gate, up], or gelu."""
    dims, dtype = build.tensors[first].dims, build.tensors[first].dtype
    if "halves" not in dims:
        return build.elementwise(f"{at}.gelu", "gelu", first)
    one = tuple(dim for dim in dims if dim != "halves")
    gate, up = (build.tensor(f"{at}.{name}", one, dtype) for name in ("gate", "up"))
    build.node(f"{at}.chunk", "view", (first,), gate, up)
    silu = build.elementwise(f"{at}.silu", "silu", gate)
    return build.elementwise(f"{at}.gated", "mul", silu, up)


def _shared(build: Build, moe: Experts, x: str, at: str, *, gated: bool, bias: bool) -> str:
    wide = ("shared_ffn",)
    gate = build.linear(x, f"{at}.gate", wide, ("hidden",), bias=bias) if gated else ""
    first = build.linear(x, f"{at}.up", wide, ("hidden",), bias=bias)
    if gated:
        both = build.tensor(f"{at}.first", (*TOKEN, "halves", "shared_ffn"))
        first = build.node(f"{at}.concat", "concat", (gate, first), both)
    y = build.linear(_activated(build, first, at), f"{at}.down", ("hidden",), wide, bias=bias)
    if not moe.shared_gate:
        return y
    score = build.linear(x, f"{at}_gate", ("one",), ("hidden",))
    score = build.elementwise(f"{at}_gate.sigmoid", "sigmoid", score)
    return build.elementwise(f"{at}.scored", "mul", y, score)
