"""Recomputation: what forward does not keep, backward computes again, by torch's checkpoint.

full keeps a layer's input and nothing else (Chen et al. 2016). selective keeps the results of the
matrix products and of attention, and computes again what is cheap: the norms and the activation
function, each as it is needed by the product behind it. torch ends a recomputation at the last
tensor that backward asks for, so those products themselves are not repeated.
"""

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from meshwise.nn.gpt import Layer, Part
from meshwise.spec import Recompute


def apply(layer: Layer, recompute: Recompute) -> None:
    """Do it before the layer is compiled or sharded."""
    if recompute == "full":
        layer.whole = _forgetting
    elif recompute == "selective":
        layer.part = _forgetting


def _forgetting(part: Part, x: Tensor) -> Tensor:
    # There is no dropout, so no state of a random generator to restore.
    result: Tensor = checkpoint(part, x, use_reentrant=False, preserve_rng_state=False)
    return result
