"""Recomputation: backward computes again what forward does not keep, by torch's checkpoint.

full keeps a layer's input and nothing else (Chen et al. 2016). selective keeps the results of the
matrix products and of attention, and computes again what is cheap: the norms and the activation
function, each as it is needed by the product behind it.

In eager code the cheap pieces are checkpoints of their own; torch ends a recomputation at the last
tensor that backward asks for, so the products behind them are not repeated. A compiler would see
them as one piece with their products and repeat those too, so compiled layers say of every operator
whether its result is kept.
"""

from functools import partial
from typing import Any, Literal

from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from meshwise import torch_private
from meshwise.nn.stage import Layer, Part
from meshwise.spec import Recompute


def apply(layer: Layer, recompute: Recompute, lowering: Literal["eager", "compiled"]) -> None:
    """Set a layer's recomputation, before it is compiled or sharded."""
    if recompute == "full":
        layer.whole = _forgetting
    elif recompute == "selective" and lowering == "compiled":
        context = partial(create_selective_checkpoint_contexts, _policy)
        layer.whole = partial(_forgetting, context_fn=context)
    elif recompute == "selective":
        layer.part = _forgetting


def _policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    keep = operator in torch_private.KEPT
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _forgetting(part: Part, x: Tensor, **options: Any) -> Any:
    # There is no dropout, so no state of a random generator to restore.
    return checkpoint(part, x, use_reentrant=False, preserve_rng_state=False, **options)
