"""Megatron-core's live modules in the names of a checkpoint.

In: a rank's model chunks (GPTModel, wrapped or not), and the folder with the config.json that the
server loads. Out: a ``Source``. The config says which tensors there are, ``reshard.orders`` what
Megatron calls them and how it fuses them. Where a rank stands is read off its modules: their
process groups, the numbers of their layers, the rows of their vocabulary. Every name and shape must
be as the config says, and so must the settings that order elements within equal shapes.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from meshwise import store
from meshwise.bridges.loader import counted
from meshwise.bridges.renamed import Same
from meshwise.bridges.strides import Region
from meshwise.bridges.weights import Saved, Source
from meshwise.models.hugging_face import read_config
from meshwise.reshard import checks, holdings, live
from meshwise.reshard.holdings import HeldTensor, Holdings
from meshwise.reshard.orders import Fused, Member, Place, Share, buffers_of
from meshwise.spec import Decoder, WeightLayout

# Other names of the buffers of reshard.orders: Transformer Engine's fused norms, experts apart.
_ALSO = {
    r"self_attention\.linear_qkv\.layer_norm_": "input_layernorm.",
    r"self_attention\.linear_(q|kv)_up_proj\.layer_norm_": r"self_attention.\1_layernorm.",
    r"mlp\.linear_fc1\.layer_norm_": "pre_mlp_layernorm.",
    r"mlp\.experts\.local_experts\.(\d+)\.linear_(fc1|fc2)\.(weight|bias)":
        r"mlp.experts.linear_\2.\3\1",
}  # fmt: skip
_TIED = "share_embeddings_and_output_weights"
_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


def source(chunks: nn.Module | Sequence[nn.Module], checkpoint: Path | str) -> Source:
    """Return a rank's model chunks as a source of weights. ``checkpoint``: the folder of the
    config.json that the server loads."""
    given = [chunks] if isinstance(chunks, nn.Module) else [*chunks]
    for each in given:
        if not isinstance(each, nn.Module):
            raise ValueError(f"a model chunk is {type(each).__name__}; give Megatron's modules")
    models = nn.ModuleList(map(unwrapped, given))
    return Source(models, lambda: saved(checkpoint), lambda rank: held(models, checkpoint, rank))


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside Float16Module, DistributedDataParallel and their like."""
    while not hasattr(model, "decoder") and (inner := model._modules.get("module")):
        model = inner
    return model


def is_one(module: nn.Module) -> bool:
    """Return whether a module is Megatron-core's."""
    return type(unwrapped(module)).__module__.startswith("megatron.core.")


def held(models: nn.ModuleList, checkpoint: Path | str, rank: int) -> Holdings:
    """Return what this rank holds of each weight, by ``reshard.holdings``' names. ValueError names
    what is not as the config.json says."""
    reading = _ChunkReading(_decoder(checkpoint), rank)
    for number, model in enumerate(models):
        reading.chunk(f"{number}.", model)
    checks.refuse(reading.wrong, f"{checkpoint}: ")
    return reading.found


def saved(checkpoint: Path | str) -> Saved:
    """Return a checkpoint's tensors, and which of ``reshard.holdings``' weights each holds."""
    held = holdings.holdings(_decoder(checkpoint), WeightLayout(order="hf"))
    same = []
    for name, tensor in held.items():
        dims = len(tensor.shape) if tensor.buffer_dims is None else tensor.buffer_dims
        missing = len(tensor.shape) - dims
        for piece in tensor.layout:
            part = Region(piece.offset[missing:], piece.box.shape[missing:], tuple(range(dims)))
            whole = Region(piece.box.low, piece.box.shape, tuple(range(missing, len(tensor.shape))))
            same.append(Same(piece.buffer, part, name, whole))
    shapes = {name: shape for name, (shape, _) in holdings.buffers(held, 0).items()}
    path = Path(checkpoint)
    config = store.read(path / "config.json" if path.is_dir() else path, dict)
    return Saved(shapes, same, counted(config))


def _decoder(checkpoint: Path | str) -> Decoder:
    model = read_config(checkpoint)
    if not isinstance(model, Decoder):
        raise ValueError(f"{checkpoint}: Megatron's names of a GPT-2's weights are not known")
    return model


class _ChunkReading:
    """Collects what a rank's chunks hold, and what is wrong with them."""

    def __init__(self, decoder: Decoder, rank: int) -> None:
        self.decoder, self.rank = decoder, rank
        self.units = holdings.members_of(decoder)
        self.found: dict[str, HeldTensor] = {}
        self.wrong: list[str] = []

    def chunk(self, prefix: str, model: Any) -> None:
        """Add a chunk, whose tensors' names begin with ``prefix`` here."""
        if not all(hasattr(model, each) for each in ("config", "decoder", _TIED)):
            self.wrong.append(f"{prefix[:-1]} is a {type(model).__name__}, no GPTModel")
            return
        if wrong := [*_settings(model, self.decoder)]:
            self.wrong += [f"{prefix}config.{each}" for each in wrong]
            return
        left: dict[str, tuple[str, Tensor]] = {}
        for name, tensor in live.tensors(model).items():
            if (known := _name(name)) in left:
                self.wrong.append(f"{prefix}{name} and {left[known][0]} are one weight")
            left[known] = prefix + name, tensor
        place = _place(model, self.decoder, left)
        for local, layer in enumerate(model.decoder.layers):
            unit = f"layers.{layer.layer_number - 1}"  # over all stages, from 1
            members = self.units.get(unit, ())
            buffers = {
                f"decoder.layers.{local}.{buffer.name}": buffer
                for buffer in buffers_of(members, self.decoder, "megatron", place)
            }
            self.wrong += [
                f"{prefix}{name} {buffer.shape} is missing"
                for name, buffer in buffers.items()
                if name not in left
            ]
            self._unit(f"{unit}.", members, buffers, left)
        members = holdings.root_of(self.decoder, self.units["root"], True, True, True)
        found = buffers_of(members, self.decoder, "megatron", place)
        self._unit("", members, {each.name: each for each in found}, left)
        self.wrong += [
            f"{name} {tuple(tensor.shape)} is no weight of this model"
            for name, tensor in left.values()
        ]

    def _unit(
        self,
        logical: str,
        members: Sequence[Member],
        buffers: Mapping[str, Fused],
        left: dict[str, tuple[str, Tensor]],
    ) -> None:
        """Add a layer's buffers, or those in no layer, and take them from those that are left."""
        dtypes: dict[str, str] = {}
        fit: list[tuple[int, Fused, str]] = []
        for name in [name for name in buffers if name in left]:
            (called, tensor), buffer = left.pop(name), buffers[name]
            if tuple(tensor.shape) != buffer.shape:
                shapes = f"{tuple(tensor.shape)}, {buffer.shape} by the config.json"
                self.wrong.append(f"{called} is {shapes}")
                continue
            fit.append((self.rank, buffer, called))
            parts = {buffer.tensor, *(part for part, _ in buffer.pieces)}
            dtypes |= dict.fromkeys(parts, live.NAMES[tensor.dtype])
        kept = [member for member in members if member.tensor in dtypes]
        for name, of in holdings.spread(kept, fit, dtypes).items():
            holdings.add(self.found, logical + name, of)


def _name(name: str) -> str:
    """Return what ``reshard.orders`` calls a tensor of a chunk."""
    for pattern, other in _ALSO.items():
        name = re.sub(pattern, other, name)
    return name


def _place(model: Any, decoder: Decoder, own: Mapping[str, tuple[str, Tensor]]) -> Place:
    """Return this rank's shares, as the model's process groups say."""
    tp, ep, etp = (
        Share(group.rank(), group.size()) if group is not None else Share()
        for group in _groups(model)
    )
    if decoder.experts is None:
        ep = etp = Share()
    rows = max([own[name][1].shape[0] for name in (_EMBEDDING, _HEAD) if name in own], default=0)
    rows = tp.parts * max(rows, -(-decoder.vocab // tp.parts))
    layout = WeightLayout(
        order="megatron", tp=tp.parts, dp=ep.parts * etp.parts, ep=ep.parts, etp=etp.parts,
        vocab_multiple=rows,
    )  # fmt: skip
    holdings.check(decoder, layout)
    return Place(rows, tp, ep, etp)


def _groups(model: Any) -> list[Any]:
    """Return the process groups of tp, ep and etp: the model's, or of all of an older Megatron."""
    if groups := getattr(model, "pg_collection", None):
        return [getattr(groups, name, None) for name in ("tp", "ep", "expt_tp")]
    from megatron.core import parallel_state  # type: ignore[import-not-found]

    return [
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_expert_model_parallel_group(),
        parallel_state.get_expert_tensor_parallel_group(),
    ]


def _settings(model: Any, decoder: Decoder) -> Iterator[str]:
    """Yield each setting of a Megatron model that orders its weights otherwise than the config.json
    says, or makes other weights of equal shapes."""
    config, moe, mla = model.config, decoder.experts, decoder.mla
    gemma = decoder.activation == "gelu"  # its norms count from 0
    expected: dict[str, object] = {
        "num_layers": decoder.layers,
        "hidden_size": decoder.hidden,
        "num_attention_heads": decoder.heads,
        "layernorm_zero_centered_gamma": gemma,
        "rotary_interleaved": False,
        "gated_linear_unit": decoder.gated,
        "num_moe_experts": moe and moe.num_experts,
        "moe_mlp_glu_interleave_size": None,
        "moe_shared_expert_glu_interleave_size": None,
        "multi_latent_attention": mla is not None,
    }
    if mla is None:
        expected |= {"num_query_groups": decoder.kv_heads, "kv_channels": decoder.head_dim}
    else:
        expected |= {
            "q_lora_rank": mla.q_lora_rank, "kv_lora_rank": mla.kv_lora_rank,
            "qk_head_dim": mla.nope_head_dim, "qk_pos_emb_head_dim": mla.rope_head_dim,
            "v_head_dim": mla.v_head_dim,
        }  # fmt: skip
    settings = {name: getattr(config, name, value) for name, value in expected.items()}
    settings[_TIED], expected[_TIED] = getattr(model, _TIED), decoder.tied
    for name, value in settings.items():
        if value != expected[name]:
            yield f"{name} = {value!r}, {expected[name]!r} by the config.json"
