"""Costs of a pipeline stage's actions: seconds and bytes of each, from simulating its program.

A kind of stage is its layers, with or without embedding and head, its layout within a pipeline rank
and its recomputation. Each kind is simulated once, alone, for up to three microbatches: the first
gathers weights, the last reduces gradients, and all in between are alike. (With ZeRO-3 and more
traffic than compute, waits settle later: up to 2 % off in random trials. Elsewhere it is exact.)
All layouts with such a stage share the result, whatever their schedule. Without a pipeline there
is one stage: the model.

Tasks of a measured block cost their price times the block's factor. Recomputed operations cost the
same as in the forward pass, unless such a layer was measured: its factor is then of both.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import msgspec
import numpy as np

from meshwise.models import (
    Graph,
    Piece,
    Program,
    Task,
    blocks_of,
    device_of,
    graph,
    piece_of,
    program_of,
    saved_activation_bytes,
    saved_block_bytes,
)
from meshwise.models.apply import repeated
from meshwise.models.kernels import KEPT
from meshwise.models.shard import SPLIT_LOSS
from meshwise.prices import Prices
from meshwise.schedule import Kind
from meshwise.search.charges import (
    NO_HOOKS,
    Pieces,
    beside_of,
    charges,
    corrections,
    grown,
    hooks_of,
    small,
    with_ops,
)
from meshwise.search.simulate import (
    Charge,
    Live,
    Moments,
    Spent,
    memory,
    moments,
    run_program,
)
from meshwise.spec import (
    TIERS,
    AnyModel,
    Block,
    Costs,
    Elementwise,
    LayerKind,
    Layout,
    Op,
    Plan,
    PriceTier,
    WideResNet,
    forms_of,
    layer_kinds,
)
from meshwise.spec.layout import SPLIT, Recompute
from meshwise.spec.op import Dtype

_MOST = 8192  # stages whose costs are kept
Layer = tuple[LayerKind, Recompute]
UNTIMED = Spent(0.0, {}, {}, 0.0, 0.0)


class StageKind(NamedTuple):
    """A kind of stage. ``layout``: within the pipeline rank, with at most three microbatches.
    ``hooked``: FSDP2 calls the host around each layer, if there are several data ranks."""

    model: AnyModel
    seq_len: int
    layers: tuple[LayerKind, ...]
    first: bool
    last: bool
    recompute: tuple[Recompute, ...]
    layout: Layout
    split: bool
    hooked: bool = True


class StageCost(NamedTuple):
    """The cost of a stage. ``actions``: by kind, for the first, a middle and the last microbatch,
    or fewer if there are fewer. ``unit_bytes``: gathered weights and gradients being reduced, of
    the largest unit. ``tier``: the lowest tier of its prices. ``scratch``: bytes that the optimizer
    allocates while it updates."""

    actions: dict[Kind, tuple[tuple[Spent, Live], ...]]
    optimizer: Spent
    resident: dict[str, int]
    unit_bytes: float
    notes: tuple[str, ...]
    tier: PriceTier = TIERS[0]
    scratch: int = 0


def views(layout: Layout) -> list[Layout]:
    """Return each stage's layout within its pipeline rank."""
    if layout.meshes or layout.ways:
        return [layout.of_stage(stage) for stage in range(layout.num_stages)]
    return [layout.of_rank(0)] * layout.num_stages


def kinds_of(model: AnyModel, seq_len: int, layout: Layout) -> list[StageKind]:
    """Return the kind of every stage of ``layout``."""
    count = min(3, layout.num_microbatches)
    plain = {"num_microbatches": count, "recompute": "none", "recompute_layers": None}
    inside = views(layout)
    without = {view: msgspec.structs.replace(view, **plain) for view in set(inside)}
    return [
        StageKind(
            model=model,
            seq_len=seq_len,
            layers=layer_kinds(model, seq_len, layers),
            first=stage == 0,
            last=stage == layout.num_stages - 1,
            recompute=view.recomputed(len(layers)) if view.recompute != "none" else (),
            layout=without[view],
            split=layout.schedule in SPLIT,
        )
        for stage, (layers, view) in enumerate(
            zip(layout.stage_layers(model.layers), inside, strict=True)
        )
    ]


def layers_ahead(prices: Prices) -> int:
    """Return behind how many layers one more adds what any layer in the middle of a stage saves.
    Under offload the first layer keeps what the stage receives, and the last one all."""
    return 1 + prices.costs.recipe.offload


def graph_of(kind: StageKind, by: Costs | Plan) -> Graph:
    """Return the graph of such a stage for one microbatch."""
    return graph(
        kind.model,
        kind.layout.microbatch_size,
        kind.seq_len,
        by.dtype,
        layers=kind.layers,
        first=kind.first,
        last=kind.last,
        recompute=kind.recompute,
        device=device_of(by.cluster, by.lowering),
        attention=by.recipe.attention,
        fp8=by.lowering if by.recipe.fp8 else None,
    )


class StageForm(NamedTuple):
    """The part shared by stages that differ only in microbatch size and in the number of equal
    layers, or turns of a pattern, in a row. ``program``: a stage in which one layer stands for
    several. ``pieces``: the block that holds each task. ``moments``: the memory changes of its
    actions. ``corrected``: for each buffer the index of the ratio that multiplies its counted size:
    the measured ratios of ``saved``, then 1 and 0. ``passing``: buffers of gathered weights, and of
    messages. ``recompute``: one word per layer. ``ops`` and ``sizes``: each task's operation and
    each buffer's bytes at up to two microbatch sizes; other sizes follow linearly."""

    program: Program
    pieces: Pieces
    moments: Moments
    saved: tuple[Piece, ...]
    corrected: np.ndarray
    passing: tuple[list[int], ...]
    recompute: tuple[Recompute, ...]
    ops: dict[int, tuple[Op, ...]]
    sizes: dict[int, np.ndarray]


_priced: dict[tuple[StageKind, Prices], StageCost] = {}


@lru_cache(maxsize=_MOST)
def stage_cost(kind: StageKind, prices: Prices) -> StageCost:
    """Return the seconds and bytes of a stage's actions."""
    prices.begin()
    times, optimizer = run_program(*priced(kind, prices), beside_of(kind.layout, prices))
    if len(_priced) >= _MOST:
        _priced.clear()
    found = _priced[kind, prices] = _cost(kind, prices, times, optimizer)
    return found


def priced(kind: StageKind, prices: Prices) -> tuple[Program, Callable[[Task], Charge]]:
    """Return a stage's program, and what each of its tasks costs."""
    form, stands_for = _form(kind, prices)
    blocks = blocks_in(kind, prices.costs)
    hooks = hooks_of(kind.layout, prices) if kind.hooked else NO_HOOKS
    correct = corrections(blocks, form.pieces, prices, hooks, form.recompute)
    charge = charges(correct, prices)
    if prices.costs.recipe.offload:
        charge = _of_saved(charge, form, _saved(kind, form, prices))
    return repeated(_sized(form, kind.layout.microbatch_size), stands_for), charge


def _of_saved(
    charge: Callable[[Task], Charge], form: StageForm, ratios: Sequence[float]
) -> Callable[[Task], Charge]:
    """Return the charges where a copy to or from the host moves the share of counted bytes that is
    saved; a layer that is recomputed saves its input, whole."""
    share = dict(zip(form.saved, ratios, strict=True))

    def scaled(task: Task) -> Charge:
        found = charge(task)
        if task.stream != "host":
            return found
        layer = int(task.name.split(".")[1])
        whole = bool(form.recompute) and form.recompute[layer] == "full"
        ratio = 1.0 if whole else share.get(form.pieces(task), 1.0)
        return found._replace(time_s=ratio * found.time_s, error_s=ratio * found.error_s)

    return scaled


@lru_cache(maxsize=_MOST)
def stage_memory(kind: StageKind, prices: Prices) -> StageCost:
    """Return the stage's costs, without seconds if it was never priced. No operation needs a
    price."""
    return _priced.get((kind, prices)) or _cost(kind, prices)


def blocks_in(kind: StageKind, by: Costs | Plan) -> dict[tuple[Piece, str], Block]:
    """Return the blocks of a stage by piece and direction; layers in fp8 if the recipe says so."""
    here = {"", *(layer.name for layer in kind.layers)}
    blocks = blocks_of(kind.model, kind.seq_len, kind.layout, by.dtype)
    return {
        key: msgspec.structs.replace(block, dtype="fp8")
        if by.recipe.fp8 and block.part == "layer"
        else block
        for key, block in blocks.items()
        if block.form in here
    }


def pieces_of(kind: StageKind) -> Pieces:
    """Return a function that names the block of a task, as ``Corrections`` does."""
    if "" in forms_of(kind.model, kind.seq_len):
        return lambda task: (task.part, "")
    known: dict[str, Piece] = {}

    def piece(task: Task) -> Piece:
        found = known.get(task.name)
        if found is None:
            found = known[task.name] = piece_of(task, kind.layers)
        return found

    return piece


def _form(kind: StageKind, prices: Prices) -> tuple[StageForm, dict[int, int]]:
    """Return the form of a stage, known at its microbatch size or at two others, and how many
    layers each of its layers stands for. A form keeps at most three equal layers, or turns of a
    pattern, in a row: the second stands for all between the first and the last."""
    none: Recompute = "none"
    words = kind.recompute or (none,) * len(kind.layers)
    apart = prices.costs.recipe.offload and not kind.first  # the first layer keeps what it receives
    short, stands_for = _shortened(tuple(zip(kind.layers, words, strict=True)), int(apart))
    kinds, words = (tuple(of) for of in zip(*short, strict=True))
    shorter = kind._replace(layers=kinds, recompute=words if kind.recompute else ())
    size, several = kind.layout.microbatch_size, tuple(stands_for)
    moe = getattr(kind.model, "experts", None)
    # neither a percentile is linear, nor what is large enough to be offloaded
    linear = (moe is None or moe.load == "mean") and not prices.costs.recipe.offload
    of_any = _of_any_size(kind.layout) if linear else kind.layout
    known = forms(shorter._replace(layout=of_any, hooked=True), several, prices)
    if not known or (size not in known[0].ops and len(known[0].ops) < 2):
        program = program_of(
            graph_of(shorter, prices.costs),
            kind.layout,
            prices.costs.dtype,
            split=kind.split,
            times=dict.fromkeys(several, 1),
            device=device_of(prices.costs.cluster, prices.costs.lowering),
            recipe=prices.costs.recipe,
        )
        if not known:
            spans = [(span.start, span.stop) for span in program.actions]
            roles = [buffer.role for buffer in program.buffers.values()]
            passing = tuple(
                [at for at, role in enumerate(roles) if role == word]
                for word in ("weights", "communication")
            )
            pieces, compiled = pieces_of(shorter), prices.costs.lowering == "compiled"
            moves, bare = moments(program, spans), program._replace(buffers={})
            corrected = _corrected(program, compiled, pieces)
            known.append(
                StageForm(bare, pieces, moves, *corrected, passing, shorter.recompute, {}, {})
            )
        (form,) = known
        form.ops[size] = tuple([task.op for task in program.tasks])
        form.sizes[size] = np.asarray([each.num_bytes for each in program.buffers.values()])
    return known[0], stands_for


@lru_cache(maxsize=1024)
def forms(kind: StageKind, several: tuple[int, ...], prices: Prices) -> list[StageForm]:
    """Return the list that caches the form of stages like this one; ``several``: the layers that
    stand for more than one. Programs are large, so a search clears this cache at its end."""
    return []


@lru_cache(maxsize=_MOST)
def _of_any_size(layout: Layout) -> Layout:
    """Return the layout with microbatches of one sequence. Return it unchanged if tp divides the
    batch, or if cp > 1, since attention's messages over cp depend on the size."""
    cuts = layout.cuts
    if layout.cp > 1 or any(getattr(cuts, room) == "batch" for room in cuts.__struct_fields__):
        return layout
    return msgspec.structs.replace(layout, microbatch_size=1)


def _sized(form: StageForm, size: int) -> Program:
    """Return a form's program with microbatches of this size."""
    ops = form.ops.get(size)
    if ops is None:
        (one, two), both = form.ops, form.ops.values()
        ops = grown(zip(*both, strict=True), size - one, two - one)
    return form.program._replace(tasks=with_ops(form.program.tasks, ops))


def _bytes(form: StageForm, size: int) -> np.ndarray:
    """Return the counted bytes of each buffer with microbatches of this size."""
    found = form.sizes.get(size)
    if found is None:
        (one, two), (of_one, of_two) = form.sizes, form.sizes.values()
        found = of_one + (of_two - of_one) * (size - one) // (two - one)
    return found


@lru_cache(maxsize=_MOST)
def _shortened(layers: tuple[Layer, ...], at: int = 0) -> tuple[list[Layer], dict[int, int]]:
    """Return the shortened list of layers, and how many layers some of them stand for. The first
    ``at`` stand for themselves."""
    short, times = [*layers[:at]], dict[int, int]()

    def repeats(size: int) -> int:
        count = 1
        while layers[at : at + size] == layers[at + count * size : at + (count + 1) * size]:
            count += 1
        return count

    while at < len(layers):
        counts = [(size, repeats(size)) for size in range(1, (len(layers) - at) // 4 + 1)]
        size, count = max(counts, key=lambda of: of[0] * (of[1] - 3), default=(1, 1))
        if count > 3:
            times |= dict.fromkeys(range(len(short) + size, len(short) + 2 * size), count - 2)
        short += layers[at : at + min(count, 3) * size]
        at += count * size
    return short, times


def _cost(
    kind: StageKind,
    prices: Prices,
    times: Sequence[Spent] | None = None,
    optimizer: Spent = UNTIMED,
) -> StageCost:
    form, stands_for = _form(kind, prices)
    program = repeated(form.program, stands_for)
    saved = _saved(kind, form, prices)
    sizes = _bytes(form, kind.layout.microbatch_size)
    ratios = np.asarray([*saved, 1.0, 0.0])
    turns = [loop.times for loop in program.loops]
    lives = memory(form.moments, sizes * ratios[form.corrected], turns)
    times = times or [UNTIMED] * len(lives)
    actions: dict[Kind, tuple[tuple[Spent, Live], ...]] = {}
    for span, spent, live in zip(program.actions, times, lives, strict=True):
        actions[span.kind] = (*actions.get(span.kind, ()), (spent, live))
    return StageCost(
        actions=actions,
        optimizer=optimizer,
        resident=program.resident_bytes,
        unit_bytes=float(sum(sizes[of].max(initial=0) for of in form.passing)),
        notes=tuple(prices.notes),
        tier=prices.tier,
        scratch=program.scratch_bytes,
    )


def _saved(kind: StageKind, form: StageForm, prices: Prices) -> list[float]:
    """Return measured over counted bytes that the forms' pieces save."""
    costs = prices.costs
    blocks = blocks_in(kind, costs)
    measured = [
        blocks.get((piece, "backward")) for piece in form.saved
    ]  # an image model's head is not
    saved = [1.0 if block is None else _saved_ratio(block, prices) for block in measured]
    if "selective" in kind.recompute:
        saved = [
            _of_selective(ratio, kind, costs.dtype) if part == "layer" else ratio
            for (part, _), ratio in zip(form.saved, saved, strict=True)
        ]
    return saved


def _saved_ratio(block: Block, prices: Prices) -> float:
    """Return the share of counted bytes that a block saves: as measured, else by the rule for
    compiled layers. It holds for language models; of images it is not enough."""
    measured = prices.saved_ratio(block)
    by_rule = prices.costs.lowering == "compiled" and not isinstance(block.model, WideResNet)
    if measured is not None or not by_rule:
        return measured or 1.0
    return _saved_bytes(block, True) / _saved_bytes(block, False)


def _saved_bytes(block: Block, compiled: bool) -> int:
    counts = [saved_block_bytes(each, compiled=compiled) for each in small(block) or [block]]
    return counts[0] + (counts[-1] - counts[0]) * (block.microbatch_size - 1)


def _of_selective(ratio: float, kind: StageKind, dtype: Dtype) -> float:
    """Return the ratio of measured to counted bytes for a layer under selective recomputation.

    Compiled code keeps less than counted, because it recomputes the same tensors as selective
    recomputation. Used together, they save these bytes once. Image layers differ from each other,
    so their counted bytes stay.
    """
    if ratio >= 1:
        return ratio
    if isinstance(kind.model, WideResNet):
        return 1.0
    piece = msgspec.structs.replace(kind.model, layers=1)
    size = (piece, kind.layout.microbatch_size, kind.seq_len // kind.layout.cp, dtype)
    whole = saved_activation_bytes(*size)["layer"]
    return max(
        ratio, min(1.0, ratio * whole / saved_activation_bytes(*size, ("selective",))["layer"])
    )


def _corrected(
    program: Program, compiled: bool, pieces: Pieces
) -> tuple[tuple[Piece, ...], np.ndarray]:
    """Return the blocks with a measured ratio, and for each buffer an index: into these blocks, or
    -2 for a factor of 1, or -1 for 0.

    A block's forward results that backward reads, and what a layer sends to the host, take the
    measured ratio. Compiled code never
    writes the result that one elementwise operation passes to the next: its factor is 0. But it
    writes what a split loss reads again after a collective. Buffers that all microbatches
    share belong to data parallelism: their factor is 1.
    """
    stop = max([span.stop for span in program.actions if span.microbatch == 0])
    writers, readers = dict[str, Task](), dict[str, list[Task]]()
    for task in program.tasks[:stop]:
        for name in task.writes:
            writers[name] = task
        for name in task.reads:
            readers.setdefault(name, []).append(task)
    found: dict[Piece, int] = {}
    as_counted, nothing = -2, -1
    apart = {f"{name}.{more}" for name, more in SPLIT_LOSS.items()}

    @cache
    def of_first(name: str) -> int:
        writer, used = writers.get(name), readers.get(name, [])
        copies = [task for task in used if task.stream == "host"]
        if copies and KEPT not in name:
            return found.setdefault(pieces(copies[0]), len(found))
        if writer is None or writer.part not in ("layer", "head") or KEPT in name:
            return as_counted
        if writer.phase != "backward" and any(task.phase == "backward" for task in used):
            return found.setdefault(pieces(writer), len(found))
        if not compiled or not isinstance(writer.op, Elementwise) or writer.name in apart:
            return as_counted
        place = (writer.part, writer.phase)
        within = all(
            (task.part, task.phase) == place and isinstance(task.op, Elementwise) for task in used
        )
        return nothing if used and within else as_counted

    parted = [name.partition("#") for name in program.buffers]
    indices = [of_first(f"{base}#0") if of else as_counted for base, of, _ in parted]
    return tuple(found), np.asarray(indices, dtype=int)
