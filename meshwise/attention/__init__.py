"""Attention over sequences that are too long for one rank.

``ring_attention`` is dense attention over the ranks of a group. ``RingDilatedAttention`` is
LongNet's dilated attention. Both equal their definition on one device, forward and backward. Names
are imported lazily, because some rooms use the plans and must not import torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwise.attention.dense import ring_attention
    from meshwise.attention.dilated import dilated_attention
    from meshwise.attention.module import RingDilatedAttention

_WHERE = {
    "RingDilatedAttention": "module",
    "dilated_attention": "dilated",
    "ring_attention": "dense",
}
__all__ = ["RingDilatedAttention", "dilated_attention", "ring_attention"]


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
