"""Layouts of a model's weights on ranks, as in training and inference engines."""

from itertools import accumulate, pairwise
from typing import Literal

from meshwise.spec.op import Dtype
from meshwise.spec.record import Count, NonNegative, Record

Order = Literal["plain", "megatron", "engine", "hf", "hf-fused"]


class WeightLayout(Record, kw_only=True):
    """Degrees of the axes and the order within fused tensors.

    Ranks are ``first_rank`` to ``first_rank + num_ranks - 1``, numbered with tp innermost, then
    dp, then pp (Megatron's tp-dp-pp). For experts, the ranks of a pipeline rank are numbered with
    etp innermost, then ep, then the experts' replicas; ep * etp must divide dp * tp.

    ``fsdp``: number of neighbouring dp ranks over which dim 0 of each tensor is cut, after all
    other cuts, as FSDP2 does (torch.chunk). Experts are cut over fsdp * tp / (ep * etp) ranks, the
    replicas among the same fsdp * tp neighbours. ``stages_per_rank`` > 1: stage s is on pipeline
    rank s % pp (interleaved). ``layers``: number in each stage, if uneven. ``vocab_multiple``: rows
    of embedding and head are padded to a multiple of it before tp cuts them. ``tied``: None follows
    the model; true holds one tensor for embedding and head (two if the first and last stage are on
    different ranks), false two. ``order``: names and fusion, see ``reshard.orders``.
    """

    tp: Count = 1
    dp: Count = 1
    pp: Count = 1
    ep: Count = 1
    etp: Count = 1
    fsdp: Count = 1
    stages_per_rank: Count = 1
    layers: tuple[Count, ...] = ()
    first_rank: NonNegative = 0
    vocab_multiple: Count = 1
    tied: bool | None = None
    order: Order = "plain"
    dtype: Dtype = "bf16"

    def check(self) -> None:
        ranks, expert_ranks = self.dp * self.tp, self.ep * self.etp
        if ranks % expert_ranks:
            self.fail("ep", f"ep * etp = {expert_ranks} must divide dp * tp = {ranks}")
        if self.dp % self.fsdp:
            self.fail("fsdp", f"must divide dp = {self.dp}")
        if self.fsdp > 1 and (self.fsdp * self.tp) % expert_ranks:
            self.fail("fsdp", f"fsdp * tp must be a multiple of ep * etp = {expert_ranks}")
        if self.pp == 1 and self.stages_per_rank > 1:
            self.fail("stages_per_rank", "must be 1 without a pipeline; pp = 1 has one stage")
        if self.layers and len(self.layers) != self.num_stages:
            self.fail("layers", f"must be one number for each of {self.num_stages} stages")

    def stage_layers(self, num_layers: int) -> tuple[range, ...]:
        """Return the layers of each stage; equal shares unless ``layers`` is given."""
        if not self.layers and num_layers % self.num_stages:
            stages = f"{self.num_stages} stages do not divide the model's {num_layers} layers"
            self.fail("pp", f"{stages}; give layers, one number a stage")
        counts = self.layers or (num_layers // self.num_stages,) * self.num_stages
        if sum(counts) != num_layers:
            self.fail("layers", f"must add up to the model's {num_layers}")
        return tuple(range(a, b) for a, b in pairwise(accumulate(counts, initial=0)))

    @property
    def num_stages(self) -> int:
        return self.pp * self.stages_per_rank

    @property
    def num_ranks(self) -> int:
        return self.tp * self.dp * self.pp
