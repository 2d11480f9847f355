"""The JSON document of ``measure ring``, and the check list of --verify.

In: a run directory's info and samples. Out: the document that ``report --scaling`` reads, one
``RingRow`` per length and ring size. t(P) is the time of rings of P ranks: the slowest rank's,
median over iterations. N is the length:

    throughput_tokens_per_sec   batch N / t(P), of one ring
    strong_efficiency           t(1) / (P t(P)) at one N
    weak_efficiency             t(1) at N/P / t(P) at N
    distributed_overhead_ms     t(P) - t(1) / P
    exposed_comm_ms             t(P) - t(P) of the same computation without its transfers
    overlap_fraction            1 - exposed / communication_time_ms, the transfers alone
    comm_efficiency             comm_lower_bound_bytes / bytes_received; 1 is as planned
    load_imbalance              most / mean of the pairs that a rank computes

time_* and forward_* are taken over all ranks' own times of all iterations. GB = 1e9. A figure that
could not be measured, or has no baseline among the rows, is null.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import Any

import msgspec
import numpy as np

from meshwise.pages.spread import each, number
from meshwise.pages.table import Table
from meshwise.spec import LongAttention, RunInfo, Sample
from meshwise.spec.ring import RingRow

NOISY = "noisy: the forward alone took as long as forward and backward; measure again"
CONVENTION = "attended pairs, 2 FLOPs a multiply-add, backward 2.5 x forward"
_SOURCE_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


def document(run_dir: str, info: RunInfo, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the JSON of a run. The run's provenance has its settings."""
    config = dict(info.provenance["ring"])
    dtype = config.pop("dtype")
    config["dtype"] = _SOURCE_DTYPES[dtype]
    config["num_kv_heads"] = config["num_kv_heads"] or config["num_heads"]
    done = {_key(sample): sample for sample in samples if sample.status == "ok"}
    stamp = info.started.rstrip("Z").replace("-", "").replace(":", "").replace("T", "_")
    return {
        "schema_version": 1,
        "config": config,
        "world_size": info.world_size,
        "timestamp": stamp,
        "run_dir": run_dir,
        "device": info.cluster.device.name,
        "results": [_row(sample, info.world_size, done) for sample in samples],
    }


def file_name(found: Mapping[str, Any]) -> str:
    return f"ring_v2_collective_benchmark_{found['timestamp']}_world{found['world_size']}.json"


def _op(sample: Sample) -> LongAttention:
    assert isinstance(sample.case.op, LongAttention)
    return sample.case.op


def _key(sample: Sample) -> tuple[int, int]:
    return _op(sample).seq_len, sample.case.world_size


def _row(sample: Sample, world_size: int, done: Mapping[tuple[int, int], Sample]) -> dict[str, Any]:
    seq_len, ring_size = _key(sample)
    figures: dict[str, Any] = {"reason": sample.reason}
    if sample.status == "ok":
        figures = _times(sample) | _scaling(sample, done) | _transfers(sample) | _work(sample)
    row = RingRow(
        seq_length=seq_len,
        ring_size=ring_size,
        world_size=int(number(sample.metrics, "world_size") or world_size),
        status="error" if sample.status == "hung" else sample.status,
        **figures,
    )
    return msgspec.to_builtins(row)  # type: ignore[no-any-return]


def _times(sample: Sample) -> dict[str, Any]:
    op, total_s = _op(sample), _total_s(sample)
    forward_all = each(sample.metrics, "forward_rank_times_s")
    count = len(forward_all) // len(sample.rank_times_s)  # iterations; the slowest rank of each
    forward_s = median([max(forward_all[i::count]) for i in range(count)])
    all_times = [time_s for own in sample.rank_times_s for time_s in own]
    backward = op.direction == "backward"
    noisy = backward and forward_s >= total_s  # then their difference has no meaning
    return {
        "reason": NOISY if noisy else "",
        "forward_time_ms": 1e3 * forward_s,
        "backward_time_ms": 1e3 * (total_s - forward_s) if backward and not noisy else None,
        "total_time_ms": 1e3 * total_s,
        "throughput_tokens_per_sec": op.batch * op.seq_len / total_s,
        "effective_batch_size": op.batch,
        **_spread("time", all_times),
        **_spread("forward", forward_all),
    }


def _spread(name: str, times_s: Sequence[float]) -> dict[str, float]:
    shares = {"min": 0.0, "median": 0.5, "p95": 0.95, "max": 1.0}
    quantiles = (1e3 * float(np.quantile(times_s, share)) for share in shares.values())
    return {f"{name}_{word}_ms": ms for word, ms in zip(shares, quantiles, strict=True)}


def _scaling(sample: Sample, done: Mapping[tuple[int, int], Sample]) -> dict[str, Any]:
    (seq_len, ring_size), total_s = _key(sample), _total_s(sample)
    found: dict[str, Any] = {}
    if alone := done.get((seq_len, 1)):
        share_s = _total_s(alone) / ring_size
        found |= {
            "distributed_overhead_ms": 1e3 * (total_s - share_s),
            "strong_efficiency": share_s / total_s,
            "baseline_id": alone.case_id,
        }
    short = done.get((seq_len // ring_size, 1)) if seq_len % ring_size == 0 else None
    return found | ({"weak_efficiency": _total_s(short) / total_s} if short else {})


def _transfers(sample: Sample) -> dict[str, Any]:
    sent, received = (max(each(sample.metrics, name)) for name in ("sent_bytes", "received_bytes"))
    bound = max(each(sample.metrics, "planned_bytes"))
    found: dict[str, Any] = {
        "bytes_sent": int(sent),
        "bytes_received": int(received),
        "comm_lower_bound_bytes": int(bound),
        "comm_lower_bound": "planned",
        "owner_bound_bytes": int(max(each(sample.metrics, "owner_bound_bytes"))),
        "comm_efficiency": bound / received if bound and received else None,
        "collectives": int(max(each(sample.metrics, "collectives"))),
    }
    if not found["collectives"]:
        return found | {"communication_time_ms": 0.0, "exposed_comm_ms": 0.0}
    exposed_s = max(0.0, _total_s(sample) - median(each(sample.metrics, "muted_times_s")))
    found["exposed_comm_ms"] = 1e3 * exposed_s
    if transfers := each(sample.metrics, "transfer_times_s"):
        transfer_s = median(transfers)
        found["communication_time_ms"] = 1e3 * transfer_s
        found["overlap_fraction"] = max(0.0, 1 - exposed_s / transfer_s)
    return found


def _work(sample: Sample) -> dict[str, Any]:
    op, pairs = _op(sample), each(sample.metrics, "rank_pairs")
    names = ("peak_bytes", "reserved_bytes")
    peak, reserved = (max(each(sample.metrics, name), default=None) for name in names)
    each_s = _total_s(sample) * sample.case.world_size
    return {
        "layout": op.order,
        "strategy": sample.reason,
        "peak_memory_gb": peak and peak / 1e9,
        "memory_allocated_gb": peak and peak / 1e9,
        "memory_reserved_gb": reserved and reserved / 1e9,
        "achieved_tflops": op.flops / each_s / 1e12,
        "flop_convention": CONVENTION,
        "load_imbalance": max(pairs) * len(pairs) / sum(pairs) if sum(pairs) else 1.0,
    }


def _total_s(sample: Sample) -> float:
    return median(sample.times_s)


def ways(strategy: str) -> str:
    """Return the branches' ``local local gather`` as ``local x2, gather``."""
    each = ((way, len(list(same))) for way, same in groupby(strategy.split()))
    return ", ".join(way if count == 1 else f"{way} x{count}" for way, count in each)


def checks(found: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> list[Table]:
    """Return the check list of ``--verify``."""
    words = {True: "passed", False: "FAILED", None: "not done"}
    rows = tuple((str(c["ring_size"]), c["name"], words[c["passed"]], c["found"]) for c in found)
    failed = sum(one["passed"] is False for one in found)
    verdict = f"{failed} of {len(rows)} tests FAILED" if failed else "All tests passed"
    title, heads = "Ring attention against its definition", ("ring", "test", "", "found")
    return [Table(title, heads, rows, (*notes, verdict), left=4)]
