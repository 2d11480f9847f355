"""A row of ``measure ring``'s JSON, which ``report --scaling`` reads: a length and a ring size.

The names are ours and those of the benchmark of RingDilatedAttentionV2Collective. ``pages.ring``
has the formulas. A figure is None if it does not apply or could not be measured.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

# ranges in which figures and quotients stay finite
Whole = Annotated[int, Meta(ge=1, le=2**53)]
Amount = Annotated[float, Meta(ge=0, le=1e18)]
Positive = Annotated[float, Meta(ge=1e-9, le=1e18)]


class RingRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row; GB = 1e9. Unknown fields are ignored: another version may have written them."""

    seq_length: Whole
    ring_size: Whole
    world_size: Whole
    rank: int = 0
    forward_time_ms: Positive | None = None
    backward_time_ms: Amount | None = None
    total_time_ms: Positive | None = None
    memory_allocated_gb: Amount | None = None
    memory_reserved_gb: Amount | None = None
    throughput_tokens_per_sec: Positive | None = None
    effective_batch_size: Whole | None = None
    distributed_overhead_ms: float | None = None
    communication_time_ms: Amount | None = None
    layout: str | None = None
    strategy: str | None = None
    peak_memory_gb: Positive | None = None
    time_min_ms: Amount | None = None
    time_median_ms: Amount | None = None
    time_p95_ms: Positive | None = None
    time_max_ms: Amount | None = None
    forward_min_ms: Amount | None = None
    forward_median_ms: Amount | None = None
    forward_p95_ms: Amount | None = None
    forward_max_ms: Amount | None = None
    bytes_sent: Amount | None = None
    bytes_received: Amount | None = None
    comm_lower_bound_bytes: Amount | None = None
    comm_lower_bound: str | None = None
    owner_bound_bytes: Amount | None = None
    comm_efficiency: Amount | None = None
    exposed_comm_ms: Amount | None = None
    overlap_fraction: Amount | None = None
    achieved_tflops: Amount | None = None
    flop_convention: str | None = None
    strong_efficiency: Amount | None = None
    weak_efficiency: Amount | None = None
    load_imbalance: Amount | None = None
    collectives: Amount | None = None
    baseline_id: str | None = None
    status: Literal["ok", "oom", "skipped", "error"]
    reason: str | None = None

    @property
    def time_ms(self) -> float | None:
        return self.total_time_ms if self.status == "ok" else None

    @property
    def is_noisy(self) -> bool:
        """Whether noise hides the backward: forward alone took as long as both."""
        return self.backward_time_ms == 0 or (self.reason or "").startswith("noisy")

    @property
    def peak_gb(self) -> float | None:
        return self.peak_memory_gb if self.status == "ok" else None
