"""Tables of ``measure ring``: what was measured, what would be, and the check list of --verify.

In: the document of ``pages.ring_rows``, or plain data.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from meshwise.pages.table import Table
from meshwise.pages.tables import ABSENT, percent
from meshwise.units import format_bytes, format_count, format_rate, format_seconds

LEGEND = (
    "Times: median over iterations of the slowest rank. Speedup and efficiency: against a ring of "
    "one at the same length.",
    "Received and memory: of the rank with most. Exposed: what the step takes "
    "longer than without its transfers.",
)

_NOISY = ("(noisy): the forward alone took as long as forward and backward; measure again.",)


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Of a document: what was measured, and what was not."""
    measured = [row for row in found["results"] if row["status"] == "ok"]
    rest = [row for row in found["results"] if row["status"] != "ok"]
    shown = [_measured(found, measured)] if measured else []
    rows = tuple(
        (str(row["seq_length"]), str(row["ring_size"]), row["status"], row["reason"])
        for row in rest
    )
    columns = ("tokens", "ring", "status", "reason")
    return [*shown, *([Table("Not measured", columns, rows, left=4)] if rest else [])]


def _measured(found: Mapping[str, Any], measured: Sequence[Mapping[str, Any]]) -> Table:
    columns = (
        "tokens", "ring", "by", "forward", "total", "speedup", "efficiency", "tokens/s",
        "received", "exposed", "memory",
    )  # fmt: skip
    title = f"{headline(found['config'])}, {found['device']}, {found['world_size']} ranks"
    noisy = any(row["reason"] for row in measured)
    return Table(title, columns, tuple(map(_cells, measured)), (*LEGEND, *_NOISY * noisy), left=3)


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
    """``local x2, gather``: of the branches."""
    counts = Counter(strategy.split())
    return ", ".join(f"{way} x{n}" if n > 1 else way for way, n in counts.items())


def _size(num_bytes: float) -> str:
    return format_rate(num_bytes, "B") if num_bytes else "0"


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    efficiency, peak = row["strong_efficiency"], row["peak_memory_gb"]
    known = efficiency is not None
    return (
        str(row["seq_length"]),
        str(row["ring_size"]),
        ways(row["strategy"]),
        format_seconds(row["forward_time_ms"] / 1e3) + " (noisy)" * bool(row["reason"]),
        format_seconds(row["total_time_ms"] / 1e3),
        f"{efficiency * row['ring_size']:.2f} x" if known else ABSENT,
        percent(efficiency) if known else ABSENT,
        format_count(row["throughput_tokens_per_sec"]),
        _size(row["bytes_received"]),
        format_seconds(row["exposed_comm_ms"] / 1e3) if row["exposed_comm_ms"] else "0",
        ABSENT if peak is None else format_bytes(1e9 * peak),
    )


def listing(
    config: Mapping[str, Any], rows: Sequence[tuple[Mapping[str, Any], str]]
) -> list[Table]:
    """What ``--dry-run`` would measure: each row's figures, or why it would be skipped."""
    cells = tuple(
        (
            str(one["seq_length"]),
            str(one["ring_size"]),
            (reason and f"skipped: {reason}") or ways(one["strategy"]),
            *(("", "") if reason else (
                format_rate(one["flops_per_rank"], "FLOP"), _size(one["planned_bytes"]),
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
