"""Check the arguments of dense and dilated attention before anything is sent.

In: this rank's q [B, L, H, D], k and v [B, L, Hkv, D] and options. Out: a ``Call`` in one dtype. A
rank that finds a fault tells the others, and all raise the same ValueError.
"""

import contextlib
import functools
import hashlib
import reprlib
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, ParamSpec, TypedDict, TypeVar, get_type_hints

import torch
from msgspec import Meta
from torch import Tensor

from meshwise.attention.shards import Shards, of_lengths
from meshwise.attention.wire import Wire
from meshwise.prices import Prices
from meshwise.spec import Dilation, LongAttention
from meshwise.spec.op import Dtype
from meshwise.spec.record import digest, mistyped

DTYPES: dict[torch.dtype, Dtype] = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
}  # fmt: skip
P = ParamSpec("P")
T = TypeVar("T")

_MOST = 2**62
_Position = Annotated[int, Meta(ge=0, le=_MOST)]
_Flag = Annotated[bool, Meta(description="give True or False")]
_Some = Annotated[int, Meta(ge=1, le=_MOST)]
_Tensor = Annotated[Tensor, Meta(description="give a tensor [batch, length, heads, head_dim]")]
_Scale = Annotated[int, Meta(gt=0, le=_MOST)] | Annotated[float, Meta(gt=0, le=1e300)] | None


class _Types(TypedDict, total=False):
    """Arguments of attention: the exact type of each, and the fix where another was given."""

    q: _Tensor
    k: _Tensor
    v: _Tensor
    causal: _Flag
    return_lse: _Flag
    window: Annotated[_Some | None, Meta(description="must be 1 or more, an int, or None")]
    documents: Annotated[
        tuple[_Position, ...], Meta(description="give ints from 0 on, where documents start")
    ]
    shards: Annotated[Shards | None, Meta(description="make them by attention.shards")]
    scale: Annotated[_Scale, Meta(description="must be a number above 0, or None")]
    way: Annotated[str, Meta(description="give the name of a way, such as auto")]
    prices: Annotated[Prices | None, Meta(description="give a meshwise.prices.Prices, or None")]
    dilation: Annotated[Dilation, Meta(description="give a meshwise.Dilation")]
    dropout: Annotated[float, Meta(ge=0, le=0, description="put nn.Dropout on the output; give 0")]
    ring_size: Annotated[_Some | None, Meta(description="must be 1 or more, an int, or None")]
    device: Annotated[str | None, Meta(description="give a torch.device, its name, or None")]
    dtype: Annotated[torch.dtype | None, Meta(description="give a torch.dtype, or None")]


@functools.cache
def _fixes() -> dict[str, str]:
    hints = get_type_hints(_Types, include_extras=True)
    return {name: hint.__metadata__[-1].description for name, hint in hints.items()}


def misfit(**given: Any) -> str:
    """Describe the first argument with a wrong type or a value out of range; empty if none has."""
    for name, value in given.items():
        if isinstance(value, float):  # NumPy's float64 is one
            given[name] = float(value)
    if found := mistyped(given, _Types):
        return f"{found[0]} = {shown(given[found[0]])}: {_fixes()[found[0]]}"
    for name, value in given.items():
        if isinstance(value, Tensor) and not (
            value.is_floating_point() and value.layout == torch.strided
        ):
            return f"{name} of {value.dtype}, {value.layout}: give dense floating-point numbers"
    return ""


def shown(value: object) -> str:
    """Format a value for an error message: only its type if it may be long or on a GPU."""
    if value is None or isinstance(value, bool | int | float | str | list | tuple | dict | set):
        with contextlib.suppress(ValueError):  # an int of thousands of digits
            return reprlib.repr(value)
    return f"a {type(value).__name__}"


def starts_of(documents: Any) -> Any:
    """Turn a list, range, tensor or array of starts into a tuple, None into (); keep the rest."""
    if documents is None:
        return ()
    if hasattr(documents, "tolist"):
        documents = documents.tolist()
    return tuple(documents) if isinstance(documents, list | range) else documents


def _cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast does, where it is on."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _unlike(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Say why q, k and v do not fit together; empty if they do."""
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if any(x.dim() != 4 for x in (q, k, v)):
        return f"{shapes}: each must be [batch, length, heads, head_dim]"
    if k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        return f"{shapes}: must be alike, except that q may have more heads than k and v"
    if not (q.shape[0] and k.shape[2] and q.shape[3]):
        return f"{shapes}: batch, heads and head_dim must be 1 or more"
    if not q.device == k.device == v.device:
        return f"q, k, v on {q.device}, {k.device}, {v.device}: give one device"
    if q.shape[2] % k.shape[2]:
        return f"{shapes}: heads {q.shape[2]} must be a multiple of key heads {k.shape[2]}"
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        return (
            f"q, k, v of {q.dtype}, {k.dtype}, {v.dtype}: give one of {', '.join(DTYPES.values())}"
        )
    return ""


class Call(NamedTuple):
    """Arguments that the ranks agree on; ``has_grad``: a backward may follow."""

    q: Tensor
    k: Tensor
    v: Tensor
    shards: Shards
    lengths: list[int]  # of every rank's q
    scale: float
    has_grad: bool

    def op(self, **options: Any) -> LongAttention:
        return LongAttention(
            batch=len(self.q), seq_len=self.shards.seq_len, heads=self.q.shape[2],
            kv_heads=self.k.shape[2], head_dim=self.q.shape[3], dtype=DTYPES[self.q.dtype],
            **options,
        )  # fmt: skip


def agreed(
    q: Tensor, k: Tensor, v: Tensor, wire: Wire, problem: Callable[[], str], return_lse: bool,
    told: dict[str, object] | None = None, **options: Any,
) -> Call:  # fmt: skip
    """Check a call's arguments and that all ranks got the same ones; else ValueError on all ranks.

    ``problem`` describes a fault in ``options`` of the right types. The ranks also compare
    ``told``. Without ``shards`` each rank holds one run of the sequence, as long as its q.
    """
    if not (wrong := misfit(q=q, k=k, v=v, return_lse=return_lse, **options)):
        q, k, v = _cast(q, k, v)
        wrong = _unlike(q, k, v) or problem()
    if wrong:
        wire.refuse(wrong)
    has_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    said = {
        "batch": len(q), "heads": q.shape[2], "kv_heads": k.shape[2], "head_dim": q.shape[3],
        "dtype": q.dtype, **options, **(told or {}), "gradients": has_grad,
    }  # fmt: skip
    said |= {name: brief(said[name]) for name, brief in _BRIEF.items() if name in said}
    shards, scale = options["shards"], options["scale"]
    lengths = wire.agree(said, q.shape[1], known=shards is not None)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return Call(q, k, v, shards or of_lengths(lengths), lengths, scale, has_grad)


def _short(what: object) -> str | None:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:8] if what else None


@functools.lru_cache(8)  # a digest is slow to make
def _named(prices: Prices | None) -> str:
    return "none" if prices is None else digest(prices.costs)


# Short forms of long values, for the comparison between ranks.
_BRIEF: dict[str, Callable[[Any], str | None]] = {
    "documents": _short, "shards": _short, "prices": _named, "dilation": digest,
}  # fmt: skip


def uncompiled(call: Callable[P, T]) -> Callable[P, T]:
    """Run ``call`` uncompiled, even if the model around it is compiled."""

    @functools.wraps(call)
    def run(*args: P.args, **options: P.kwargs) -> T:
        of = torch.compiler.disable(call) if torch.compiler.is_compiling() else call
        return of(*args, **options)

    return run


def no_view(x: Tensor) -> Tensor:
    """Return x's memory as a non-view: in-place writes to a view from a Function are refused."""
    return x.new_empty(0).set_(x)  # type: ignore[call-overload, no-any-return]


def refuse_second_derivatives() -> None:
    """Refuse second derivatives: autograd would treat the hand-written backward as a constant."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "attention over ranks has no second derivative; leave out create_graph=True"
        )
