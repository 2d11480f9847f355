"""Sum the gradients of embedding and head, if they are one weight, over the first and last stage.

In: the stages of this rank, each with the gradient of its own use of the weight. Out: both hold the
same sum of the two, bit for bit, so the optimizer keeps the weights equal. The stages may have
different meshes; ``reshard`` then moves a gradient from one cut to the other.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from meshwise.nn import ModelStage
from meshwise.parallel.mesh import MeshPlace, share
from meshwise.reshard.regions import Layout as Regions
from meshwise.reshard.regions import placed
from meshwise.reshard.transports import p2p
from meshwise.spec import AnyModel, Layout, WideResNet, rank_of


@dataclass(frozen=True)
class Tie:
    """One end of the tie. ``there``: the other weight, if it is on this rank too (in a V schedule).
    Otherwise ``out`` sends this end's gradient to it, and ``back`` receives the other's."""

    weight: nn.Parameter
    is_copy: bool  # the head's; the embedding's is the original
    there: nn.Parameter | None
    out: p2p.Route | None
    back: p2p.Route | None

    @property
    def copy(self) -> nn.Parameter | None:
        """The head's weight, if it is on this rank. Count only the embedding's."""
        return self.weight if self.is_copy else self.there

    def add_gradients(self) -> None:
        assert self.weight.grad is not None
        mine = share(self.weight.grad)
        if self.there is not None:
            assert self.there.grad is not None
            other = share(self.there.grad)
            mine.copy_(other.copy_(mine + other))
            return
        assert self.out is not None and self.back is not None
        sending = p2p.send(self.out, mine)
        other = p2p.receive(self.back, mine.shape, mine.dtype, mine.device).wait()
        sending.wait()
        mine += other


def tie(
    place: MeshPlace,
    layout: Layout,
    model: AnyModel,
    stages: Mapping[int, ModelStage],
    device: torch.device,
) -> Tie | None:
    """Make this rank's end of the tie; None if no stage here holds a tied weight."""
    ends = [stages[number] for number in (0, layout.num_stages - 1) if number in stages]
    weights = [weight for end in ends if (weight := end.tied) is not None]
    if not weights:
        return None
    assert not isinstance(model, WideResNet)
    if len(weights) == 2:
        return Tie(weights[0], False, weights[1], None, None)
    ranks = [rank_of(layout.schedule, s, layout.pp) for s in (layout.num_stages - 1, 0)]
    shape = (model.vocab, model.hidden)
    last, first = [_vocabulary(layout, rank, shape) for rank in ranks]
    to_first = p2p.connected(last, first, place.links[-1].forward, device)
    to_last = p2p.connected(first, last, place.links[-1].backward, device)
    out, back = (to_last, to_first) if ends[0].first else (to_first, to_last)
    return Tie(weights[0], ends[0].last, None, out, back)


def _vocabulary(layout: Layout, pipeline_rank: int, shape: tuple[int, int]) -> Regions:
    """Return who holds which rows of the embedding, cut over tp (if by vocabulary), then shards."""
    inside = layout.of_rank(pipeline_rank)
    over_tp = 0 if inside.placed.embed == "vocab" else None
    pieces = placed(shape, (inside.tp, inside.shards), (over_tp, 0))
    devices = layout.devices_of(pipeline_rank)
    found = []
    for replica in range(inside.data_ranks // inside.shards):
        for piece in pieces:
            tp_rank, shard = divmod(piece.rank, inside.shards)
            place = (replica * inside.shards + shard) * inside.tp + tp_rank
            found.append(piece._replace(rank=devices[place]))
    return tuple(found)
