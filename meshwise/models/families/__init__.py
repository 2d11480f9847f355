"""Forward graphs: one module for each family of models, with nothing else in it.

All other facts about a model (weights, products, FLOPs, saved bytes, exchanges) are read off its
graph.
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

    The graph covers a pipeline stage with ``layers`` of these kinds (by default all), with the
    embedding if it is the ``first`` and the head if it is the ``last``. A stage numbers its layers
    from 0, so equal stages share one graph. Other stages begin with ``stage.in``, which no node
    writes, and end with the residual stream. A last stage that is not the first has its own copy of
    a tied weight. For a model that no module computes, the graph lists its operations.
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
