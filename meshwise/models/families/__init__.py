"""Forward graphs: one module for each family of models, which holds nothing else.

Everything that is asked of a model (weights, products, FLOPs, saved bytes, exchanges) is read off
its graph.
"""

from meshwise.models.families import gpt, llama, wide_resnet
from meshwise.models.families.build import Layers
from meshwise.models.graph import Graph
from meshwise.spec import AnyModel, Model, WideResNet, layer_kinds


def forward(
    model: AnyModel,
    batch: int,
    seq: int,
    dtype: str,
    *,
    layers: Layers | None = None,
    first: bool = True,
    last: bool = True,
) -> Graph:
    """Return the graph of one forward pass over ``batch`` sequences of ``seq`` tokens, or images.

    Of a pipeline stage of ``layers`` of these kinds (all by default), with the embedding if it is
    the ``first`` and the head if it is the ``last``. Its layers are numbered from 0 wherever they
    are in the model, so that equal stages are one graph. Any other stage begins with ``stage.in``,
    which no node writes, and ends with the residual stream. A last stage that is not the first has
    its own copy of a tied weight. Of a model that no module computes, the graph lists what it has.
    """
    kinds = layer_kinds(model, seq) if layers is None else layers
    if isinstance(model, WideResNet):
        return wide_resnet.forward(model, batch, dtype, kinds, first=first, last=last)
    name = model.name or "the model"
    if seq > model.max_seq_len:
        raise ValueError(
            f"seq_len = {seq}: {name} has positions for {model.max_seq_len}; use a shorter sequence"
        )
    if isinstance(model, Model):
        return gpt.forward(model, batch, seq, dtype, kinds, first=first, last=last)
    return llama.forward(model, batch, seq, dtype, kinds, first=first, last=last)
