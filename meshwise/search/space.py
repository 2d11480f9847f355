"""Every legal uniform layout of a model on N devices, and why the others are not legal.

dp * tp = N; ZeRO 0 to 3 over dp; sequence parallelism over tp; the batch of a dp rank cut into
equal microbatches. Layouts that would run the same program as another are dropped by name.
"""

from collections import Counter
from collections.abc import Iterator

from meshwise.models import check_divides, graph
from meshwise.spec import Layout, Model, Removal, Workload


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def legal_layouts(
    model: Model, workload: Workload, num_devices: int, max_tp: int
) -> tuple[list[Layout], list[Removal]]:
    """Layouts in a fixed order, and how many candidates each constraint removed."""
    sizes = dict(graph(model, 1, workload.seq_len, "fp32").sizes)
    removed: Counter[str] = Counter()
    layouts = []
    for layout in _candidates(workload, num_devices, max_tp, removed):
        reason = check_divides(sizes, layout, workload.seq_len)
        if reason is None and layout.zero == 1 and layout.num_microbatches == 1:
            reason = "zero 1 is zero 2 when there is one microbatch"
        if reason is None:
            layouts.append(layout)
        else:
            removed[reason] += 1
    return layouts, [Removal(constraint=name, count=n) for name, n in sorted(removed.items())]


def _candidates(
    workload: Workload, num_devices: int, max_tp: int, removed: Counter[str]
) -> Iterator[Layout]:
    for tp in divisors(num_devices):
        dp = num_devices // tp
        if tp > max_tp:
            removed[f"tp = {tp} would leave the host (tp <= {max_tp})"] += 1
            continue
        if workload.global_batch_size % dp:
            removed[
                f"dp = {dp} does not divide global_batch_size = {workload.global_batch_size}"
            ] += 1
            continue
        local_batch = workload.global_batch_size // dp
        for microbatch_size in divisors(local_batch):
            for zero in range(4) if dp > 1 else (0,):
                for sequence_parallel in (False, True) if tp > 1 else (False,):
                    yield Layout(
                        dp=dp,
                        tp=tp,
                        zero=zero,
                        sequence_parallel=sequence_parallel,
                        microbatch_size=microbatch_size,
                        num_microbatches=local_batch // microbatch_size,
                    )
