"""apply: lay out a module that you wrote, or one of Hugging Face, as a plan says.

In: a plan, the module with its weights, and a strategy for each weight (``models.strategies``),
with defaults for LlamaForCausalLM and the like. Out: the same module, changed in place, with a
report of how each weight is cut and which could not be mapped. The training loop is yours: make the
optimizer afterwards, and divide the loss by the number of microbatches.
"""

import io
import itertools
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from meshwise.launcher import Job
from meshwise.models import strategies as known_strategies
from meshwise.models.strategies import WHOLE, Known
from meshwise.pages import table
from meshwise.spec import Layout, Plan, Recipe
from meshwise.verbs import files

if TYPE_CHECKING:
    from torch import Tensor, nn

    from meshwise.parallel.foreign import Init, Laid
    from meshwise.parallel.mesh import MeshPlace


NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")  # a layer's number in a name
Row = tuple[str, str, str]
log = logging.getLogger("meshwise")


class Unmapped(NamedTuple):
    """A parameter with its shape, or a pattern without one, and why it is not mapped."""

    name: str
    shape: tuple[int, ...]
    why: str


@dataclass(frozen=True)
class Applied:
    """The laid-out module; ``print`` it for a report. ``mapped``: strategies by parameter.
    ``units``: modules that are each sharded, recomputed and compiled separately."""

    model: "nn.Module"
    place: "MeshPlace"
    mapped: dict[str, str]
    unmapped: tuple[Unmapped, ...]
    units: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def data_rank(self) -> int:
        """This rank's number among the ``layout.dp`` shares of a batch; equal for tp ranks."""
        import torch.distributed as dist

        return dist.get_rank() // self.place.layout.tp

    @property
    def layout(self) -> Layout:
        return self.place.layout

    def before_backward(self, *, last: bool) -> None:
        """Tell FSDP2, before each microbatch's backward, whether it is the step's last one. This
        saves communication if you accumulate gradients, and changes no result."""
        from meshwise.parallel import data

        data.before_backward(self.model, self.layout, last=last)

    def clip_gradients(self, max_norm: float) -> "Tensor":
        """Scale gradients to a norm of at most ``max_norm``, as torch.nn.utils.clip_grad_norm_
        does, with divided experts too. Return the norm before, on the device."""
        from meshwise.engine import optimizer

        moved = [p for p in self.model.parameters() if p.grad is not None]
        return optimizer.clip_gradients(moved, max_norm, alone=self.layout.num_devices == 1)

    def __str__(self) -> str:
        shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        cut = {n: s for n, s in self.mapped.items() if self.layout.tp > 1 or s == "expert"}
        mapped, unmapped = _alike(
            [(name, _sizes(shapes.get(name, ())), said) for name, said in cut.items()],
            [(name, _sizes(shape), why) for name, shape, why in self.unmapped],
        )
        name = type(self.model).__name__.removeprefix("FSDP")  # FSDP2's prefix
        # the loop is the user's: its microbatches are not the layout's
        title = f"{name} as {re.sub(r' mb[0-9]+x[0-9]+', '', self.layout.name)}"
        said = (*self.notes, _data_parallel(self.layout), _gathered(self.units))
        columns = ("parameter", "shape", "strategy") if mapped else ()
        tables = [table.Table(title, columns, mapped, said, 3)]
        if unmapped:
            tables.append(table.Table("not mapped", ("name", "shape", "why"), unmapped, left=3))
        written = io.StringIO()
        table.write(tables, written)
        return written.getvalue().rstrip("\n")


def _data_parallel(layout: Layout) -> str:
    """Say how the data ranks hold the weights."""
    count = layout.data_ranks
    if count == 1:
        return "One data rank has the whole batch."
    if not layout.zero:
        return f"Data parallel over {count} ranks: each has all of it, and gradients are averaged."
    shards = f"{count // layout.replicas} ranks"
    shards += f", {layout.replicas} times" if layout.replicas > 1 else ""
    parts = ("optimizer state", "gradients", "parameters")[: layout.zero]
    return f"Data parallel over {count} ranks; sharded over {shards}: {', '.join(parts)}."


def _sizes(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _gathered(units: Sequence[str]) -> str:
    if not units:
        return "No units: all weights are gathered at once; units= names modules to gather alone."
    named = ", ".join(dict.fromkeys(NUMBER.sub("*", name) for name in units))
    return (
        f"{len(units)} units ({named}), each gathered, recomputed and compiled by itself; what is "
        "in none is one more."
    )


def _alike(*tables: Sequence[Row]) -> list[tuple[Row, ...]]:
    """Put equal layers on one line: ``layers.*.up (8)``, or with their numbers if other layers
    differ."""
    said_of: dict[str, set[str]] = {}
    for name, _, said in itertools.chain(*tables):
        said_of.setdefault(NUMBER.sub("*", name), set()).add(said)
    shown = []
    for rows in tables:
        lines: dict[Row, list[str]] = {}
        for name, shape, said in rows:
            lines.setdefault((NUMBER.sub("*", name), shape, said), []).append(name)
        shown.append(
            tuple(
                (_together(pattern, names, alone=len(said_of[pattern]) == 1), shape, said)
                for (pattern, shape, said), names in lines.items()
            )
        )
    return shown


def _together(pattern: str, names: Sequence[str], *, alone: bool) -> str:
    if alone:
        return f"{pattern} ({len(names)})" if len(names) > 1 else pattern
    numbers = ", ".join(".".join(NUMBER.findall(name)) for name in names)
    return f"{pattern}, * = {numbers}" if "*" in pattern else pattern


def apply(
    plan: Plan | Layout | Path | str,
    model: "nn.Module",
    *,
    strategies: Mapping[str, str] | None = None,
    units: Sequence[str] | None = None,
    divided: Sequence[str] | None = None,
    dtype: Literal["fp32", "bf16"] | None = None,
    lowering: Literal["eager", "compiled"] | None = None,
    recipe: Recipe | None = None,
    init: "Init | None" = None,
) -> Applied:
    """Lay ``model`` out over the joined ranks, in place.

    ``plan``: a plan, its file, or only a layout. ``strategies``: pattern -> strategy. ``units``:
    patterns of modules that are each gathered, recomputed and compiled separately, by default the
    children of the outermost ModuleLists. ``divided``: patterns of integer attributes that count
    heads or features and are divided by tp. Known classes have defaults for all three. ``dtype``,
    ``lowering`` and ``recipe`` default to the plan's, or with a layout to fp32, eager and
    ``Recipe()``. ``init``: (name, tensor) -> the whole value of a tensor on the meta device.

    This uses weights, reduce and prefetch of the recipe; the optimizer is yours. A ValueError names
    what is not supported: pipelines, cp, sequence_parallel, selective recomputation, heads that tp
    does not divide, a tied weight in two different units.
    """
    if isinstance(plan, Path | str):
        plan = files.take(plan, Plan)
    layout, chosen = (plan, None) if isinstance(plan, Layout) else (plan.layout, plan)
    recipe = recipe or (chosen.recipe if chosen else Recipe())
    wanted = dtype or (chosen.dtype if chosen else "fp32")
    _refuse(layout, recipe, wanted)

    import torch.distributed as dist

    from meshwise import ranks
    from meshwise.launch import cache
    from meshwise.parallel import foreign, mesh

    if not dist.is_initialized():
        if not Job.here().launched:
            raise ValueError(
                "this process has joined no job; start it by torchrun, or call "
                "torch.distributed.init_process_group first"
            )
        ranks.join()
    wishes = _wishes(model, strategies, units, divided)
    compiled = (lowering or (chosen.lowering if chosen else "eager")) == "compiled"
    if compiled:
        cache.use()
    place = mesh.build(layout, "cuda" if "nccl" in dist.get_backend_config() else "cpu")
    laid = foreign.lay_out(
        model, place, wishes, dtype=wanted, compiled=compiled, recipe=recipe, init=init
    )
    warnings = _uncut(type(model).__name__, layout, laid.assigned.strategies, wishes)
    for warning in warnings if dist.get_rank() == 0 else ():
        log.warning("%s", warning)
    return _applied(model, place, laid, warnings)


def _applied(
    model: "nn.Module", place: "MeshPlace", laid: "Laid", warnings: tuple[str, ...]
) -> Applied:
    """Make the report: which parameters are mapped, and which are not."""
    layout, given = place.layout, laid.assigned.strategies
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    whole = "no pattern names it; replicated over tp"
    left = [n for n, s in given.items() if s is None and layout.tp > 1]
    unmapped = [Unmapped(name, shapes[name], whole) for name in left]
    idle = [*laid.assigned.idle, *laid.idle]
    unmapped += [Unmapped(pattern, (), "names nothing of this model") for pattern in idle]
    mapped = {name: strategy for name, strategy in given.items() if strategy is not None}
    notes = (*warnings, *laid.notes)
    return Applied(model, place, mapped, tuple(unmapped), laid.units, notes)


def _uncut(
    name: str, layout: Layout, given: Mapping[str, str | None], wishes: Known
) -> tuple[str, ...]:
    """Warn if no weight is cut over tp, so that all tp ranks do the same work."""
    if layout.tp == 1 or any(kind is not None and kind not in WHOLE for kind in given.values()):
        return ()
    why = "the strategies cut none of its weights"
    if not wishes.strategies:
        why = f"there is no map for {name.removeprefix('FSDP')}; give strategies="
    return (f"NOTHING IS CUT OVER TP: {why}. All {layout.tp} tp ranks hold and compute the same.",)


def _refuse(layout: Layout, recipe: Recipe, dtype: str) -> None:
    """Refuse settings that a module which is not ours cannot have."""
    unfit = {
        "Layout.pp": (layout.pp > 1, "a pipeline needs to know a model's layers; use 1"),
        "Layout.cp": (layout.cp > 1, "attention is the module's own; use 1"),
        "Layout.sequence_parallel": (layout.sequence_parallel, "use false"),
        "Layout.cuts": (bool(layout.cuts.name), "strategies say what tp divides; leave them out"),
        "Layout.recompute": (layout.recompute == "selective", "use full or none"),
        "Recipe.fp8": (recipe.fp8, "products are the module's own; use false"),
        "Recipe.offload": (recipe.offload, "use false"),
        "Recipe.async_tp": (recipe.async_tp, "use false"),
        "Recipe.fp32_precision": (recipe.fp32_precision != "ieee", "set torch.backends yourself"),
        "Recipe.attention": (recipe.attention != "auto", "attention is the module's own; use auto"),
        "dtype": (dtype not in ("fp32", "bf16"), "training runs in fp32 or bf16"),
    }
    for field, (refused, fix) in unfit.items():
        if refused:
            raise ValueError(f"{field}: cannot be applied to a module of your own; {fix}")


def _wishes(
    model: "nn.Module",
    strategies: Mapping[str, str] | None,
    units: Sequence[str] | None,
    divided: Sequence[str] | None,
) -> Known:
    """Take the user's wishes, else the defaults of the class, else guess the units."""
    known = known_strategies.known(kind.__name__ for kind in type(model).__mro__)
    known = known or Known({}, _children_of_lists(model))
    return Known(
        known.strategies if strategies is None else dict(strategies),
        known.units if units is None else tuple(units),
        known.divided if divided is None else tuple(divided),
    )


def _children_of_lists(model: "nn.Module") -> tuple[str, ...]:
    """Name the children of the outermost ModuleLists."""
    from torch import nn

    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [a for a in lists if not any(a.startswith(f"{b}.") for b in lists)]
    return tuple(f"{name}.*" for name in outer)
