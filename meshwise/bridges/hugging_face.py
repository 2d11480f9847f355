"""Hugging Face modules in the names of their checkpoints.

transformers keeps some weights otherwise than its checkpoints do: experts stacked and fused, parts
renamed. It converts them when it saves. That conversion runs here on stand-ins, so there is no
second table.
"""

from torch import Tensor, nn

from meshwise.bridges.loader import Recorder, view_of
from meshwise.bridges.renamed import Same, Shapes
from meshwise.bridges.strides import contiguous, pairs
from meshwise.reshard import live


def saved(module: nn.Module) -> tuple[Shapes, list[Same]]:
    """Return the checkpoint's tensors, and which of the module's each holds."""
    from transformers.core_model_loading import revert_weight_conversion

    recorder = Recorder(set())
    tied = set(getattr(module, "all_tied_weights_keys", None) or ())
    with recorder:
        stand_ins: dict[str, Tensor] = {
            name: recorder.stand_in(name, tuple(tensor.shape), tensor.dtype)
            for name, tensor in live.named(module).items()
            if name not in tied
        }
        found = revert_weight_conversion(module, stand_ins)  # type: ignore[arg-type]
    same = []
    for name, tensor in found.items():
        whole = contiguous(tensor.shape)
        for (to, of), origin in recorder.sources((whole, view_of(tensor)), tensor):
            if origin.computed:
                raise ValueError(f"{name}: computed when saved ({origin.computed})")
            same += [
                Same(name, part, origin.name, of_part)
                for part, of_part in pairs(to, whole, of, origin.whole)
            ]
    return {name: tuple(tensor.shape) for name, tensor in found.items()}, same
