"""What ``run --dry-run`` would execute, without prices: plans in, a table out."""

from collections.abc import Sequence

from meshwise.models import num_parameters
from meshwise.pages.table import Table
from meshwise.spec import Plan, WideResNet
from meshwise.units import format_count

LEGEND = (
    "Batch: microbatches x the sequences or images of one on all data ranks. "
    "Stages: layers of each."
)


def table(plans: Sequence[Plan]) -> Table:
    """What a step of each plan is."""
    rows = tuple(
        (
            plan.layout.name,
            format_count(num_parameters(plan.model)),
            _batch(plan),
            _sample(plan),
            _layers(plan),
        )
        for plan in plans
    )
    columns = ("layout", "parameters", "batch", "each", "stages")
    return Table("A step", columns, rows, (LEGEND,))


def _batch(plan: Plan) -> str:
    layout = plan.layout
    count, rows = layout.num_microbatches, layout.microbatch_rows
    return f"{count} x {rows} = {plan.workload.global_batch_size}"


def _sample(plan: Plan) -> str:
    if isinstance(plan.model, WideResNet):
        return f"{plan.model.image_size} x {plan.model.image_size}"
    return f"{plan.workload.seq_len} tokens"


def _layers(plan: Plan) -> str:
    """``3 x 8`` or ``8 + 8 + 16``; of one stage the number alone."""
    counts = [len(stage) for stage in plan.layout.stage_layers(plan.model.layers)]
    equal = len(set(counts)) == 1 and len(counts) > 2
    return f"{len(counts)} x {counts[0]}" if equal else " + ".join(map(str, counts))
