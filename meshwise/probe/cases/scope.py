"""What all cases of one measurement have in common."""

from typing import NamedTuple

from meshwise.spec import Cluster
from meshwise.spec.op import Dtype


class Scope(NamedTuple):
    """The machine, how many of its devices take part, and the dtype unless another is asked."""

    cluster: Cluster
    world_size: int
    dtype: Dtype

    @property
    def on_gpus(self) -> bool:
        return self.cluster.device.kind == "cuda"
