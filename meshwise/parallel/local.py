"""Build a stage for decoding: this rank's part of it in plain tensors, with explicit sums over
ranks.

In: a model's sizes and a ``MeshPlace``. Out: the module of ``nn`` whose products, embedding and
experts hold this rank's part, cut as ``parallel.tensor`` and ``parallel.experts`` cut it. It has no
DTensors and no hooks: with one token there is too little GPU work to hide their host time.
Products of the same input are fused (q, k, v; gate, up). Logits are this rank's part of the
vocabulary. Every dense product is a ``SplitLinear``, so on a GPU a single row goes through
``token_kernels``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from meshwise import torch_private
from meshwise.nn import ModelStage, build
from meshwise.nn.cache import AttendOne
from meshwise.nn.experts import MoE
from meshwise.nn.initial import reset_buffers
from meshwise.nn.llama import QKV, GateUp
from meshwise.parallel import experts, tensor
from meshwise.parallel.mesh import MeshPlace
from meshwise.reshard.regions import chunks
from meshwise.spec import Decoder, Model
from meshwise.spec.recipe import Routing

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
# torch 2.13 warns of the older name
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_FEW_BYTES = 2**18  # most bytes to sum at once, where each rank reads the parts of all ranks


class Sum:
    """Adds the parts of all ranks of a group. Parts of the size of ``token`` [rows, hidden] take
    the way that is fastest for few bytes, if it exists; others take an all-reduce."""

    def __init__(self, group: dist.ProcessGroup, token: Tensor) -> None:
        self.group, self.size = group, token.numel()
        # tp ranks are neighbours, so a tp group lies on one host if its size divides a host's GPUs
        on_one_host = token.is_cuda and torch.cuda.device_count() % group.size() == 0
        is_fit = on_one_host and token.nbytes <= _FEW_BYTES
        self.at_once = torch_private.summed_at_once(group, token) if is_fit else None

    def __call__(self, part: Tensor) -> Tensor:
        if self.at_once is not None and part.numel() == self.size:
            return self.at_once(part)
        dist.all_reduce(part, group=self.group)
        return part


class SplitLinear(nn.Module):
    """x W^T + b, with some rows of W, or with some columns of W and a sum over ranks."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, total: Sum | None = None
    ) -> None:
        super().__init__()
        self.multiply = _multiply(weight.device)
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.total = total

    def forward(self, x: Tensor) -> Tensor:
        if self.total is None:
            return self.multiply(x, self.weight, self.bias)
        y = self.total(self.multiply(x, self.weight, None))
        return y if self.bias is None else y + self.bias


def _multiply(device: torch.device) -> Multiply:
    if device.type != "cuda":
        return F.linear
    from meshwise.parallel import token_kernels

    return token_kernels.linear


def attend_one(device: torch.device) -> AttendOne | None:
    """Return a kernel for the attention of one token, or None where torch's is used (no GPU)."""
    if device.type != "cuda":
        return None
    from meshwise.parallel import token_kernels

    return token_kernels.attend


class FusedLinear(nn.Module):
    """Several products of one input, fused: x -> the result of each."""

    def __init__(self, products: list[SplitLinear]) -> None:
        super().__init__()
        biases = [product.bias for product in products if product.bias is not None]
        assert len(biases) in (0, len(products))
        self.sizes = [len(product.weight) for product in products]
        self.product = SplitLinear(
            torch.cat([product.weight.detach() for product in products]),
            torch.cat([bias.detach() for bias in biases]) if biases else None,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.product(x).split(self.sizes, -1)  # type: ignore[no-any-return]


class Vocabulary(nn.Module):
    """The embedding of this rank's tokens, from ``first`` on, summed with those of other ranks."""

    def __init__(self, weight: Tensor, first: int, total: Sum) -> None:
        super().__init__()
        self.weight, self.first, self.total = nn.Parameter(weight), first, total

    def forward(self, tokens: Tensor) -> Tensor:
        row, last = tokens - self.first, len(self.weight) - 1
        here = (row >= 0) & (row <= last)
        return self.total(F.embedding(row.clamp(0, last), self.weight) * here[..., None])


class Summed(nn.Module):
    """Experts whose partial results are summed over the tp ranks."""

    def __init__(self, moe: MoE, total: Sum) -> None:
        super().__init__()
        self.moe, self.total = moe, total

    def forward(self, x: Tensor) -> Tensor:
        return self.total(self.moe(x))


class Choice:
    """Picks each row's likeliest token from split logits [b, part of the vocabulary] -> [b]."""

    def __init__(self, place: MeshPlace, vocab: int) -> None:
        self.ranks, self.group = place.layout.tp, place.mesh["tp"].get_group()
        self.first = first_row(place, vocab)

    def __call__(self, logits: Tensor) -> Tensor:
        most, token = _largest(logits)
        if self.ranks == 1:
            return token
        # fp32 holds every token id exactly, so one gather brings both
        mine = torch.stack([most.float(), (token + self.first).float()], -1)
        found = mine.new_empty(self.ranks * len(mine), 2)
        _gather(found, mine, group=self.group)
        found = found.view(self.ranks, len(mine), 2)
        best = found[..., 0].argmax(0, keepdim=True)
        return found[..., 1].gather(0, best)[0].long()


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Find each row's largest element and its index. Two steps: a GPU gives a row to one block,
    which alone is slow."""
    parts = logits.unflatten(-1, (math.gcd(logits.shape[-1], 256), -1))
    most, place = parts.max(-1)
    top, part = most.max(-1, keepdim=True)
    return top[..., 0], (part * parts.shape[-1] + place.gather(-1, part))[..., 0]


def first_row(place: MeshPlace, vocab: int) -> int:
    """Return where this rank's part of the vocabulary begins."""
    sizes = chunks(vocab, place.layout.tp)
    if not all(sizes):
        raise ValueError(
            f"Layout.tp = {place.layout.tp}: leaves ranks without a part of vocab = {vocab}; use "
            "a smaller tp"
        )
    return sum(sizes[: place.mesh["tp"].get_local_rank()])


@dataclass(frozen=True)
class _Cut:
    """The cut of a stage: the same stage on the meta device, laid out by ``parallel.tensor``."""

    stage: ModelStage
    parameters: dict[str, nn.Parameter]
    place: MeshPlace
    dtype: torch.dtype
    device: torch.device
    seed: int
    total: Sum | None  # over the ranks of tp

    def share(self, name: str) -> Tensor:
        """Return this rank's part of a parameter's initial value."""
        like = self.parameters[name]
        value = self.stage.initial_value(name, self.seed, self.device)
        if isinstance(like, DTensor):
            mesh, placements = like.device_mesh, like.placements
            value = distribute_tensor(value, mesh, placements, src_data_rank=None).to_local()
        return value.to(self.dtype, copy=True)


def localized(
    model: Model | Decoder,
    layers: range,
    place: MeshPlace,
    *,
    routing: Routing,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> ModelStage:
    """Build the layers with this rank's part of the weights of ``init_weights(seed)``."""
    with torch.device("meta"):
        cut, stage = (build(model, layers, routing=routing) for _ in range(2))
    tensor.cut_model(cut, place)
    parameters, total = dict(cut.named_parameters(remove_duplicate=False)), None
    if place.layout.tp > 1:
        token = torch.empty(place.layout.microbatch_size, model.hidden, dtype=dtype, device=device)
        total = Sum(place.mesh["tp"].get_group(), token)
    _localize(stage, "", _Cut(cut, parameters, place, dtype, device, seed, total))
    stage.tie()
    reset_buffers(stage)
    return stage.requires_grad_(False).eval()


def _localize(module: nn.Module, prefix: str, cut: _Cut) -> None:
    """Fill a module's own parameters, and replace its children by versions for this rank."""
    _fill(module, prefix, cut)
    for name, child in list(module.named_children()):
        full = f"{prefix}{name}"
        if isinstance(child, MoE):
            setattr(module, name, _experts(child, full, cut))
        elif isinstance(child, nn.Linear):
            setattr(module, name, _product(full, cut))
        elif isinstance(child, nn.Embedding) and cut.total is not None:
            first = first_row(cut.place, child.num_embeddings)
            setattr(module, name, Vocabulary(cut.share(f"{full}.weight"), first, cut.total))
        else:
            _localize(child, f"{full}.", cut)
            if isinstance(child, QKV | GateUp):
                setattr(module, name, _fused(child, cut.place))


def _fill(module: nn.Module, prefix: str, cut: _Cut) -> None:
    """Set a module's own parameters, and allocate its buffers."""
    for name, _ in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(cut.share(f"{prefix}{name}")))
    for name, buffer in list(module.named_buffers(recurse=False)):
        setattr(module, name, torch.empty_like(buffer, device=cut.device))


def _product(name: str, cut: _Cut) -> SplitLinear:
    """Build a product. If the weight is cut by columns, the result is summed over ranks."""
    weight, bias = cut.parameters[f"{name}.weight"], None
    by_columns = isinstance(weight, DTensor) and weight.placements[0].is_shard(1)
    if f"{name}.bias" in cut.parameters:
        bias = cut.share(f"{name}.bias")
    return SplitLinear(cut.share(f"{name}.weight"), bias, cut.total if by_columns else None)


def _fused(module: QKV | GateUp, place: MeshPlace) -> FusedLinear:
    products = [part for part in module.children() if isinstance(part, SplitLinear)]
    if isinstance(module, QKV) and module.kv_heads % place.layout.tp:
        rows = tensor.repeated_rows(module.kv_heads, module.head_dim, place.mesh["tp"])
        for product in products[1:]:  # k and v: every rank holds all their heads
            product.weight = nn.Parameter(product.weight.detach()[rows])
            if product.bias is not None:
                product.bias = nn.Parameter(product.bias.detach()[rows])
    return FusedLinear(products)


def _experts(moe: MoE, name: str, cut: _Cut) -> MoE | Summed:
    """Divide experts as ``experts.divide`` does, with plain weights."""
    for full, part in moe.named_modules(prefix=name):
        _fill(part, f"{full}.", cut)
    for part in (moe.experts, moe.shared):
        if part is not None:
            part.added = partial(experts.added, ranks=cut.place.layout.tp, summed=False)
    if cut.place.experts is not None:
        moe.exchange = experts.AllToAll(cut.place.experts["ep"].get_group(), cut.place.layout.ep)
    return moe if cut.total is None else Summed(moe, cut.total)
