"""What the matrix products of a step could reach by themselves: the floor of its GEMM row.

In: a shape, and whether q, k, v and gate, up are joined. Out: seconds of every product (forward
and the two of backward) in bursts on a card that has rested, and of all products of a step one
after another for ``seconds``, when the card is down at the clocks its power cap allows.
"""

import functools
import itertools
import time
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from llama import Shape

from meshwise import provenance, ranks, timing
from meshwise.stats import median_interval


class Product(NamedTuple):
    name: str
    inner: int
    outer: int
    count: int  # in one step


def products(shape: Shape, joined: bool) -> list[Product]:
    h, f, n = shape.hidden, shape.ffn, shape.layers
    first = [Product("qkv", h, 3 * h, n)] if joined else [Product("q", h, h, 3 * n)]
    gates = [Product("gate+up", h, 2 * f, n)] if joined else [Product("gate", h, f, 2 * n)]
    rest = [Product("out", h, h, n), Product("down", f, h, n), Product("head", h, shape.vocab, 1)]
    return first + gates + rest


def rates(shape: Shape, joined: bool, me: ranks.Ranks, seconds: float) -> dict[str, Any]:
    dtype = torch.bfloat16 if me.device.type == "cuda" else torch.float32
    mark, elapsed_s = timing.clock(me.device)
    calls, bursts = [], []
    for name, inner, outer, count in products(shape, joined):
        sizes = (shape.tokens, inner), (outer, inner), (shape.tokens, outer)
        x, w, dy = (timing.randn(size, dtype, me.device) for size in sizes)
        flops = 2.0 * shape.tokens * inner * outer
        kinds = {
            "forward": functools.partial(F.linear, x, w),
            "dgrad": functools.partial(torch.matmul, dy, w),
            "wgrad": functools.partial(torch.matmul, dy.T, x),
        }
        for kind, call in kinds.items():
            call()
            me.synchronize("a warm-up")
            time.sleep(0.05 * seconds)  # the card cools and its clocks rise again
            marks = [mark()]
            for _ in range(5):
                call()
                marks.append(mark())
            me.synchronize("a burst")
            median_s = median_interval([elapsed_s(*ends) for ends in itertools.pairwise(marks)])[0]
            bursts.append({"product": f"{name} {kind}", "s": median_s, "flops": flops / median_s})
            calls.append((call, count, flops))
    total = sum(count * flops for _, count, flops in calls)
    times_s, state = _sustain(calls, me, seconds)
    settled_s = median_interval(times_s[len(times_s) // 2 :])[0]
    replies = me.gather(
        (settled_s, sum(c * b["s"] for (_, c, _), b in zip(calls, bursts, strict=True)))
    )
    slowest_s, burst_s = (max(values) for values in zip(*replies, strict=True))
    return {
        "flops_of_a_step": total,
        "sustained_s": slowest_s,
        "sustained_flops": total / slowest_s,
        "burst_s": burst_s,
        "burst_flops": total / burst_s,
        "bursts": bursts,
        "rank_sustained_s": [reply[0] for reply in replies],
        "states": me.gather(state),
    }


def _sustain(calls: list[Any], me: ranks.Ranks, seconds: float) -> tuple[list[float], Any]:
    """Seconds of every pass over a step's products, layer by layer; clocks near the end."""
    mark, elapsed_s = timing.clock(me.device)
    rounds = max(count for _, count, _ in calls)
    times_s, started = [], time.perf_counter()
    while time.perf_counter() - started < seconds or len(times_s) < 3:
        begin = mark()
        for index in range(rounds):
            for call, count, _ in calls:
                for _ in range(count * (index + 1) // rounds - count * index // rounds):
                    call()
        end, state = mark(), provenance.device_state(me)  # the device is still at work
        me.synchronize("products back to back")
        times_s.append(elapsed_s(begin, end))
    return times_s, state
