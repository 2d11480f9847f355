"""What a refit has moved is what each rank should hold, bit for bit, end to end on gloo.

Oracles: arrays made of a tensor's name and version, of which each rank's pieces are cut by numpy;
torch's ``to``, for dtypes that change; torch.distributed.checkpoint, for DTensors that are cut
unevenly; and the logits of the model that was trained.
"""

import contextlib
import functools
import random
import zlib
from math import prod

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from meshwise.nn import gpt
from meshwise.parallel import apply, mesh
from meshwise.reshard import senders
from meshwise.reshard.holdings import HeldTensor, Padded, buffers, holdings
from meshwise.reshard.regions import placed, replicated, sharded
from meshwise.reshard.tiles import TILE
from meshwise.reshard.weights import Refit
from meshwise.spec import Decoder, Experts, Layout, Mla, Model, WeightLayout, stages_of

pytestmark = pytest.mark.dist

TYPES = {
    "fp32": (np.uint32, torch.float32),
    "bf16": (np.uint16, torch.bfloat16),
    "fp16": (np.uint16, torch.float16),
    "fp8": (np.uint8, torch.float8_e4m3fn),
    "fp8_e5m2": (np.uint8, torch.float8_e5m2),
    "int64": (np.uint64, torch.int64),
}
SPECIAL = {  # -0, NaNs quiet and signalling with payloads, denormals, infinities (e4m3 has none)
    "fp32": [0x80000000, 0x7FC12345, 0xFFC00001, 0x7F800001, 1, 0x807FFFFF, 0x7F800000, 0xFF800000],
    "bf16": [0x8000, 0x7FC5, 0xFFC1, 0x7F81, 1, 0x807F, 0x7F80, 0xFF80],
    "fp16": [0x8000, 0x7E05, 0xFE01, 0x7C01, 1, 0x83FF, 0x7C00, 0xFC00],
    "fp8": [0x80, 0x7F, 0xFF, 0x7E, 0xFE, 0x01, 0x87],
    "fp8_e5m2": [0x80, 0x7D, 0xFF, 0x01, 0x83, 0x7C, 0xFC],
    "int64": [0, 1, 2**63, 2**64 - 1],
}
POISON = 0xA5


@functools.lru_cache(1000)
def whole(name, shape, dtype, version):
    """The bits of a logical tensor's elements, as unsigned integers."""
    word = TYPES[dtype][0]
    draw = np.random.default_rng([version, zlib.crc32(name.encode())])
    bits = draw.integers(0, np.iinfo(word).max, shape, word, endpoint=True)
    special = draw.choice(np.array(SPECIAL[dtype], word), shape)
    return np.where(draw.random(shape) < 0.3, special, bits)


def bits_of(tensor):
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    return tensor.contiguous().view(integers[tensor.itemsize])


def slices(box):
    return tuple(map(slice, box.low, box.high))


class Side:
    """One rank's buffers of some holdings: ``words`` are the bits of ``tensors``."""

    def __init__(self, held, rank):
        self.held, self.rank, self.dtypes, self.words, self.tensors = held, rank, {}, {}, {}
        for name, (shape, dtype) in buffers(held, rank).items():
            words = np.full(shape, POISON, np.uint8).astype(TYPES[dtype][0])
            self.words[name], self.dtypes[name] = words, dtype
            self.tensors[name] = torch.from_numpy(words).view(TYPES[dtype][1])

    def write(self, version, only=None, words=None):
        """Give this rank's pieces (of the tensors in ``only``) the values of a version."""
        for name, tensor in self.held.items():
            for piece in tensor.layout if only is None or name in only else ():
                if piece.rank == self.rank:
                    buffer = (self.words if words is None else words)[piece.buffer or name]
                    dims = len(tensor.shape)
                    extra = buffer.ndim - dims
                    seen = buffer[(None,) * -extra] if extra < 0 else buffer
                    if extra > 0:
                        seen = buffer.reshape(-1, *buffer.shape[extra + 1 :])
                    values = whole(name, tensor.shape, tensor.dtype, version)[slices(piece.box)]
                    seen[slices(piece.local(piece.box))] = values

    def poison(self):
        for words in self.words.values():
            words[...] = POISON

    def check(self, version, only=None):
        """All buffers have these values where there are pieces, and elsewhere what they had."""
        wanted = {name: np.full_like(words, POISON) for name, words in self.words.items()}
        self.write(version, only, wanted)
        for name, words in self.words.items():
            different = int((words != wanted[name]).sum())
            assert not different, f"{name}: {different} of {words.size} of version {version}"


# Models and layouts drawn at random; all ranks draw the same.


def a_model(draw):
    tied = draw.random() < 0.3
    heads, layers, vocab = 24, draw.randint(1, 5), draw.choice([40, 101, 127])
    if draw.random() < 0.25:
        return Model(hidden=24, layers=layers, heads=heads, ffn=48, vocab=vocab, max_seq_len=7)
    experts = mla = None
    if draw.random() < 0.4:
        experts = Experts(
            num_experts=draw.choice([4, 8, 12]), top_k=2, ffn=12, first_dense=draw.randint(0, 1),
            shared_ffn=draw.choice([0, 24]), router_bias=draw.random() < 0.5,
        )  # fmt: skip
    if draw.random() < 0.15:
        mla = Mla(
            q_lora_rank=draw.choice([None, 6]), kv_lora_rank=5, nope_head_dim=2, rope_head_dim=2,
            v_head_dim=3,
        )  # fmt: skip
    return Decoder(
        hidden=16, layers=layers, heads=heads, kv_heads=draw.choice([1, 2, 3, 4, 24]), head_dim=4,
        ffn=48, vocab=vocab, max_seq_len=7, tied=tied, qkv_bias=draw.random() < 0.3,
        qk_norm=draw.random() < 0.3, gated=draw.random() < 0.8, experts=experts, mla=mla,
    )  # fmt: skip


def a_layout(draw, model, world, dtype):
    """Any layout that the model has on at most ``world`` ranks."""
    while True:
        sizes = [draw.choice([1, 1, 2, 3, 4, 8]) for _ in range(6)]
        tp, dp, pp, ep, etp, fsdp = [n if n <= world else 1 for n in sizes]
        if tp * dp * pp > world:
            continue
        per_rank = draw.choice([1, 1, 2]) if pp > 1 else 1
        cuts = sorted(draw.sample(range(1, model.layers), min(pp * per_rank, model.layers) - 1))
        try:
            layout = WeightLayout(
                tp=tp, dp=dp, pp=pp, ep=ep, etp=etp, fsdp=fsdp, stages_per_rank=per_rank,
                layers=tuple(np.diff([0, *cuts, model.layers]).tolist()), dtype=dtype,
                first_rank=draw.randint(0, world - tp * dp * pp),
                vocab_multiple=draw.choice([1, 8, 24, 64]),
                tied=draw.choice([None, None, False]),
                order=draw.choice(["plain", "megatron", "engine"]),
            )  # fmt: skip
            return layout, holdings(model, layout)
        except ValueError:
            continue


def a_pair(seed, world):
    draw = random.Random(f"models {seed} {world}")
    model, dtype = a_model(draw), draw.choice(["fp32", "bf16", "fp8"])
    (first, source), (second, destination) = (a_layout(draw, model, world, dtype) for _ in "12")
    return draw, model, (first, second), (source, destination)


@contextlib.contextmanager
def free_second_steps():
    """Receivers pass on what is small too."""
    usual, senders.STEP_S = senders.STEP_S, 0.0
    try:
        yield
    finally:
        senders.STEP_S = usual


def options_of(draw):
    verify = draw.choice(["hash", "full", "off"])
    atomic = draw.random() < 0.3
    delta = not atomic and verify != "off" and draw.random() < 0.4
    return {"verify": verify, "atomic": atomic, "delta": delta, "pass_on": draw.random() < 0.5}


def there_and_back(ranks, held, options, changed):
    with free_second_steps() if options.pop("pass_on") else contextlib.nullcontext():
        _there_and_back(ranks, held, options, changed)


def _there_and_back(ranks, held, options, changed):
    """Three refits, the source changed between them; then one back into another source."""
    source, destination = (Side(each, ranks.rank) for each in held)
    source.write(1)
    models = [side.tensors or None for side in (source, destination)]
    refit = Refit(models[0], held[0], models[1], held[1], ranks=ranks, **options)
    received = []
    for number, version in enumerate((1, 1, 2), 1):
        source.write(version, None if number < 3 else held[1])
        moved = refit()
        destination.check(version)
        assert moved.version == refit.version == number
        received.append(moved.received_bytes)
    assert received[1] == (0 if options["delta"] else received[0])
    assert moved.extra_bytes - sum(t.nbytes for t in refit.kept.values()) <= 512 * 2**20
    if options["delta"]:  # only what changed, and what changed, moves
        source.write(3, [changed])
        refit()
        expected = Side(held[1], ranks.rank)
        expected.write(2)
        expected.write(3, [changed])
        assert all(np.array_equal(destination.words[n], w) for n, w in expected.words.items())
        source.write(2, [changed])
        refit()
    refit.close()
    again = Side(held[0], ranks.rank)
    back = Refit(models[1], held[1], again.tensors or None, held[0], ranks=ranks)
    back()
    again.check(2)
    back.close()
    source.check(2)
    destination.check(2)


def of_random_models(ranks, seed):
    draw, _, _, held = a_pair(seed, ranks.world_size)
    there_and_back(ranks, held, options_of(draw), draw.choice(sorted(held[1])))


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("world", [2, 3, 4])
def test_models_are_moved_from_any_layout_to_any_and_back(gloo_ranks, world, seed):
    gloo_ranks(world, of_random_models, seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_models_are_moved_among_eight_ranks(gloo_ranks, seed):
    gloo_ranks(8, of_random_models, seed=seed)


def test_the_random_models_have_every_feature():
    found = set()
    for world, seeds in ((2, 15), (3, 15), (4, 15), (8, 4)):
        for seed in range(seeds):
            draw, model, layouts, _ = a_pair(seed, world)
            options = options_of(draw)
            found |= {type(model).__name__, options["verify"]}
            found |= {option for option, value in options.items() if value is True}
            ranks = [set(range(w.first_rank, w.first_rank + w.num_ranks)) for w in layouts]
            if isinstance(model, Decoder):
                kinds = {"mla": model.mla, "experts": model.experts, "tied": model.tied}
                found |= {name for name, present in kinds.items() if present}
            found |= {"idle"} if len(ranks[0] | ranks[1]) < world else set()
            found |= {"disjoint"} if not ranks[0] & ranks[1] else set()
            for layout in layouts:
                axes = ("tp", "dp", "pp", "ep", "etp", "fsdp", "stages_per_rank")
                found |= {axis for axis in axes if getattr(layout, axis) > 1}
                found |= {layout.order, layout.dtype}
                found |= {"untied"} if layout.tied is False else set()
                found |= {"padded"} if model.vocab % layout.vocab_multiple else set()
                found |= {"uneven"} if len(set(layout.layers)) > 1 else set()
    assert found >= {
        "Decoder", "Model", "mla", "experts", "tied", "untied", "idle", "disjoint", "tp", "dp",
        "pp", "ep", "etp", "fsdp", "stages_per_rank", "plain", "megatron", "engine", "fp32", "bf16",
        "fp8", "padded", "uneven", "hash", "full", "off", "atomic", "delta", "pass_on",
    }  # fmt: skip


# Holdings made by hand: cut, fused, repeated and padded in any way.


def a_cut(draw, shape, world):
    """A layout of one tensor on some of the ranks, in any order of them."""
    ranks = draw.sample(range(world), draw.randint(1, world))
    kind = draw.choice(["replicated", "chunks", "sizes", "blocks", "mesh"])
    if kind == "replicated" or not shape:
        return replicated(shape, ranks)
    dim = draw.randrange(len(shape))
    if kind == "mesh":
        grid = draw.choice([(a, world // a) for a in range(1, world + 1) if world % a == 0])
        dims = [None, *range(len(shape))]
        return placed(shape, grid, [draw.choice(dims), draw.choice(dims)])
    if kind == "chunks":
        return sharded(shape, dim, ranks)
    edges = sorted(draw.choices(range(shape[dim] + 1), k=len(ranks) - 1))
    sizes = np.diff([0, *edges, shape[dim]]).tolist()
    if kind == "sizes":
        return sharded(shape, dim, ranks, sizes=sizes)
    return sharded(shape, dim, ranks, blocks=[size for size in sizes if size])


def fused(draw, tensors, parts):
    """These tensors one behind the other in dim 0 of one buffer a rank, with gaps between."""
    filled, columns = {}, tensors[parts[0]].shape[1]
    for name in parts:
        pieces, begin = [], {}
        for piece in tensors[name].layout:
            at = begin.setdefault(piece.rank, filled.get(piece.rank, 0) + draw.randint(0, 2))
            offset = (piece.offset[0] + at, *piece.offset[1:])
            pieces.append(piece._replace(offset=offset, buffer="fused"))
            end = offset[0] + piece.box.shape[0]
            filled[piece.rank] = max(filled.get(piece.rank, 0), end)
        tensors[name] = tensors[name]._replace(layout=tuple(pieces))
    padded = tuple(Padded(rank, (rows + 3, columns), "fused") for rank, rows in filled.items())
    tensors[parts[0]] = tensors[parts[0]]._replace(padded=padded)


def by_hand(seed, world):
    draw = random.Random(f"by hand {seed} {world}")
    dtype = draw.choice(["fp32", "bf16", "fp8"])
    columns = draw.choice([1, 3, 5, 7, 64, 219])
    shapes = {name: (draw.choice([1, 5, 24, 61]), columns) for name in "qkv"}
    shapes |= {"scalar": (), "line": (draw.choice([1, 2, 33, 5000]),)}
    shapes |= {"stack": (4, draw.randint(1, 7), draw.randint(1, 9)), "four": (2, 3, 5, 7)}
    shapes["none"] = (0, 3)
    sides = []
    for _ in "12":
        tensors = {n: HeldTensor(s, dtype, a_cut(draw, s, world)) for n, s in shapes.items()}
        if draw.random() < 0.7:
            for name in "qkv":
                ranks = draw.sample(range(world), draw.randint(1, world))
                tensors[name] = HeldTensor(shapes[name], dtype, sharded(shapes[name], 0, ranks))
            fused(draw, tensors, draw.sample("qkv", 3))
        sides.append(tensors)
    if draw.random() < 0.5:  # a rank that needs it twice
        line = sides[1]["line"]
        twice = tuple(p._replace(buffer="again") for p in a_cut(draw, line.shape, world))
        sides[1]["line"] = line._replace(layout=line.layout + twice)
    return draw, tuple(sides)


def of_holdings_by_hand(ranks, seed):
    draw, held = by_hand(seed, ranks.world_size)
    there_and_back(ranks, held, options_of(draw), draw.choice(sorted(held[1])))


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("world", [2, 3, 4])
def test_holdings_made_by_hand_are_moved_there_and_back(gloo_ranks, world, seed):
    gloo_ranks(world, of_holdings_by_hand, seed=seed)


@pytest.mark.parametrize("seed", range(3))
def test_holdings_made_by_hand_are_moved_among_eight_ranks(gloo_ranks, seed):
    gloo_ranks(8, of_holdings_by_hand, seed=seed)


def of_every_word(ranks, dtype):
    """Bytes and words of two bytes in all their patterns, others at random; in rows of four."""
    word = TYPES[dtype][0]
    if np.dtype(word).itemsize > 2:
        words = whole("words", (2**14, 4), dtype, 1).copy()
    else:
        words = np.arange(np.iinfo(word).max + 1).astype(word).reshape(-1, 4)
    words[:2].flat[: len(SPECIAL[dtype])] = SPECIAL[dtype]
    shape = words.shape
    source = {"a": HeldTensor(shape, dtype, sharded(shape, 0, [0, 1], sizes=[9, len(words) - 9]))}
    target = {"a": HeldTensor(shape, dtype, sharded(shape, 1, [1, 0], sizes=[3, 1]))}
    mine = words[:9] if ranks.rank == 0 else words[9:]
    mine = torch.from_numpy(mine.copy()).view(TYPES[dtype][1])
    there = Side(target, ranks.rank)
    Refit({"a": mine}, source, there.tensors, target, ranks=ranks)()
    assert np.array_equal(there.words["a"], words[:, 3:] if ranks.rank == 0 else words[:, :3])


@pytest.mark.parametrize("dtype", TYPES)
def test_every_pattern_of_bits_arrives(gloo_ranks, dtype):
    gloo_ranks(2, of_every_word, dtype=dtype)


# Modes and options.


def in_many_steps(ranks, cap_bytes, stages):
    shape = (1030, 2047)  # 8 MiB
    split = sharded(shape, 0, [0, 1, 2, 3]) if stages == 1 else replicated(shape, [0])
    target = sharded(shape, 1, [3, 0, 1, 2]) if stages == 1 else replicated(shape, [0, 1, 2, 3])
    held = {"a": HeldTensor(shape, "fp32", split)}, {"a": HeldTensor(shape, "fp32", target)}
    source, destination = (Side(each, ranks.rank) for each in held)
    models = source.tensors or None, destination.tensors
    with free_second_steps():
        refit = Refit(models[0], held[0], models[1], held[1], ranks=ranks, cap_bytes=cap_bytes)
    for version in (1, 2):
        source.write(version)
        destination.poison()
        moved = refit()
        destination.check(version)
    phases = [name for name, _ in refit.transport.parts()]
    refit.close()
    assert len(refit.transfer.stages) == stages
    return [moved.extra_bytes, phases.count("move")]


@pytest.mark.parametrize("stages", [1, 2])
def test_staging_keeps_to_the_cap_by_more_steps(gloo_ranks, stages):
    cap = 2**20 if stages == 1 else 2**22
    few, many = (gloo_ranks(4, in_many_steps, cap_bytes=c, stages=stages) for c in (2**29, cap))
    assert {steps for _, steps in few} == {stages}
    assert len({steps for _, steps in many}) == 1 and many[0][1] > 5 * stages
    assert max(extra for extra, _ in many) <= cap < max(extra for extra, _ in few)


def refused_cap(ranks):
    held = {"a": HeldTensor((9,), "fp32", replicated((9,), [ranks.world_size - 1]))}
    other = {"a": HeldTensor((9,), "fp32", replicated((9,), [0]))}
    sides = [Side(each, ranks.rank) for each in (held, other)]
    with pytest.raises(ValueError, match="cap_bytes"):
        Refit(sides[0].tensors, held, sides[1].tensors, other, ranks=ranks, cap_bytes=TILE)
    ranks.barrier("after")


def test_a_cap_that_is_too_small_is_refused_on_all_ranks(gloo_ranks):
    gloo_ranks(3, refused_cap)


def of_one_to_four(ranks, options):
    """One copy of a model to four replicas: each byte leaves its owner once."""
    model = Decoder(
        hidden=32, layers=3, heads=8, kv_heads=4, head_dim=8, ffn=96, vocab=101, max_seq_len=7
    )
    layouts = WeightLayout(order="megatron"), WeightLayout(dp=4, order="engine", vocab_multiple=64)
    held = tuple(holdings(model, layout) for layout in layouts)
    source, destination = (Side(each, ranks.rank) for each in held)
    models = source.tensors or None, destination.tensors
    with free_second_steps():
        refit = Refit(models[0], held[0], models[1], held[1], ranks=ranks, **options)
    for version in (1, 2, 3):
        source.write(version)
        destination.poison()
        moved = refit()
        destination.check(version)
    refit.close()
    size = sum(prod(tensor.shape) * 2 for tensor in held[0].values())
    return [len(refit.transfer.stages), moved.sent_bytes, moved.received_bytes, size]


@pytest.mark.parametrize("options", [{}, {"verify": "full"}, {"atomic": True}, {"verify": "off"}])
def test_replicas_pass_on_what_they_received(gloo_ranks, options):
    told = gloo_ranks(4, of_one_to_four, options=options)
    (stages, sent, received, size), *others = told
    assert (stages, received) == (2, 0) and size <= sent < 1.1 * size
    assert [other[2] for other in others] == [size] * 3


NAMES = [f"layers.{i}.q.{part}" for i in (0, 1) for part in ("weight", "lora_a", "lora_b")]


def of_adapters(ranks):
    shape = (12, 10)
    held = [
        {name: HeldTensor(shape, "bf16", sharded(shape, dim, [0, 1, 2])) for name in NAMES}
        for dim in (0, 1)
    ]
    source, destination = (Side(each, ranks.rank) for each in held)
    source.write(1)
    refit = Refit(
        source.tensors, held[0], destination.tensors, held[1], ranks=ranks, only=["*.lora_?"]
    )
    refit()
    wanted = [name for name in NAMES if "lora" in name]
    assert list(refit.transfer.names) == wanted
    destination.check(1, wanted)


def test_adapters_are_moved_alone(gloo_ranks):
    gloo_ranks(3, of_adapters)


def of_another_dtype(ranks, before, after, options):
    with free_second_steps():
        _of_another_dtype(ranks, before, after, options)


def _of_another_dtype(ranks, before, after, options):
    shape = (33, 35)
    held = {"a": HeldTensor(shape, before, sharded(shape, 0, [0, 1, 2]))}
    target = {"a": HeldTensor(shape, after, sharded(shape, 1, [2, 0, 1], sizes=[1, 20, 14]))}
    if options.pop("passed_on", False):
        held = {"a": HeldTensor(shape, before, replicated(shape, [0]))}
        target = {"a": HeldTensor(shape, after, replicated(shape, [2, 0, 1]))}
    source, destination = Side(held, ranks.rank), Side(target, ranks.rank)
    refit = Refit(
        source.tensors, held, destination.tensors, target, ranks=ranks, convert=True, **options
    )
    assert len(refit.transfer.stages) == (1 if len(held["a"].layout) == 3 else 2)
    word, kind = TYPES[after]
    for version in (1, 2):
        source.write(version)
        refit()
        bits = torch.from_numpy(whole("a", shape, before, version).copy())
        converted = bits.view(TYPES[before][1]).to(kind)
        (piece,) = [p for p in target["a"].layout if p.rank == ranks.rank]
        wanted, found = converted[slices(piece.box)], destination.tensors["a"]
        nan = wanted.float().isnan()  # whose payload depends on how torch vectorises
        assert torch.equal(nan, found.float().isnan()) and 0 < nan.sum() < nan.numel()
        same = destination.words["a"] == bits_of(wanted).numpy().view(word)
        assert (torch.from_numpy(same) | nan).all()
    refit.close()


CONVERTING = [{}, {"verify": "full", "atomic": True}, {"delta": True}, {"passed_on": True}]


@pytest.mark.parametrize("options", CONVERTING)
@pytest.mark.parametrize(
    ("before", "after"), [("fp32", "bf16"), ("bf16", "fp32"), ("fp32", "fp16"), ("bf16", "fp8")]
)
def test_dtypes_change_as_torch_changes_them(gloo_ranks, before, after, options):
    gloo_ranks(3, of_another_dtype, before=before, after=after, options=options)


def of_views(ranks, options):
    """A destination with gaps between its rows, or transposed, or at an odd address."""
    values = torch.arange(18.0).view(6, 3)
    place = DeviceMesh("cpu", range(ranks.world_size))
    source = {name: distribute_tensor(values, place, [Shard(0)]) for name in "abc"}
    around = torch.full((8, 9), -1.0), torch.full((3, 6), -1.0), torch.full((19,), -1.0)
    models = {"a": around[0][1:7, 2:5], "b": around[1].T, "c": around[2][1:].view(6, 3)}
    refit = Refit(source, None, models, None, ranks=ranks, **options)
    for version in (0, 1):
        for tensor in source.values():
            tensor.to_local().add_(version)
        refit()
        assert all(torch.equal(tensor, values + version) for tensor in models.values())
        around[0][1:7, 2:5] = -1.0
        assert (around[0] == -1.0).all() and around[2][0] == -1.0
    refit.close()


@pytest.mark.parametrize("options", [{}, {"verify": "full"}, {"atomic": True}])
def test_views_are_written_and_nothing_around_them(gloo_ranks, options):
    gloo_ranks(2, of_views, options=options)


# Models that train.

MODEL = Model(hidden=24, layers=3, heads=4, ffn=40, vocab=101, max_seq_len=9)
TOKENS = torch.arange(27).view(3, 9) * 5 % 101


def whole_gpt():
    with torch.device("meta"):
        model = gpt.GPT(MODEL)
    model.to_empty(device="cpu")
    model.tie()
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    return model


def trained(layout):
    """This rank's part of a GPT."""
    place = mesh.build(layout, "cpu")
    stage = stages_of(layout, MODEL)[place.pipeline_rank]
    with torch.device("meta"):
        model = gpt.GPT(MODEL, range(stage.first_layer, stage.last_layer))
    return apply.parallelize(model, place, dtype="fp32", lowering="eager")


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def unsettle(model, version):
    """Other weights, the same on all ranks: what a step of training would do."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            seed = zlib.crc32(name.replace("head.projection", "embed").encode()) + version
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            if isinstance(parameter, DTensor):
                values = distribute_tensor(
                    values, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
            parameter.add_(values, alpha=0.1)


def of_a_trained_gpt(ranks, degrees):
    layout = Layout(**degrees)
    source, destination = trained(layout), whole_gpt()
    refit = Refit(source, None, destination, None, ranks=ranks)
    optimizer = torch.optim.AdamW(source.parameters(), lr=1e-2, foreach=False)
    for version in range(3):
        moved = refit()
        logits = full(source(TOKENS))
        torch.testing.assert_close(destination(TOKENS), logits, rtol=0, atol=1e-5)
        wanted = {name: full(p) for name, p in source.named_parameters()}
        found = dict(destination.named_parameters())
        assert wanted.keys() == found.keys()
        for name, value in wanted.items():
            assert torch.equal(bits_of(value), bits_of(found[name].detach()))
        if version == 0:
            source(TOKENS).float().square().mean().backward()
            optimizer.step()
        else:
            unsettle(source, version)
    assert moved.version == 3
    refit.close()
    again = trained(layout)
    back = Refit(destination, None, again, None, ranks=ranks)
    back()
    back.close()
    for name, parameter in again.named_parameters():
        assert torch.equal(bits_of(full(parameter)), bits_of(found[name].detach())), name


TRAINED = {
    "tp2": (2, {"tp": 2}),
    "zero3": (2, {"dp": 2, "zero": 3}),
    "tp2 zero3": (4, {"dp": 2, "tp": 2, "zero": 3}),
}


@pytest.mark.parametrize("name", TRAINED)
def test_a_refitted_gpt_has_the_weights_and_logits_of_the_trained_one(gloo_ranks, name):
    world, degrees = TRAINED[name]
    gloo_ranks(world, of_a_trained_gpt, degrees=degrees)


def of_a_pipelined_gpt(ranks):
    layout = Layout(pp=2, schedule="1f1b", num_microbatches=2, layers=(1, 2))
    source, destination = trained(layout), whole_gpt()
    with pytest.raises(ValueError) as caught:  # nothing says that both ends stay equal
        Refit(source, None, destination, None, ranks=ranks)
    once = {n: p for n, p in source.named_parameters() if n != "head.projection.weight"}
    refit = Refit(once, None, destination, None, ranks=ranks)
    for version in (1, 2):
        unsettle(source, version)
        refit()
        hidden, logits = torch.empty(3, 9, MODEL.hidden), torch.empty(3, 9, MODEL.vocab)
        with torch.no_grad():
            if source.first:
                hidden = source(TOKENS)
            dist.broadcast(hidden, 0)
            if source.last:
                logits = source(hidden)
            dist.broadcast(logits, 1)
            torch.testing.assert_close(destination(TOKENS), logits, rtol=0, atol=1e-5)
        found = dict(destination.named_parameters(remove_duplicate=False))
        for name, value in source.named_parameters():
            assert torch.equal(bits_of(value.detach()), bits_of(found[name].detach()))
    refit.close()
    return str(caught.value)


def test_a_gpt_in_two_stages_is_refitted_into_a_whole_one(gloo_ranks):
    said, again = gloo_ranks(2, of_a_pipelined_gpt)
    assert said == again
    assert said == (
        "destination head.projection.weight: is one tensor with embed.weight, but the source has "
        "two that may differ; untie it, or leave head.projection.weight out of the source if they "
        "never do"
    )


# Torch's own resharding, through files.


def beside_a_checkpoint(ranks, folder):
    line, grid = DeviceMesh("cpu", range(4)), DeviceMesh("cpu", torch.arange(4).view(2, 2))
    shapes = [(7, 5), (9, 3), (2, 11), (10, 6, 3), (1, 4), (64, 33)]
    for dtype in ("fp32", "bf16", "fp8"):
        source, loaded, refitted = {}, {}, {}
        for shape in shapes:
            name, (_, kind) = f"{dtype} {shape}", TYPES[dtype]
            bits = torch.from_numpy(whole(name, shape, dtype, 1)).view(kind)
            source[name] = cut(bits, line, [Shard(0)])
            for model, value in ((loaded, 0x11), (refitted, 0x22)):
                filled = torch.full((*shape, kind.itemsize), value, dtype=torch.uint8)
                model[name] = cut(filled.view(kind)[..., 0], grid, [Shard(1), Shard(0)])
        dcp.save(source, checkpoint_id=f"{folder}/{dtype}")
        dcp.load(loaded, checkpoint_id=f"{folder}/{dtype}")
        refit = Refit(source, None, refitted, None, ranks=ranks)
        refit()
        refit.close()
        for name, tensor in loaded.items():
            wanted, found = (bits_of(t.to_local()) for t in (tensor, refitted[name]))
            assert torch.equal(wanted, found), name


def cut(tensor, place, placements):
    """A DTensor, cut as integers: not all of torch's operations know fp8."""
    local = distribute_tensor(bits_of(tensor), place, placements, src_data_rank=None).to_local()
    return DTensor.from_local(
        local.contiguous().view(tensor.dtype), place, placements, shape=tensor.shape,
        stride=tensor.contiguous().stride(), run_check=False,
    )  # fmt: skip


def test_uneven_shards_arrive_as_torchs_checkpoint_brings_them(gloo_ranks, tmp_path):
    gloo_ranks(4, beside_a_checkpoint, folder=str(tmp_path))
