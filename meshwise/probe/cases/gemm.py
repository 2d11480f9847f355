"""``measure gemm``: products of models, cubes, skinny and tiny ones, the best shape. No torch.

A model's forward (m,n,k) also gives the weight gradient (n,k,m) and the input gradient (m,k,n). In
fp8 all three store A by rows and B by columns, because the kernels need this and training
transposes for them. Other dtypes are stored as autograd leaves them.

The search for the best shape starts from a grid. Each round tries shapes 3/4 and 4/3 as long as the
fastest product, in one dim or in all. It ends if none is faster or after ``_ROUNDS`` rounds
(mamf-finder of Stas Bekman's ml-engineering scans a range instead).
"""

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

from msgspec.structs import replace

from meshwise.models.decoder import passes, products
from meshwise.options.measure import GemmOptions
from meshwise.probe.cases.scope import Scope, models_of
from meshwise.probe.cases.sizes import parse_shapes
from meshwise.spec import Case, Derived, Gemm, Model, Regime, Sample
from meshwise.spec.op import Dtype
from meshwise.stats import median_interval

Shape = tuple[int, int, int]


class GemmScale(NamedTuple):
    """Sizes that suit one kind of device."""

    squares: tuple[int, ...]
    long: int  # the long sides of a skinny product
    skinny: tuple[int, ...]
    tiny: tuple[int, ...]
    seq_len: int
    grid: tuple[int, ...]  # lengths of the search's grid
    step: int  # the search rounds lengths to multiples of this


GPU = GemmScale(
    squares=(1024, 2048, 4096, 8192, 16384),
    long=8192,
    skinny=(1, 16, 64, 128, 256),
    tiny=(64, 128, 256),
    seq_len=4096,
    grid=(4096, 8192, 16384),
    step=256,
)
CPU = GemmScale(
    squares=(256, 512, 1024),
    long=1024,
    skinny=(1, 16, 64),
    tiny=(16, 32, 64),
    seq_len=128,
    grid=(256, 512, 1024),
    step=32,
)
_ROUNDS = 4


def cases(scope: Scope, asked: GemmOptions) -> list[Case]:
    """List products of models and of other ``shape``. If none is asked for: cubes (``square``),
    products of few rows (``skinny``), and cubes that take microseconds (``tiny``). ``search`` adds
    the grid from which ``next_shapes`` goes on.

    Without ``modes``: on GPUs cold, then the largest product of each dtype sustained (a search ends
    with its best shape sustained instead); on CPUs warm. sustained always takes only the largest.
    """
    if asked.modes == ("sustained",) and (asked.iterations or asked.warmup):
        name = "iterations" if asked.iterations else "warmup"
        raise ValueError(f"{name}: a sustained product lasts --sustain; add another mode")
    scale, modes, square, search = _scale(scope), asked.modes, asked.square, asked.search
    skinny, tiny = asked.skinny, asked.tiny
    shapes = parse_shapes(asked.shape)
    if not (asked.model or asked.configs or shapes or square or skinny or tiny or search):
        square, skinny, tiny = scale.squares, True, True
    if not modes:
        modes = ("warm",) if not scope.on_gpus else ("cold",) if search else ("cold", "sustained")
    shapes += [(n, n, n) for n in square]
    if skinny:
        shapes += [(thin, scale.long, scale.long) for thin in scale.skinny]
    if tiny:
        shapes += [(n, n, n) for n in scale.tiny]
    if search:
        shapes += _grid(scale)
    found: list[Case] = []
    for dtype in asked.dtypes or (scope.dtype,):
        rows = derived(scope._replace(dtype=dtype), asked)
        ops = [row.case.op for row in rows if isinstance(row.case.op, Gemm)]
        for m, n, k in shapes:
            ops += _in_dtype(Gemm(m=m, n=n, k=k), dtype)
        for regime in modes:
            timed = ops
            if regime == "sustained":  # ten seconds each, so only the largest
                timed = sorted(ops, key=lambda op: op.flops)[-1:]
            found += [Case(op=op, regime=regime, world_size=scope.world_size) for op in timed]
    return list(dict.fromkeys(found))


def derived(scope: Scope, asked: GemmOptions) -> list[Derived]:
    """List the models' products with their names: by model, microbatch size, product, then forward,
    weight gradient, input gradient. fp8 comes scaled by tensor and by row. The regime is the first
    of ``modes`` that is not sustained, in which all products are timed."""
    named: list[tuple[str, Any, int]] = [
        (model.name, model, asked.seq_len or min(model.max_seq_len, _scale(scope).seq_len))
        for model in models_of(asked)
    ]
    named += [(name, *found) for name, found in (asked.configs or {}).items()]
    usual: Regime = "cold" if scope.on_gpus else "warm"
    regime = next((regime for regime in asked.modes if regime != "sustained"), usual)
    rows = []
    for (name, model, tokens), microbatch_size in product(named, asked.microbatch_sizes or (1,)):
        experts = None if isinstance(model, Model) else model.experts
        about = (name, microbatch_size, tokens, model.hidden, experts.top_k if experts else 1)
        for made in products(model, microbatch_size, tokens):
            for direction in passes(made.gemm)[: 3 if asked.gradients else 1]:
                for op in _in_dtype(direction, scope.dtype):
                    case = Case(op=op, regime=regime, world_size=scope.world_size)
                    rows.append(Derived(*about, made.name, case))
    return rows


def _scale(scope: Scope) -> GemmScale:
    return GPU if scope.on_gpus else CPU


def _in_dtype(op: Gemm, dtype: Dtype) -> list[Gemm]:
    if dtype != "fp8":
        return [replace(op, dtype=dtype)]
    stored = replace(op, dtype=dtype, scaling="tensor", trans_a=False, trans_b=True)
    return [stored, replace(stored, scaling="row")]


def next_shapes(samples: Sequence[Sample]) -> list[Case]:
    """List the next round of each search whose grid is among ``samples``; none if all have ended.

    Each dtype, scaling and regime is a search of its own. On GPUs it ends with the best shape
    sustained. It is replayed from the grid each time, so equal samples always give equal cases.
    """
    searches: dict[str, list[Sample]] = {}
    for sample in samples:
        op = sample.case.op
        if isinstance(op, Gemm) and op.groups == 1 and not op.trans_a and op.trans_b:
            any_shape = replace(sample.case, op=replace(op, m=1, n=1, k=1))
            searches.setdefault(any_shape.id, []).append(sample)
    known = {sample.case_id for sample in samples}
    wanted = [case for found in searches.values() for case in _next_round(found)]
    return [case for case in wanted if case.id not in known]


def _next_round(samples: list[Sample]) -> list[Case]:
    case, rates = samples[0].case, dict(map(_rate, samples))
    scale = next((scale for scale in (GPU, CPU) if rates.keys() >= set(_grid(scale))), None)
    if scale is None:
        return []
    best = max(_grid(scale), key=lambda shape: rates[shape])
    for _ in range(_ROUNDS if rates[best] else 0):
        near = _neighbours(best, scale)
        if unknown := [shape for shape in near if shape not in rates]:
            return [_of_shape(case, shape) for shape in unknown]
        best, before = max([best, *near], key=lambda shape: rates[shape]), best
        if best == before:
            break
    if scale is CPU or not rates[best]:
        return []
    return [replace(_of_shape(case, best), regime="sustained")]


def _rate(sample: Sample) -> tuple[Shape, float]:
    """Return a product's shape and FLOP/s; 0 if it could not be measured."""
    op = sample.case.op
    assert isinstance(op, Gemm)
    ok = sample.status == "ok"
    return (op.m, op.n, op.k), op.flops / median_interval(sample.times_s)[0] if ok else 0.0


def _of_shape(case: Case, shape: Shape) -> Case:
    assert isinstance(case.op, Gemm)
    m, n, k = shape
    return replace(case, op=replace(case.op, m=m, n=n, k=k))


def _grid(scale: GemmScale) -> list[Shape]:
    """List the grid: square and 2:1 results (m, n), each with every k."""
    small, middle, large = scale.grid
    sides = ((small, small), (middle, small), (middle, middle), (middle, large), (large, middle))
    return [(m, n, k) for m, n in sides for k in scale.grid]


def _neighbours(shape: Shape, scale: GemmScale) -> list[Shape]:
    """List the shapes 3/4 and 4/3 as long, in one dim or in all three."""
    dims = ((0,), (1,), (2,), (0, 1, 2))
    found = []
    for factor, changed in product((3 / 4, 4 / 3), dims):
        scaled = [
            max(1, round(size * factor / scale.step)) * scale.step if i in changed else size
            for i, size in enumerate(shape)
        ]
        found.append((scaled[0], scaled[1], scaled[2]))
    return [near for near in dict.fromkeys(found) if near != shape]
