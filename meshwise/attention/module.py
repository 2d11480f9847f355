"""``RingDilatedAttention``: LongNet's attention as a module, over the ranks of a ring."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwise.attention.arguments import DTYPES, misfit
from meshwise.attention.dilated import dilated_attention, wrong_way
from meshwise.attention.shards import Shards
from meshwise.attention.wire import Wire, wire_of
from meshwise.prices import Prices
from meshwise.spec import Dilation
from meshwise.spec.long_attention import Way


class RingDilatedAttention(nn.Module):
    """Maps q [B, L, H, D], k and v [B, L, Hkv, D] of this rank's tokens to an output like q.

    A ring is ``ring_size`` consecutive ranks of ``group`` (all of them by default) that share one
    sequence; L may differ between them. Pass ``shards`` in training: without it the ranks exchange
    their L in every call, and the host waits. If a ring is smaller than the group, every rank of
    the job must create the module at the same point, because this creates process groups. There are
    no parameters. ``dtype``: q, k and v are cast to it. ``device`` is accepted and ignored: the
    module holds no tensor. ValueError: a wrong type, lists of unequal length, values below 1, a
    ring_size that does not divide the ranks, a dropout other than 0 (dropout of attention weights
    works only within one kernel call; use nn.Dropout on the output).
    """

    def __init__(
        self,
        segment_lengths: list[int] | tuple[int, ...],
        dilation_rates: list[int] | tuple[int, ...],
        dropout: float = 0.0,
        ring_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        causal: bool | None = None,
        offsets: str = "mod",
        offset_heads: str = "query",
        mixture: str = "exact",
        group: dist.ProcessGroup | None = None,
        shards: Shards | None = None,
        way: Way = "auto",
        prices: Prices | None = None,
        return_lse: bool = False,
    ) -> None:
        super().__init__()
        ranks = wire_of(group).size
        place = str(device) if isinstance(device, torch.device) else device
        wrong = misfit(
            dropout=dropout, ring_size=ring_size, dtype=dtype, shards=shards,
            causal=False if causal is None else causal, way=way, prices=prices,
            return_lse=return_lse, device=place,
        )  # fmt: skip
        if not wrong and dtype not in (None, *DTYPES):
            wrong = f"dtype = {dtype}: give one of {', '.join(DTYPES.values())}"
        wrong = wrong or wrong_way(way)
        if not wrong and ranks % (ring_size or 1):
            wrong = f"ring_size = {ring_size}: must divide the {ranks} ranks"
        try:
            self.dilation = Dilation(
                segment_lengths=segment_lengths, dilation_rates=dilation_rates,  # type: ignore[arg-type]
                offsets=offsets, offset_heads=offset_heads, mixture=mixture,  # type: ignore[arg-type]
            )  # fmt: skip
        except ValueError as error:
            wrong = wrong or str(error)
        if wrong:
            raise ValueError(wrong)
        self.causal, self.dtype, self.shards = causal, dtype, shards
        self.way, self.prices, self.return_lse = way, prices, return_lse
        self.wire = Wire(ring_of(ring_size, group))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Any:
        """Return out, or (out, lse [B, H, L]) with ``return_lse``. ``is_causal`` counts only if the
        module was created with ``causal=None``."""
        if self.dtype is not None and all(
            isinstance(x, Tensor) and x.is_floating_point() for x in (q, k, v)
        ):
            q, k, v = (x.to(self.dtype) for x in (q, k, v))
        return dilated_attention(
            q, k, v, self.dilation, wire=self.wire, shards=self.shards, way=self.way,
            causal=is_causal if self.causal is None else self.causal, prices=self.prices,
            return_lse=self.return_lse,
        )  # fmt: skip

    def extra_repr(self) -> str:
        w, r = self.dilation.segment_lengths, self.dilation.dilation_rates
        return f"segment_lengths={w}, dilation_rates={r}, ring_size={self.wire.size}"


def ring_of(size: int | None, group: dist.ProcessGroup | None = None) -> dist.ProcessGroup | None:
    """Return this rank's ring: ``size`` consecutive ranks of ``group``. Every rank must call it."""
    ranks = 1 if not dist.is_initialized() else dist.get_world_size(group)
    if size is None or size == ranks:
        return group
    every = dist.get_process_group_ranks(group or dist.group.WORLD)
    rings = [every[first : first + size] for first in range(0, ranks, size)]
    mine, _ = dist.new_subgroups_by_enumeration(rings)
    return mine  # type: ignore[no-any-return]
