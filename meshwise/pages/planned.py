"""Plans as tables: what ``run --dry-run`` would execute, and a plan in full."""

from collections.abc import Sequence

from meshwise.models import num_parameters
from meshwise.pages.steps import StepResult
from meshwise.pages.table import Table, listed
from meshwise.pages.tables import LAYOUT_LEGEND, headline, layouts
from meshwise.spec import Plan, WideResNet
from meshwise.units import format_count

LEGEND = (
    "Batch: microbatches x the sequences or images of one on all data ranks. "
    "Stages: layers of each."
)
NOTHING = "Nothing was run."


def table(plans: Sequence[Plan]) -> Table:
    """Show the step of each plan; for plans with prices, what they predict."""
    if all(plan.prediction is not None for plan in plans):
        return layouts(plans, (NOTHING,))
    return listed(
        headline(plans[0]),
        plans,
        ("layout", lambda plan: plan.layout.name),
        ("devices", lambda plan: str(plan.layout.num_devices)),
        ("parameters", lambda plan: format_count(num_parameters(plan.model))),
        ("batch", _batch),
        ("each", _sample),
        ("stages", _layers),
        ("optimizer", lambda plan: plan.recipe.optimizer),
        legend=(LEGEND, NOTHING),
    )


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


def of(results: Sequence[StepResult]) -> list[Table]:
    """The plans of these runs, each once."""
    return list(dict.fromkeys(in_full(result.plan, result.mode) for result in results))


def in_full(plan: Plan, mode: str = "train") -> Table:
    """Workload, layout, stages and, of training, the recipe."""
    size, is_image = plan.workload, isinstance(plan.model, WideResNet)
    of = "images" if is_image else f"sequences of {size.seq_len} tokens"
    rows = [
        ("workload", f"{size.global_batch_size} {of} in a batch"),
        ("layout", plan.layout.name),
    ]
    for number, stage in enumerate(plan.stages):
        held = f"layers {stage.first_layer} to {stage.last_layer - 1}"
        mesh = f"dp{stage.dp} cp{stage.cp} tp{stage.tp} ep{stage.ep}"
        rows.append((f"stage {number}", f"{held} on pipeline rank {stage.pipeline_rank}: {mesh}"))
    if mode == "train":
        rows.append(("recipe", _recipe(plan)))
    return Table(headline(plan), ("", ""), tuple(rows), (LAYOUT_LEGEND,), left=2)


def _recipe(plan: Plan) -> str:
    words = {True: "on", False: "off"}
    fields = {name: getattr(plan.recipe, name) for name in plan.recipe.__struct_fields__}
    said = {n: words[v] if isinstance(v, bool) else str(v) for n, v in fields.items()}
    return ", ".join(f"{name} {value}" for name, value in said.items())
