"""Read what ``measure ring`` wrote, as rows: how time and memory change with the size of the ring.

In: a folder of ``ring_v2_collective_benchmark_*.json``. Out: one ``Row`` for each sequence length
and ring size. With t(P, N) the time of a ring of P ranks over N tokens, the slowest rank's median:

    speedup            t(1, N) / t(P, N)
    strong efficiency  speedup / P
    weak efficiency    t(1, N / P) / t(P, N): work a rank is constant where segments are fixed
    exposed share      time of the step that goes when nothing is sent / t(P, N)
    memory share       peak of a rank in a ring of P / peak of one rank alone, same N; ideal 1 / P

They are made here, not read, because each ring size may come from a run of its own.
"""

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from meshwise import store
from meshwise.spec.ring import RingRow, Whole

SCHEMA_VERSION = 1
PATTERN, LATEST = "ring_v2_collective_benchmark_*.json", "latest.json"

_NONE = RingRow(seq_length=0, ring_size=1, world_size=1, status="skipped")


class _Config(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that all runs shown together share."""

    batch_size: Whole = 1
    embed_dim: Whole | None = None
    num_heads: Whole | None = None
    num_kv_heads: Whole | None = None
    segment_lengths: tuple[Whole, ...] = ()
    dilation_rates: tuple[Whole, ...] = ()
    use_flash_attention: bool = True
    dtype: str | None = None
    causal: bool = False
    window: Whole | None = None
    offsets: str | None = None
    offset_heads: str | None = None
    mixture: str | None = None
    dense: bool = False
    way: str | None = None
    order: str | None = None
    forward_only: bool = False
    graph: bool = False


class _Run(msgspec.Struct, frozen=True, kw_only=True):
    """``told``: the configuration as it was written, with what is only shown."""

    schema_version: int = SCHEMA_VERSION
    config: _Config
    told: dict[str, Any]
    world_size: Whole
    timestamp: str
    results: tuple[RingRow, ...]
    device: str | dict[str, Any] | None = None


class Row(NamedTuple):
    """A result beside one rank's at the same length; None where that is not there."""

    result: RingRow
    speedup: float | None
    strong: float | None
    weak: float | None
    exposed_share: float | None
    memory_share: float | None
    tokens_per_gb: float | None


class Scaling(NamedTuple):
    """``left_out``: files of another configuration or older, with the reason."""

    config: dict[str, Any]
    device: str
    rows: tuple[Row, ...]
    files: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def lengths(self) -> list[int]:
        return sorted({row.result.seq_length for row in self.rows})

    @property
    def ring_sizes(self) -> list[int]:
        return sorted({row.result.ring_size for row in self.rows})

    @property
    def is_dense(self) -> bool:
        return bool(self.config.get("dense")) or not self.config.get("segment_lengths")

    def at(self, seq_length: int, ring_size: int) -> Row | None:
        wanted = (seq_length, ring_size)
        return next((r for r in self.rows if wanted == (r[0].seq_length, r[0].ring_size)), None)


def read(folder: Path | str) -> Scaling:
    """The newest run of each world size, of the newest run's configuration and device. Of two rows
    of one length and ring size the newer counts, but a skipped one only where there is no other.
    ValueError where there is nothing to show."""
    folder = Path(folder)
    paths = sorted(folder.glob(PATTERN)) or [p for p in (folder / LATEST,) if p.exists()]
    runs = sorted(((_load(path), path.name) for path in paths), key=_age, reverse=True)
    if not any(run.results for run, _ in runs):
        raise ValueError(
            f"{folder}: holds no results of a scaling benchmark; write some with "
            f"`meshwise measure ring --output_dir {folder}`"
        )
    newest, kept, left_out = runs[0][0], dict[int, tuple[_Run, str]](), []
    for run, name in runs:
        if other := _differs(run, newest):
            left_out.append(f"{name}: another {other} than the newest run's")
        elif run.world_size in kept:
            left_out.append(f"{name}: older than {kept[run.world_size][1]}")
        else:
            kept[run.world_size] = run, name
    results, batch = _merged([run for run, _ in kept.values()]), newest.config.batch_size
    rows = tuple(_row(result, results, batch) for _, result in sorted(results.items()))
    files = tuple(name for _, name in kept.values())
    return Scaling(newest.told, _device(newest.device), rows, files, tuple(left_out))


def _load(path: Path) -> _Run:
    try:
        found = store.read(path, dict)
        run = store.convert(found | {"told": found.get("config", {})}, _Run, str(path))
    except ValueError as error:
        raise ValueError(
            f"{error}; only files that `meshwise measure ring` wrote can be read"
        ) from None
    for number, result in enumerate(run.results):
        if result.status == "ok" and result.total_time_ms is None:
            field = f"results[{number}].total_time_ms"
            raise ValueError(f"{path}: {field} = None: a row whose status is ok has a time")
    return run


def _age(run: tuple[_Run, str]) -> tuple[str, str]:
    return run[0].timestamp, run[1]


def _differs(run: _Run, newest: _Run) -> str | None:
    """The first thing in which two runs are not comparable."""
    if run.device != newest.device:
        return "device"
    names = _Config.__struct_fields__
    changed = (name for name in names if getattr(run.config, name) != getattr(newest.config, name))
    return next(changed, None)


def _device(told: Any) -> str:
    if isinstance(told, dict):
        return str(told.get("name", "unknown device"))
    return str(told or "unknown device")


def _merged(runs: list[_Run]) -> dict[tuple[int, int], RingRow]:
    found: dict[tuple[int, int], RingRow] = {}
    for result in (result for run in runs for result in run.results):
        key = result.seq_length, result.ring_size
        if key not in found or (found[key].status == "skipped" != result.status):
            found[key] = result
    return found


def _row(result: RingRow, results: dict[tuple[int, int], RingRow], batch_size: int) -> Row:
    length, ring = result.seq_length, result.ring_size
    alone = results.get((length, 1), _NONE)
    smaller = _NONE if length % ring else results.get((length // ring, 1), _NONE)
    speedup = _ratio(alone.time_ms, result.time_ms)
    batch = result.effective_batch_size or batch_size
    return Row(
        result,
        speedup=speedup,
        strong=_ratio(speedup, ring),
        weak=_ratio(smaller.time_ms, result.time_ms),
        exposed_share=_ratio(result.exposed_comm_ms, result.time_ms),
        memory_share=_ratio(result.peak_gb, alone.peak_gb),
        tokens_per_gb=_ratio(batch * length, result.peak_gb),
    )


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def subject(scaling: Scaling) -> str:
    """Name what was measured: ``dilated 2048/1 4096/2, causal, 12 heads x 64, fp16, ...``."""
    config, said = scaling.config, []
    if scaling.is_dense:
        said.append("dense attention")
    else:
        rates = config.get("dilation_rates", [])
        pairs = itertools.zip_longest(config["segment_lengths"], rates, fillvalue="?")
        said.append("dilated attention " + " ".join(f"{w}/{r}" for w, r in pairs))
    if config.get("causal"):
        said.append("causal")
    heads, width = config.get("num_heads"), config.get("embed_dim")
    if heads and width:
        kv_heads = config.get("num_kv_heads") or heads
        shared = "" if kv_heads == heads else f" ({kv_heads} of k and v)"
        said.append(f"{heads} heads × {width // heads}{shared}")
    said.append(f"batch {config.get('batch_size', 1)}")
    return ", ".join([*said, *filter(None, [config.get("dtype")]), scaling.device])


def length(tokens: int) -> str:
    """``65,536``."""
    return f"{tokens:,}"
