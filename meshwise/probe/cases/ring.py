"""List what ``measure ring`` times: its settings, and a row for each length and ring size.

In: the user's options, the environment variables of the source's launcher, a mode. Out: a
``RingSettings`` and its ``RingSweep``s. Options win over the mode, the mode over the environment,
the environment over the defaults, which are the source's.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from meshwise.attention import cover, volume
from meshwise.attention.plan import exchange_plan
from meshwise.attention.shards import Shards, contiguous, zigzag
from meshwise.prices import Prices
from meshwise.spec import Case, Dilation, LongAttention, Record
from meshwise.spec.long_attention import WAYS, Way
from meshwise.spec.op import Dtype
from meshwise.spec.record import NonNegative, Positive

Mode = Literal["", "all", "quick", "large"]
VARIABLES = {
    "BATCH_SIZE": "batch_size", "SEQ_LENGTHS": "seq_lengths", "NUM_HEADS": "num_heads",
    "EMBED_DIM": "embed_dim", "WARMUP_RUNS": "warmup_runs", "BENCHMARK_RUNS": "benchmark_runs",
}  # fmt: skip
MODES: dict[Mode, dict[str, Any]] = {
    "": {},
    "all": {},
    "quick": {"seq_lengths": (8192, 16384), "warmup_runs": 1, "benchmark_runs": 3},
    "large": {"seq_lengths": (131072, 262144), "batch_size": 1},
}
LARGE_RANKS = 4  # ranks of mode large, if the machine has so many
DTYPES: dict[str, Dtype] = {
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64",
}  # fmt: skip
_LISTS = ("seq_lengths", "segment_lengths", "dilation_rates", "ring_sizes")
_MOST = 2**40  # limit of every other number
MOST_TOKENS = 2**26  # counting a rank's rows before timing takes some seconds for so many


class RingSettings(Record, kw_only=True):
    """The source's flags under their names, then ours. ``dense``: no dilation and no segments."""

    batch_size: Positive = 2
    seq_lengths: tuple[int, ...] = (16384, 32768, 65536)
    embed_dim: Positive = 768
    num_heads: Positive = 12
    segment_lengths: tuple[int, ...] = (2048, 4096, 8192)
    dilation_rates: tuple[int, ...] = (1, 2, 4)
    ring_sizes: tuple[int, ...] = (1, 2, 4, 8)
    warmup_runs: NonNegative = 3
    benchmark_runs: Positive = 10
    use_flash_attention: bool = True
    dtype: Dtype = "fp16"
    num_kv_heads: Positive | None = None
    causal: bool = False
    offsets: Literal["mod", "block", "group"] = "mod"
    offset_heads: Literal["query", "kv"] = "query"
    dense: bool = False
    way: Way = "auto"
    order: Literal["contiguous", "zigzag"] = "contiguous"
    forward_only: bool = False
    graph: bool = False
    own_world: bool = False

    def check(self) -> None:
        for name in (*_LISTS, "batch_size", "embed_dim"):
            value = getattr(self, name)
            numbers = value if isinstance(value, tuple) else (value,)
            most = MOST_TOKENS if name == "seq_lengths" else _MOST
            if not numbers or not all(1 <= number <= most for number in numbers):
                self.fail(name, f"give whole numbers of 1 to {most}")
        if self.embed_dim % self.num_heads:
            self.fail("embed_dim", f"must be a multiple of num_heads = {self.num_heads}")
        if self.dtype not in DTYPES.values():
            self.fail("dtype", f"must be one of {', '.join(DTYPES)}")
        if not self.dense and self.way == "ring_heads":
            self.fail("way", "a dilated branch goes by gather, heads or ring; or add --dense")
        self.op(self.seq_lengths[0])  # checks heads, segments and rates together

    @property
    def dilation(self) -> Dilation | None:
        if self.dense:
            return None
        return Dilation(
            segment_lengths=self.segment_lengths, dilation_rates=self.dilation_rates,
            offsets=self.offsets, offset_heads=self.offset_heads,
        )  # fmt: skip

    def op(self, seq_len: int) -> LongAttention:
        return LongAttention(
            batch=self.batch_size, seq_len=seq_len, heads=self.num_heads,
            kv_heads=self.num_kv_heads or self.num_heads, head_dim=self.embed_dim // self.num_heads,
            causal=self.causal, dilation=self.dilation, dtype=self.dtype,
            direction="forward" if self.forward_only else "backward",
            way=self.way, order=self.order,
        )  # fmt: skip


class RingSweep(NamedTuple):
    """A row to measure. ``reason``: why it cannot be measured here, or empty. ``world_size``: ranks
    that work at once, in rings of ``case.world_size``."""

    case: Case
    world_size: int
    reason: str


def settings(
    given: Mapping[str, Any], variables: Mapping[str, str], mode: Mode, device_kind: str
) -> RingSettings:
    """Make the settings. ``given``: the user's options by field. ``variables``: the environment."""
    if mode not in get_args(Mode):
        raise ValueError(f"mode = {mode!r}: must be one of {', '.join(MODES)}")
    if given.get("dense") and (unused := {"segment_lengths", "dilation_rates"} & given.keys()):
        raise ValueError(
            f"{min(unused)} = {given[min(unused)]}: dense attention has none; leave it"
        )
    usual: dict[str, Any] = {"dtype": "fp16" if device_kind == "cuda" else "fp32"}
    chosen = {**usual, **_of_environment(variables), **MODES[mode], **given}
    if (dtype := chosen["dtype"]) in DTYPES:
        chosen["dtype"] = DTYPES[dtype]
    for name, value in chosen.items():
        if name in _LISTS:
            chosen[name] = tuple(value)
    if chosen.get("way", "auto") not in WAYS:
        raise ValueError(f"way = {chosen['way']!r}: must be one of {', '.join(WAYS)}")
    return RingSettings(**chosen, own_world=mode == "all")


def _of_environment(variables: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for variable, field in VARIABLES.items():
        text = variables.get(variable, "").strip()
        if not text:
            continue
        try:
            numbers = tuple(int(word) for word in text.split())
        except ValueError:
            raise ValueError(f"{variable} = {text!r}: must be whole numbers, as 4096") from None
        if len(numbers) > 1 and field not in _LISTS:
            raise ValueError(f"{variable} = {text!r}: must be one number")
        found[field] = numbers if field in _LISTS else numbers[0]
    return found


def rows(chosen: RingSettings, world_size: int, device_kind: str) -> list[RingSweep]:
    """List a row for each length and ring size, small rings first: later rows compare with them."""
    plain = "efficient" if device_kind == "cuda" else "plain"
    kernel = "" if chosen.use_flash_attention else plain
    found = []
    for seq_len in dict.fromkeys(chosen.seq_lengths):
        for ring_size in sorted(set(chosen.ring_sizes)):
            case = Case(
                op=chosen.op(seq_len), regime="graph" if chosen.graph else "warm", backend=kernel,
                world_size=ring_size,
            )  # fmt: skip
            world = ring_size if chosen.own_world else world_size
            reason = unfit(ring_size, world, world_size)
            if not reason and chosen.graph and device_kind != "cuda":
                reason = "a CUDA graph needs GPUs"
            if not reason and ring_size > 1 and chosen.dense:
                reason = _impassable(chosen.op(seq_len), ring_size)
            found.append(RingSweep(case, world, reason))
    return found


def _impassable(op: LongAttention, ring_size: int) -> str:
    try:
        volume.check_way(op, ring_size, op.way)
    except ValueError as error:
        return str(error)
    return ""


def unfit(ring_size: int, world: int, available: int) -> str:
    """Say why ``world`` ranks cannot form rings of this size; "" if they can."""
    if ring_size > available:
        return f"a ring of {ring_size} needs {ring_size} ranks, and here are {available}"
    if world % ring_size:
        return f"a ring of {ring_size} does not divide {world} ranks"
    return ""


def known(
    op: LongAttention, ring_size: int, prices: Prices | None
) -> tuple[dict[str, tuple[float, ...]], str]:
    """Return figures known before the case runs, one for each rank of the ring, and the planned
    ways of exchange.

    ``planned_bytes``: bytes each rank receives by the plan, with those of backward if it is timed.
    ``owner_bound_bytes``: the fewest bytes of the forward if queries stay where they are.
    ``rank_pairs``: (query, key) pairs each rank computes, for its own queries or share of heads.
    """
    shards = shards_of(op, ring_size)
    planned = exchange_plan(op, ring_size, shards, prices)
    figures = {
        "planned_bytes": planned.received_bytes(op.direction),
        "owner_bound_bytes": cover.bound_bytes(op, shards),
        "rank_pairs": _pairs(op, shards, planned.ways[0]),
    }
    return {name: tuple(map(float, each)) for name, each in figures.items()}, " ".join(planned.ways)


def _pairs(op: LongAttention, shards: Shards, way: str) -> tuple[float, ...]:
    if op.dilation:
        return cover.pairs_of_ranks(op, shards)
    degree = volume.degree_of(way, op.kv_heads, len(shards.lengths))
    of_groups = cover.pairs_of_ranks(op, volume.grouped(shards, degree))
    return tuple(pairs / degree for pairs in of_groups for _ in range(degree))


def shards_of(op: LongAttention, ring_size: int) -> Shards:
    return (zigzag if op.order == "zigzag" else contiguous)(op.seq_len, ring_size)


def scaled(chosen: RingSettings, most_tokens: int) -> tuple[RingSettings, int]:
    """Shrink the settings for an oracle that holds every pair of tokens: keep the shortest length,
    divide all lengths by one power of two (returned), and leave segments at least one row."""
    seq_len, factor = min(chosen.seq_lengths), 1
    while seq_len // factor > most_tokens:
        factor *= 2
    segments = tuple(
        max(1, min(rate, width), width // factor)
        for width, rate in zip(chosen.segment_lengths, chosen.dilation_rates, strict=True)
    )
    small = msgspec.structs.replace(
        chosen, seq_lengths=(seq_len // factor,), segment_lengths=segments,
        batch_size=min(2, chosen.batch_size),
    )  # fmt: skip
    return small, factor
