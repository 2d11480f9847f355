"""Plain torch models: only the mathematics of one device."""

from meshwise.nn.gpt import GPT
from meshwise.nn.llama import Llama
from meshwise.nn.stage import Attend, ModelStage, causal
from meshwise.nn.wide_resnet import WideResNetModule
from meshwise.spec import AnyModel, Decoder, Model
from meshwise.spec.recipe import Routing

__all__ = ["GPT", "Llama", "ModelStage", "WideResNetModule", "build"]


def build(
    model: AnyModel,
    layers: range | None = None,
    *,
    attend: Attend = causal,
    routing: Routing = "learned",
) -> ModelStage:
    """Build the module of a model, or of one of its stages, under ``torch.device("meta")``.

    ``attend``: the attention of heads. ``routing``: how experts, if any, are chosen.
    """
    if isinstance(model, Model):
        return GPT(model, layers, attend=attend, routing=routing)
    if isinstance(model, Decoder):
        return Llama(model, layers, attend=attend, routing=routing)
    return WideResNetModule(model, layers)
