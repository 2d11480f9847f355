"""A plain Llama for this experiment, and the oracle that its variants are held against.

Pre-norm blocks: x + attention(norm(x)), then x + down(silu(gate) * up) of norm(x); RMSNorm, rotary
positions in pairs of neighbours, no biases, head not tied. Parameters: layers * (4 hidden^2
+ 3 hidden ffn + 2 hidden) + 2 vocab hidden + hidden.

The oracle shares no formula with it beyond the parameters: fp32, eager, attention and norm written
out, rotation by complex numbers, one sequence at a time, gradients averaged by plain all-reduces.
"""

import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

EPS = 1e-5
ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
# by priority, as torchtitan asks; the table of a step names the kernels that ran
ATTENTION = {
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
}


class Shape(NamedTuple):
    hidden: int
    layers: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    rows: int  # sequences of one rank

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def tokens(self) -> int:
        return self.rows * self.seq

    @property
    def flops(self) -> float:
        """Of one rank's step as torchtitan counts: 6 a parameter outside the embedding and token,
        attention not halved."""
        block = 4 * self.hidden**2 + 3 * self.hidden * self.ffn
        weights = self.layers * block + self.vocab * self.hidden
        return self.tokens * (6.0 * weights + 12.0 * self.layers * self.hidden * self.seq)


class Products(nn.Module):
    """Several projections of one input, as one product or as one each."""

    def __init__(self, width: int, sizes: list[int], joined: bool) -> None:
        super().__init__()
        self.sizes = sizes
        whole = [sum(sizes)] if joined else sizes
        self.parts = nn.ModuleList(nn.Linear(width, size, bias=False) for size in whole)

    def forward(self, x: Tensor) -> Iterable[Tensor]:
        if len(self.parts) < len(self.sizes):
            return self.parts[0](x).split(self.sizes, -1)
        return [part(x) for part in self.parts]


class Layer(nn.Module):
    def __init__(self, shape: Shape, joined: bool, rope: str, attention: str) -> None:
        super().__init__()
        self.head_dim, self.rope, self.attention = shape.head_dim, rope, attention
        self.norm1 = nn.RMSNorm(shape.hidden, eps=EPS)
        self.qkv = Products(shape.hidden, [shape.hidden] * 3, joined)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.norm2 = nn.RMSNorm(shape.hidden, eps=EPS)
        self.gate_up = Products(shape.hidden, [shape.ffn] * 2, joined)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def rotate(self, x: Tensor) -> Tensor:
        """x[b, s, heads, head_dim]: pair i turns by position * 10000^(-2i / head_dim)."""
        if self.rope == "flip":  # its backward needs no stack, which inductor is slow at
            flipped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
            return (x.float() * self.table[0] + flipped.float() * self.table[1]).type_as(x)
        pairs = x.float().unflatten(-1, (-1, 2))
        if self.rope == "complex":
            turned = torch.view_as_real(torch.view_as_complex(pairs) * self.table)
        else:
            (a, b), (cos, sin) = pairs.unbind(-1), self.table.unbind(-1)
            turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1)
        return turned.flatten(-2).type_as(x)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv(self.norm1(x)))
        q, k, v = (part.transpose(1, 2) for part in (self.rotate(q), self.rotate(k), v))
        with sdpa_kernel(ATTENTION[self.attention], set_priority=True):
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        gate, up = self.gate_up(self.norm2(x))
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, shape: Shape, joined: bool, rope: str, attention: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        make = (Layer(shape, joined, rope, attention) for _ in range(shape.layers))
        self.layers = nn.ModuleList(make)
        self.norm = nn.RMSNorm(shape.hidden, eps=EPS)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def create(shape: Shape, device: torch.device, joined: bool, rope: str, attention: str) -> Llama:
    """The model in fp32 on the device; its numbers depend on the names of the separate weights."""
    with torch.device("meta"):
        model = Llama(shape, joined, rope, attention)
    model.to_empty(device=device)
    with torch.no_grad():
        for name, value in parts(model, {n: p.detach() for n, p in model.named_parameters()}):
            if "norm" in name:
                value.fill_(1.0)
            else:
                seed = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
                value.normal_(0.0, 0.02, generator=seed)
    set_table(model, shape, device, rope)
    return model


def set_table(model: Llama, shape: Shape, device: torch.device, rope: str) -> None:
    """One table for all layers. A buffer: FSDP would cast an argument to bf16."""
    table = turns(shape, device)
    if rope == "flip":  # what a lane and its neighbour are multiplied by
        cos, sin = table.real, table.imag
        table = torch.stack((torch.stack((cos, cos), -1), torch.stack((-sin, sin), -1))).flatten(-2)
    elif rope == "real":
        table = torch.view_as_real(table)
    for layer in model.layers:
        layer.register_buffer("table", table, persistent=False)


def turns(shape: Shape, device: torch.device) -> Tensor:
    """exp(i angle) as [seq, 1, head_dim / 2]."""
    steps = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float64)
    speeds = 10000.0 ** (-steps / shape.head_dim)
    angles = torch.arange(shape.seq, device=device, dtype=torch.float64).outer(speeds)
    return torch.polar(torch.ones_like(angles), angles).unsqueeze(1).to(torch.complex64)


def parts(model: Llama, values: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Values by the names of separate weights: those of a joined weight are its rows."""
    products = {n: m for n, m in model.named_modules() if isinstance(m, Products)}
    for name, value in values.items():
        owner = products.get(name.partition(".parts.")[0])
        if owner is None or len(owner.parts) == len(owner.sizes):
            yield name, value
        else:
            for index, rows in enumerate(value.split(owner.sizes)):
                yield name.replace(".parts.0.", f".parts.{index}."), rows


class Expected(NamedTuple):
    loss: float
    norm: float
    loss_after: float  # one AdamW step
    gradients: dict[str, Tensor]  # first and last layer, embedding, head, last norm


def gradients(model: Llama, wanted: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """The whole gradients of some weights, averaged over ranks; every rank must ask alike."""
    found = {}
    layers = {name.split(".parts.")[0] for name in wanted}
    for name, parameter in model.named_parameters():
        if name.split(".parts.")[0] in layers:
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                found[name] = gradient.full_tensor().float()
            else:
                found[name] = averaged(gradient.float())
    yield from parts(model, found)


def averaged(gradient: Tensor) -> Tensor:
    gradient = gradient / dist.get_world_size()
    dist.all_reduce(gradient)
    return gradient


def expect(shape: Shape, device: torch.device, batch: tuple[Tensor, Tensor]) -> Expected:
    """Loss, gradients, their norm and the loss after one clipped AdamW step."""
    model = create(shape, device, joined=False, rope="complex", attention="flash")
    kept = ("layers.0.", f"layers.{shape.layers - 1}.", "embed", "norm.", "head")
    loss = plain_loss(model, shape, batch, backward=True)
    for parameter in model.parameters():
        parameter.grad = averaged(parameter.grad)
    found = {n: p.grad.clone() for n, p in model.named_parameters() if n.startswith(kept)}
    parameters = list(model.parameters())
    norm = nn.utils.clip_grad_norm_(parameters, 1.0)
    torch.optim.AdamW(parameters, foreach=False, **ADAMW).step()
    with torch.no_grad():
        after = plain_loss(model, shape, batch, backward=False)
    return Expected(loss, float(norm), after, found)


def plain_loss(model: Llama, shape: Shape, batch: Iterable[Tensor], *, backward: bool) -> float:
    """Mean loss over all ranks' rows; gradients of this rank's rows alone."""
    table = turns(shape, model.head.weight.device)
    ahead = torch.ones(shape.seq, shape.seq, dtype=torch.bool, device=table.device).triu(1)
    total = torch.zeros((), device=table.device)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()

    def turn(x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * table).flatten(
            -2
        )

    for tokens, targets in zip(*batch, strict=True):
        x = model.embed.weight[tokens]
        for layer in model.layers:
            y = norm(x, layer.norm1.weight)
            q, k, v = (
                (y @ p.weight.T).unflatten(-1, (-1, shape.head_dim)) for p in layer.qkv.parts
            )
            q, k, v = (part.transpose(0, 1) for part in (turn(q), turn(k), v))
            scores = (q @ k.transpose(1, 2) / shape.head_dim**0.5).masked_fill(ahead, -torch.inf)
            x = x + (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ layer.out.weight.T
            y = norm(x, layer.norm2.weight)
            gate, up = (y @ part.weight.T for part in layer.gate_up.parts)
            x = x + (gate * gate.sigmoid() * up) @ layer.down.weight.T
        logits = norm(x, model.norm.weight) @ model.head.weight.T
        chosen = logits.gather(1, targets.unsqueeze(1)).squeeze(1)
        loss = (logits.logsumexp(1) - chosen).mean() / shape.rows
        if backward:
            loss.backward()
        total += loss.detach()
    return float(averaged(total))
