"""Check the arguments of dense and dilated attention before anything is sent.

In: this rank's q [B, L, H, D], k and v [B, L, Hkv, D] and options. Out: them in one dtype, and what
is wrong with them, in words; a rank tells the others and all raise alike.
"""

import contextlib
import functools
import hashlib
import reprlib
from typing import Annotated, Any, TypedDict, get_type_hints

import torch
from msgspec import Meta
from torch import Tensor

from meshwise.attention.shards import Shards
from meshwise.prices import Prices
from meshwise.spec import Dilation
from meshwise.spec.op import Dtype
from meshwise.spec.record import digest, mistyped

DTYPES: dict[torch.dtype, Dtype] = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
}  # fmt: skip


_MOST = 2**62
_Position = Annotated[int, Meta(ge=0, le=_MOST)]
_Flag = Annotated[bool, Meta(description="give True or False")]
_Some = Annotated[int, Meta(ge=1, le=_MOST)]
_Tensor = Annotated[Tensor, Meta(description="give a tensor [batch, length, heads, head_dim]")]
_Scale = Annotated[int, Meta(gt=0, le=_MOST)] | Annotated[float, Meta(gt=0, le=1e300)] | None


class _Told(TypedDict, total=False):
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
    hints = get_type_hints(_Told, include_extras=True)
    return {name: hint.__metadata__[-1].description for name, hint in hints.items()}


def misfit(**given: Any) -> str:
    """The first of these arguments that is of another type or out of range; empty if none is."""
    for name, value in given.items():
        if isinstance(value, float):  # NumPy's float64 is one
            given[name] = float(value)
    if found := mistyped(given, _Told):
        return f"{found[0]} = {shown(given[found[0]])}: {_fixes()[found[0]]}"
    for name, value in given.items():
        if isinstance(value, Tensor) and not (
            value.is_floating_point() and value.layout == torch.strided
        ):
            return f"{name} of {value.dtype}, {value.layout}: give dense floating-point numbers"
    return ""


def shown(value: object) -> str:
    """A value in an error; of what may be long or lie on a GPU, the type."""
    if value is None or isinstance(value, bool | int | float | str | list | tuple | dict | set):
        with contextlib.suppress(ValueError):  # an int of thousands of digits
            return reprlib.repr(value)
    return f"a {type(value).__name__}"


def starts_of(documents: Any) -> Any:
    """A sequence, tensor or array of starts as a tuple; anything else as it is."""
    if documents is None:
        return ()
    if hasattr(documents, "tolist"):
        documents = documents.tolist()
    return tuple(documents) if isinstance(documents, list | range) else documents


def cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As autocast, where it is on, would have them."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def problem(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Say what is wrong with them on this rank; empty if nothing is."""
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


def said(q: Tensor, k: Tensor, **options: object) -> dict[str, object]:
    """The settings that ranks must have in common."""
    heads = {"heads": q.shape[2], "kv_heads": k.shape[2], "head_dim": q.shape[3]}
    return {"batch": len(q), **heads, "dtype": q.dtype, **options}


def short(what: object) -> str | None:
    """A name of what may be long."""
    return hashlib.sha256(repr(what).encode()).hexdigest()[:8] if what else None


@functools.lru_cache(8)
def named(prices: Prices | None) -> str:
    """Prices by their digest, which is slow to make."""
    return "none" if prices is None else digest(prices.costs)


def no_view(x: Tensor) -> Tensor:
    """The same memory, but no view: into one that a Function returns nobody may write."""
    return x.new_empty(0).set_(x)  # type: ignore[call-overload, no-any-return]


def refuse_second_derivatives() -> None:
    """In a backward by hand, which autograd would take for a constant."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "attention over ranks has no second derivative; leave out create_graph=True"
        )
