"""Layouts read off loaders and off transformers' saving, against what these do with real values."""

import pytest
import torch
from torch import nn

from meshwise.bridges.hugging_face import saved
from meshwise.bridges.loader import holdings_of_loader
from meshwise.bridges.renamed import renamed
from meshwise.reshard.holdings import HeldTensor
from meshwise.reshard.regions import Box, Piece

BF16 = torch.bfloat16


class Fused(nn.Module):
    """A rank's part of a layer, loaded by everything that loaders do: fused, cut, padded, stacked,
    transposed, by way of copies."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.rank = rank
        self.qkv = nn.Parameter(torch.zeros(8, 6, dtype=BF16))
        self.table = nn.Parameter(torch.zeros(8, 6, dtype=BF16))  # 5 rows of the vocabulary's 13
        self.experts = nn.Parameter(torch.zeros(2, 4, 6, dtype=BF16))
        self.turned = nn.Parameter(torch.zeros(2, 3, 5, dtype=BF16))
        self.mixed = nn.Parameter(torch.zeros(6, 6))  # fp32 of a bf16 checkpoint
        self.swapped = nn.Parameter(torch.zeros(4, dtype=BF16))
        self.given = nn.Parameter(torch.zeros(3, 2, dtype=BF16))

    def load_weights(self, weights):
        for name, value in weights:
            if name in ("q", "k", "v"):
                rows = {"q": (0, 4), "k": (4, 2), "v": (6, 2)}[name]
                part = value.narrow(0, self.rank * rows[1], rows[1])
                self.qkv.data.narrow(0, *rows).copy_(part)
            elif name == "table":
                part = value[8 * self.rank : 8 * self.rank + 8]
                self.table.data[: part.shape[0]].copy_(part)
            elif name.startswith("expert"):
                self.experts.data[int(name[-1])].copy_(value)
            elif name == "turned":
                self.turned.data.copy_(value.to(BF16).transpose(1, 2).contiguous())
            elif name in ("a", "b"):
                self.halves = [*getattr(self, "halves", []), value]
                if name == "b":
                    self.mixed.data.copy_(torch.cat([self.halves[1][::2], self.halves[0].float()]))
            elif name == "swapped":
                self.swapped.data.copy_(torch.cat(value.chunk(2)[::-1]))
            elif name == "given":
                self.given.data = value[1:]


CHECKPOINT = {
    "q": (8, 6), "k": (4, 6), "v": (4, 6), "table": (13, 6), "expert0": (4, 6), "expert1": (4, 6),
    "turned": (2, 5, 3), "a": (3, 6), "b": (6, 6), "swapped": (4,), "given": (4, 2), "unread": (2,),
}  # fmt: skip


def filled(model, loaded, values):
    """Fill a model's tensors from values by what was read off: boxes, each copied alone."""
    found = {n: torch.zeros_like(each) for n, each in model.named_parameters()}
    for name, held in loaded.holdings.items():
        for piece in held.layout:
            buffer = found[piece.buffer]
            buffer = buffer.permute(*loaded.turned.get(piece.buffer, range(buffer.ndim)))
            local = piece.local(piece.box)
            if buffer.ndim > len(held.shape):
                buffer = buffer.flatten(0, buffer.ndim - len(held.shape))
            of = values[name][tuple(map(slice, *piece.box))]
            buffer[tuple(map(slice, *local))].copy_(of)
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_boxes_fill_what_the_loader_fills(rank):
    values = {name: torch.randn(shape).to(BF16) for name, shape in CHECKPOINT.items()}
    with torch.device("meta"):
        model = Fused(rank)
    loaded = holdings_of_loader(model, {n: (s, BF16) for n, s in CHECKPOINT.items()}, rank=rank)
    real = Fused(rank)
    real.load_weights(iter(values.items()))
    for name, tensor in filled(Fused(rank), loaded, values).items():
        assert torch.equal(tensor, real.get_parameter(name)), name
    assert loaded.turned == {"turned": (0, 2, 1)} and not loaded.computed
    assert loaded.unread == ("unread",)
    assert loaded.unfilled == ({} if rank == 0 else {"table": 3 * 6})
    assert loaded.holdings["a"].dtype == "fp32"  # of the parameter
    (pad,) = loaded.holdings["table"].padded if rank else [(1, (8, 6), "table")]
    assert pad == (1, (8, 6), "table")


def test_what_is_computed_is_named_with_the_operation():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.log, self.bias = (nn.Parameter(torch.zeros(4)) for _ in range(3))

        def load_weights(self, weights):
            for name, value in weights:
                if name == "bias":
                    value.zero_()  # of all tp ranks one adds it
                self.get_parameter(name).data.copy_(-torch.exp(value) if name == "log" else value)

    names = ("w", "log", "bias")
    loaded = holdings_of_loader(Scaled(), dict.fromkeys(names, ((4,), torch.float32)))
    assert loaded.computed == {"log": "neg", "bias": "zero_"}
    assert loaded.unread == ("log", "bias")


def test_a_loader_that_reads_values_is_refused_by_the_tensors_name():
    class Reads(nn.Module):
        def load_weights(self, weights):
            for _, value in weights:
                value.max().item()

    with pytest.raises(ValueError, match=r"^scale: the loader does .*_local_scalar_dense"):
        holdings_of_loader(Reads(), {"scale": ((4,), torch.float32)})


def small(name):
    from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 90,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    config = {
        "llama": LlamaConfig(**sizes),
        "tied": LlamaConfig(**sizes, tie_word_embeddings=True),
        "mixtral": MixtralConfig(**sizes, num_local_experts=4),
    }[name]
    return AutoModelForCausalLM.from_config(config, dtype=BF16)


@pytest.mark.parametrize("name", ["llama", "tied", "mixtral"])
def test_a_module_is_told_in_the_names_of_its_checkpoint(name, tmp_path):
    """The judge is transformers' own save: experts apart there, stacked in the module."""
    from safetensors.torch import load_file

    module = small(name)
    module.save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    checkpoint = load_file(file)
    shapes, same = saved(module)
    assert shapes == {name: tuple(tensor.shape) for name, tensor in checkpoint.items()}
    held, parts = {}, {}
    for key, tensor in module.state_dict().items():  # two ranks, cut by their first dim
        cut = -(-tensor.shape[0] // 2)
        layout = []
        for rank, (low, high) in enumerate([(0, cut), (cut, tensor.shape[0])]):
            rest = tensor.shape[1:]
            box = Box((low, *(0 for _ in rest)), (high, *rest))
            layout.append(Piece(rank, box, (0,) * tensor.ndim))
            parts[rank, key] = tensor[low:high]
        held[key] = HeldTensor(tuple(tensor.shape), "bf16", tuple(layout))
    for key, tensor in renamed(held, shapes, same).items():
        found = torch.full_like(checkpoint[key], torch.nan)
        for piece in tensor.layout:
            part = parts[piece.rank, piece.buffer]
            if part.ndim > found.ndim:
                part = part.flatten(0, part.ndim - found.ndim)
            found[tuple(map(slice, *piece.box))] = part[tuple(map(slice, *piece.local(piece.box)))]
        assert torch.equal(found, checkpoint[key]), key
