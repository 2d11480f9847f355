"""Recomputation: backward recomputes what forward does not keep, by torch's checkpoint.

full keeps only a layer's input (Chen et al. 2016). selective keeps the results of matrix products
and of attention, and recomputes what is cheap: each norm and activation function, when the product
after it needs it.

In eager code each cheap operation is a checkpoint together with the product after it. torch stops a
recomputation at the last tensor that backward needs, so the product is not repeated. A compiler
would see both as one piece and repeat the product too. So for compiled layers a policy says for
every operator whether its result is kept.
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


def recompute_layer(
    layer: Layer, recompute: Recompute, lowering: Literal["eager", "compiled"]
) -> None:
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
    # There is no dropout, so there is no random state to restore.
    return checkpoint(part, x, use_reentrant=False, preserve_rng_state=False, **options)
