"""Tables of ``measure ring``: what was measured, what would be, and the check list of --verify.

In: the document of ``pages.ring_rows``, or plain data.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from meshwise.pages.table import Table, filled, listed
from meshwise.pages.tables import percent, shown, size
from meshwise.units import format_bytes, format_count, format_rate, format_seconds

LEGEND = (
    "Times: median over iterations of the slowest rank. Speedup and efficiency: against a ring of "
    "one at the same length.",
    "Received and memory: of the rank with most. Exposed: what the step takes "
    "longer than without its transfers.",
)

_NOISY = ("(noisy): the forward alone took as long as forward and backward; measure again.",)


def tables(found: Mapping[str, Any]) -> list[Table]:
    """The rows of a document: first those that were measured, then the others."""
    done = [row for row in found["results"] if row["status"] == "ok"]
    rest = [row for row in found["results"] if row["status"] != "ok"]
    measured = listed(
        f"{headline(found['config'])}, {found['device']}, {found['world_size']} ranks",
        done,
        *_SHAPE,
        ("by", lambda row: ways(row["strategy"])),
        ("forward", lambda row: _ms(row["forward_time_ms"]) + " (noisy)" * bool(row["reason"])),
        ("total", lambda row: _ms(row["total_time_ms"])),
        ("speedup", lambda row: shown(row["strong_efficiency"], _times(row["ring_size"]))),
        ("efficiency", lambda row: percent(row["strong_efficiency"])),
        ("tokens/s", lambda row: format_count(row["throughput_tokens_per_sec"])),
        ("received", lambda row: size(row["bytes_received"])),
        ("exposed", lambda row: _ms(row["exposed_comm_ms"]) if row["exposed_comm_ms"] else "0"),
        ("memory", lambda row: shown(row["peak_memory_gb"], lambda gb: format_bytes(1e9 * gb))),
        legend=(*LEGEND, *_NOISY * any(row["reason"] for row in done)),
        left=3,
    )
    others = listed(
        "Not measured",
        rest,
        *_SHAPE,
        ("status", lambda row: row["status"]),
        ("reason", lambda row: row["reason"]),
        left=4,
    )
    return filled(measured, others)


_SHAPE = (
    ("tokens", lambda row: str(row["seq_length"])),
    ("ring", lambda row: str(row["ring_size"])),
)


def _ms(time_ms: float) -> str:
    return format_seconds(time_ms / 1e3)


def _times(ring_size: int) -> Callable[[float], str]:
    return lambda efficiency: f"{efficiency * ring_size:.2f} x"


def headline(config: Mapping[str, Any]) -> str:
    """``Dilated attention, batch 2, 12 x 64 heads, float16, w 2048/4096 r 1/2``."""
    heads = f"{config['num_heads']} x {config['embed_dim'] // config['num_heads']} heads"
    if config["num_kv_heads"] not in (None, config["num_heads"]):
        heads += f" over {config['num_kv_heads']}"
    words = ["Dense attention" if config["dense"] else "Dilated attention"]
    words += [f"batch {config['batch_size']}", heads, config["dtype"]]
    if not config["dense"]:
        names = {"segment_lengths": "w", "dilation_rates": "r"}
        words.append(
            " ".join(f"{w} {'/'.join(map(str, config[name]))}" for name, w in names.items())
        )
    words += ["causal"] if config["causal"] else []
    words += ["forward only"] if config["forward_only"] else []
    return ", ".join(words)


def ways(strategy: str) -> str:
    """``local local gather`` of the branches as ``local x2, gather``."""
    each = ((way, len(list(same))) for way, same in groupby(strategy.split()))
    return ", ".join(way if count == 1 else f"{way} x{count}" for way, count in each)


def listing(
    config: Mapping[str, Any], rows: Sequence[tuple[Mapping[str, Any], str]]
) -> list[Table]:
    """The rows that ``--dry-run`` lists: their figures, or why they would be skipped."""
    cells = tuple(
        (
            str(one["seq_length"]),
            str(one["ring_size"]),
            (reason and f"skipped: {reason}") or ways(one["strategy"]),
            *(("", "") if reason else (
                format_rate(one["flops_per_rank"], "FLOP"), size(one["planned_bytes"]),
            )),
        )
        for one, reason in rows
    )  # fmt: skip
    columns = ("tokens", "ring", "by", "a rank computes", "and receives")
    legend = ("Of an iteration, the rank that receives most. Nothing was measured.",)
    return [Table(headline(config), columns, cells, legend, left=3)]


def checks(found: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> list[Table]:
    """The check list of ``--verify``."""
    words = {True: "passed", False: "FAILED", None: "not done"}
    rows = tuple(
        (str(one["ring_size"]), one["name"], words[one["passed"]], one["found"]) for one in found
    )
    failed = sum(one["passed"] is False for one in found)
    verdict = f"{failed} of {len(rows)} tests FAILED" if failed else "All tests passed"
    columns = ("ring", "test", "", "found")
    return [
        Table("Ring attention against its definition", columns, rows, (*notes, verdict), left=4)
    ]
