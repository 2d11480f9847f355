"""Make plans without prices from the user's model and layout, and check plans.

In: names, records, JSON or files of them. Out: a ``Plan`` without a prediction, or a ValueError
that names what does not fit, before any process starts.
"""

from meshwise.models import catalogue
from meshwise.options.run import RunOptions
from meshwise.spec import AnyModel, Cluster, Layout, Plan, Recipe, Workload, stages_of
from meshwise.spec.layout import SPLIT
from meshwise.verbs import files, measure


def plan_of(asked: RunOptions) -> Plan:
    """Plan how to run a model on this machine. Without a layout, divide the batch over all devices,
    and in training the state too (zero 3). The batch size defaults to the layout's."""
    model, nproc = asked.model, asked.nproc
    assert model is not None
    chosen = catalogue.find_any(model)
    layout = None if asked.layout is None else files.record(asked.layout, Layout)
    wanted = nproc if layout is None else layout.num_devices
    machine, size = measure.place(asked.cluster, wanted, keep=False)
    if layout is not None and nproc not in (None, size):
        raise ValueError(
            f"nproc = {nproc}: the layout {layout.name} has {size} ranks; give one of {nproc}, "
            "or leave nproc out"
        )
    usual, batch = catalogue.default_workload(machine, chosen), asked.global_batch_size
    if batch is None:
        batch = usual.global_batch_size
        if layout is not None:
            batch = layout.batch_size
    layout = layout or _data_parallel(size, batch, sharded=asked.mode == "train")
    seq_len = usual.seq_len if asked.seq_len is None else asked.seq_len
    on_gpu = machine.device.kind == "cuda"
    lowering = "eager" if layout.schedule in SPLIT else machine.device.lowering
    return build(
        chosen,
        Workload(global_batch_size=batch, seq_len=seq_len),
        layout,
        machine,
        dtype=asked.dtype or ("bf16" if on_gpu else "fp32"),
        lowering=asked.lowering or lowering,
        recipe=Recipe() if asked.recipe is None else files.record(asked.recipe, Recipe),
    )


def _data_parallel(size: int, batch: int, *, sharded: bool) -> Layout:
    if batch % size:
        raise ValueError(
            f"global_batch_size = {batch}: must be a multiple of the {size} devices; give another, "
            "or --layout"
        )
    return Layout(dp=size, zero=3 if sharded and size > 1 else 0, microbatch_size=batch // size)


def build(
    model: AnyModel,
    workload: Workload,
    layout: Layout,
    cluster: Cluster,
    *,
    dtype: str,
    lowering: str,
    recipe: Recipe,
) -> Plan:
    """Make a plan and check it."""
    from meshwise import search

    if dtype not in ("fp32", "bf16"):
        raise ValueError(f"dtype = {dtype!r}: must be fp32 or bf16")
    if lowering not in ("eager", "compiled"):
        raise ValueError(f"lowering = {lowering!r}: must be eager or compiled")
    search.check(model, workload, layout)
    return Plan(
        model=model,
        workload=workload,
        cluster=cluster,
        dtype=dtype,  # type: ignore[arg-type]
        lowering=lowering,  # type: ignore[arg-type]
        layout=layout,
        recipe=recipe,
        stages=stages_of(layout, model),
    )


def check(plan: Plan) -> None:
    """Refuse a plan that cannot run here, no matter who wrote it."""
    from meshwise import search

    search.check(plan.model, plan.workload, plan.layout)
    if plan.dtype not in ("fp32", "bf16"):
        raise ValueError(f"Plan.dtype = {plan.dtype!r}: training runs in fp32 or bf16")
