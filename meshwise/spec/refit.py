"""Records of ``refit``, which moves a model's weights from one layout to another."""

from math import lcm
from typing import Literal

from meshwise.spec.model import Decoder, Model
from meshwise.spec.op import Dtype
from meshwise.spec.record import Count, NonNegative, Positive, PositiveFloat, Record
from meshwise.spec.weights import WeightLayout

Mode = Literal["collocated", "non-collocated"]
Verify = Literal["hash", "full", "off"]


class Resharding(Record, kw_only=True, tag_field="op", tag="resharding"):
    """One move of all weights of ``model`` from ``source`` to ``destination``.

    The case's ``backend`` says whose code moves them (nccl, ipc, ...). ``cap_bytes``: extra memory
    that a rank may use. ``changed``: the share of the weights that changes between two refits, if
    only changes are sent; None sends all. ``placement``: the layout's destination rank i is rank
    ``placement[i]``; empty keeps the numbers. ``scenario``: the name that the user asked for.
    """

    model: Model | Decoder
    source: WeightLayout
    destination: WeightLayout
    cap_bytes: Positive = 512 * 2**20
    verify: Verify = "hash"
    atomic: bool = False
    changed: PositiveFloat | None = None
    placement: tuple[NonNegative, ...] = ()
    scenario: str = ""

    @property
    def mode(self) -> Mode:
        """Collocated if a rank may hold both models."""
        source, destination = self.source, self.destination
        apart = (
            source.first_rank + source.num_ranks <= destination.first_rank
            or destination.first_rank + destination.num_ranks <= source.first_rank
        )
        return "non-collocated" if apart else "collocated"


class Side(Record, kw_only=True):
    """The degrees of a training or an inference model, and the number of its replicas.

    ``etp``: tensor parallelism within an expert; None is ``tp``, as in Megatron. As in Megatron's
    refit benchmark, ``ep`` multiplies the ranks: they hold ep copies of all other weights.
    """

    tp: Count = 1
    pp: Count = 1
    ep: Count = 1
    etp: Count | None = None
    fsdp: Count = 1
    replicas: Count = 1

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * lcm(self.ep, self.fsdp) * self.replicas

    @property
    def name(self) -> str:
        """``TP2PP2``, ``TP1``, ``EP4 on 16``."""
        degrees = {"TP": self.tp, "PP": self.pp, "EP": self.ep, "FSDP": self.fsdp}
        said = "".join(f"{axis}{degree}" for axis, degree in degrees.items() if degree > 1)
        return (said or "TP1") + (f" on {self.num_ranks}" if self.replicas > 1 else "")


class Scenario(Record, kw_only=True):
    """A named benchmark: weights move from ``train`` to ``infer``. ``about``: its source."""

    name: str
    about: str
    model: Model | Decoder
    train: Side
    infer: Side
    mode: Mode = "collocated"
    dtype: Dtype = "fp32"


class Bound(Record, kw_only=True):
    """A bound: no transfer is faster than ``seconds``. ``bytes_per_s``: value of the rate ``rate``
    (None: unknown, so no bound). ``ranks``: those that set the bound that binds; in the bound
    ``hosts`` they are hosts."""

    name: str
    seconds: float
    bytes_per_s: PositiveFloat | None = None
    ranks: tuple[NonNegative, ...] = ()
    rate: str = ""


class Forecast(Record, kw_only=True):
    """The forecast of a refit, before anything runs.

    ``source_bytes``, ``destination_bytes``: held by the first rank of each. ``wire_bytes``: sent
    between ranks, over all ranks. ``local_bytes``: copied within ranks. ``max_in_bytes``,
    ``max_out_bytes``: received and sent by the busiest rank. ``num_slices``: boxes sent between
    ranks. ``num_messages``: packed messages between pairs of ranks, in ``num_stages`` steps.
    ``staging_bytes``: the most extra memory of a rank. ``atomic_bytes``: the second copy of its
    destination. ``bound_s``: the bound in ``bounds`` that binds any plan (egress binds only if no
    rank forwards bytes). ``predicted_s``: how long the plan keeps its busiest link busy.
    ``placed_wire_bytes``: bytes sent if destination ranks were renumbered; None if not computed.
    ``loads[s][d]``: bytes from rank s to d, own copies on the diagonal; empty above 16 ranks."""

    op: Resharding
    num_ranks: Positive
    source_bytes: NonNegative
    destination_bytes: NonNegative
    wire_bytes: NonNegative
    local_bytes: NonNegative
    max_in_bytes: NonNegative
    max_out_bytes: NonNegative
    num_slices: NonNegative
    num_messages: NonNegative
    num_stages: Positive
    staging_bytes: NonNegative
    atomic_bytes: NonNegative = 0
    bounds: tuple[Bound, ...]
    bound_s: float
    binding: str
    predicted_s: float
    plan_took_s: float
    placed_wire_bytes: NonNegative | None = None
    loads: tuple[tuple[NonNegative, ...], ...] = ()

    @property
    def plan_efficiency(self) -> float:
        """The bound over the predicted time; 1 if nothing moves."""
        return self.bound_s / self.predicted_s if self.predicted_s else 1.0
