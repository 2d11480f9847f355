"""What live models hold. Oracles: whole tensors, gathered by DTensor itself or made by formula."""

import itertools

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from meshwise.nn import gpt
from meshwise.parallel import apply, mesh
from meshwise.reshard import live
from meshwise.spec import Cuts, Experts, Layout, Model

MODEL = Model(hidden=24, layers=2, heads=4, ffn=40, vocab=101, max_seq_len=7)

pytestmark = pytest.mark.dist


def numbered(*shape):
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def holdings(model, ranks):
    return live.held(live.gathered(model, ranks))


def check(held, tensors, wholes, rank):
    """This rank's pieces say, of every element of its tensors, once, where it is in the whole."""
    written = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
    for name, entry in held.items():
        assert entry.shape == tuple(wholes[name].shape)
        for piece in entry.layout:
            if piece.rank != rank:
                continue
            buffer = piece.buffer or name
            there = tuple(map(slice, piece.box.low, piece.box.high))
            here = tuple(map(slice, piece.local(piece.box).low, piece.local(piece.box).high))
            assert torch.equal(tensors[buffer][here], wholes[name][there])
            written[buffer][here] += 1
    for count in written.values():
        assert (count == 1).all()


def placed_in_every_way(ranks):
    grid, tensors, wholes = DeviceMesh("cpu", torch.arange(4).view(2, 2)), {}, {}
    for shape in ((8, 6), (7, 5), (3, 2), (1, 9)):
        for placements in itertools.product([Shard(0), Shard(1), Replicate()], repeat=2):
            name = f"{shape} {placements}"
            wholes[name] = numbered(*shape)
            tensors[name] = distribute_tensor(wholes[name], grid, placements)
    held = holdings(tensors, ranks)
    check(held, live.tensors(tensors), wholes, ranks.rank)
    sizes = ranks.gather({name: tensor.to_local().numel() for name, tensor in tensors.items()})
    for name, entry in held.items():
        there = [rank for rank, of in enumerate(sizes) if of[name]]
        assert sorted({piece.rank for piece in entry.layout}) == there


def test_shards_of_a_mesh_are_where_dtensor_put_them(gloo_ranks):
    gloo_ranks(4, placed_in_every_way)


def strided(ranks):
    from torch.distributed.tensor.placement_types import _StridedShard

    line = DeviceMesh("cpu", range(4))
    for size, factor in ((24, 3), (21, 2), (10, 3)):
        whole = numbered(size, 2)
        blocks = [block.chunk(4) for block in whole.chunk(factor)]
        own = [block[ranks.rank] for block in blocks if ranks.rank < len(block)]
        tensor = DTensor.from_local(
            torch.cat([whole[:0], *own]),
            line,
            [_StridedShard(0, split_factor=factor)],
            shape=whole.shape,
            stride=whole.stride(),
        )
        held = holdings({"a": tensor}, ranks)
        check(held, live.tensors({"a": tensor}), {"a": whole}, ranks.rank)


def test_a_strided_shard_is_in_several_places(gloo_ranks):
    gloo_ranks(4, strided)  # nothing gathers these but by the same rule


def made(ranks, dp, tp, zero):
    layout = Layout(dp=dp, tp=tp, zero=zero)
    place = mesh.build(layout, "cpu")
    with torch.device("meta"):
        model = gpt.GPT(MODEL)
    return apply.parallelize(model, place, dtype="fp32", lowering="eager")


def parallel_gpt(ranks, dp, tp, zero):
    model = made(ranks, dp, tp, zero)
    placements = {p for parameter in model.parameters() for p in parameter.placements}
    model(torch.zeros(1, 3, dtype=torch.int64))  # FSDP2 leaves the root gathered after it
    held, tensors = holdings(model, ranks), live.tensors(model)
    assert tensors.pop("head.projection.weight").data_ptr() == tensors["embed.weight"].data_ptr()
    assert set(tensors) == set(held)
    wholes = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
    check(held, tensors, wholes, ranks.rank)
    first = model.initial_value("layers.1.mlp.down.weight", 0, ranks.device)
    assert torch.equal(wholes["layers.1.mlp.down.weight"], first)
    again = live.held(live.gathered(model, ranks), as_source=True)
    head = again.pop("head.projection.weight")
    assert again == held and {piece.buffer for piece in head.layout} == {"embed.weight"}
    return sorted(map(str, placements))


def whole_experts(ranks, ep, zero):
    """Rank 2 * e + t of an ep group has the experts of block 2 * e + t, whole."""
    sizes = msgspec.structs.replace(MODEL, experts=Experts(num_experts=8, top_k=2, ffn=12))
    cuts = Cuts(stream="seq", experts="experts")
    place = mesh.build(Layout(dp=2, tp=2, ep=ep, zero=zero, cuts=cuts), "cpu")
    with torch.device("meta"):
        model = gpt.GPT(sizes)
    model = apply.parallelize(model, place, dtype="fp32", lowering="eager")
    names = [name for name, _ in model.named_parameters()]
    wholes = {name: model.initial_value(name, 0, ranks.device) for name in names}
    tensors = live.tensors(model)
    tensors.pop("head.projection.weight")
    check(holdings(model, ranks), tensors, wholes, ranks.rank)
    first = wholes["layers.1.moe.experts.first"]
    mine = first.chunk(2 * ep)[ranks.rank % (2 * ep)]
    if zero and ep == 1:  # each of two data ranks has a shard of what its tp rank holds
        mine = mine.chunk(2)[ranks.rank // 2]
    assert torch.equal(tensors["layers.1.moe.experts.first"], mine)


@pytest.mark.parametrize(("ep", "zero"), [(2, 3), (1, 2), (1, 0)])
def test_tp_ranks_hold_different_whole_experts(gloo_ranks, ep, zero):
    gloo_ranks(4, whole_experts, ep=ep, zero=zero)


@pytest.mark.parametrize(("dp", "tp", "zero"), [(2, 2, 3), (2, 2, 0), (4, 1, 2), (1, 4, 0)])
def test_a_gpt_is_where_fsdp_and_tp_put_it(gloo_ranks, dp, tp, zero):
    placements, *_ = gloo_ranks(4, parallel_gpt, dp=dp, tp=tp, zero=zero)
    assert any(placement.startswith("_S") for placement in placements) == (tp > 1)


def part_of_a_mesh(ranks):
    pair = DeviceMesh("cpu", [1, 3])
    tensor = distribute_tensor(numbered(5, 2), pair, [Shard(0)])
    held = holdings({"a": tensor}, ranks)
    return [[piece.rank, piece.box.low[0], piece.box.high[0]] for piece in held["a"].layout]


def test_ranks_outside_the_mesh_hold_nothing(gloo_ranks):
    assert gloo_ranks(4, part_of_a_mesh) == [[[1, 0, 3], [3, 3, 5]]] * 4


MESHES = [  # and what shards by it: none, all, or an axis
    ([1, 0, 2, 3], [0]),
    ([0, 2, 1], [0]),
    ([3, 1], [0]),
    ([1, 3], []),
    ([[0, 2], [1, 3]], []),
    ([[1, 0], [3, 2]], [1]),
    ([[2, 3], [0, 1]], [0]),
    ([[3, 1], [2, 0]], [0, 1]),
]


def in_any_order(ranks):
    """Where torch agrees with itself, so do we; where it does not, nobody knows who made it."""
    told = []
    for shape in ((8, 6), (7, 5), (1, 3)):
        whole = numbered(*shape)
        for number, (order, crossed) in enumerate(MESHES):
            place = DeviceMesh("cpu", order)
            for placements in itertools.product(
                [Shard(0), Shard(1), Replicate()], repeat=place.ndim
            ):
                scattered, cut = (
                    distribute_tensor(whole, place, placements, src_data_rank=by)
                    for by in (0, None)
                )
                inside = place.get_coordinate() is not None
                same = not inside or torch.equal(cut.full_tensor(), whole)
                same = same and torch.equal(scattered.to_local(), cut.to_local())
                axes = {axis for axis, p in enumerate(placements) if p != Replicate()}
                assert all(ranks.gather(same)) or axes & set(crossed)
                if axes & set(crossed):
                    with pytest.raises(ValueError) as caught:
                        holdings({"a": cut}, ranks)
                    told.append(f"{number} {caught.value}")
                else:
                    check(holdings({"a": cut}, ranks), {"a": cut.to_local()}, {"a": whole},
                          ranks.rank)  # fmt: skip
    return told


def test_a_mesh_whose_ranks_do_not_ascend_is_right_where_torch_is_and_refused_elsewhere(gloo_ranks):
    first, *others = gloo_ranks(4, in_any_order)
    assert others == [first] * 3 and len(first) == 3 * (3 * 2 + 2 * 6 + 8)
    assert first[0] == (
        "0 rank 0: a is sharded over ranks [1, 0, 2, 3] of its mesh, which do not ascend: torch "
        "sorts a group's ranks, so that by its mesh and by its group a rank has different shards; "
        "make the mesh of ascending ranks, or give local tensors with Holdings; rank 1: "
        + first[0].partition("; rank 1: ")[2]
    )
    assert any("ranks [1, 0] of its mesh" in said for said in first if said[0] == "5")


def of_parts_of_meshes(ranks):
    """A slice of a mesh, and axes made one: right in order, refused out of it."""
    whole = numbered(5, 2)
    for order in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]):
        grid = DeviceMesh("cpu", order, mesh_dim_names=("a", "b"))
        for part in (grid["a"], grid["b"]):
            tensor = distribute_tensor(whole, part, [Shard(0)])
            check(holdings({"a": tensor}, ranks), {"a": tensor.to_local()}, {"a": whole},
                  ranks.rank)  # fmt: skip
        tensor = distribute_tensor(whole, grid._flatten(), [Shard(0)], src_data_rank=None)
        if order[0] == [0, 1]:
            check(holdings({"a": tensor}, ranks), {"a": tensor.to_local()}, {"a": whole},
                  ranks.rank)  # fmt: skip
        else:
            with pytest.raises(ValueError, match=r"a is sharded over ranks \[0, 2, 1, 3\]"):
                holdings({"a": tensor}, ranks)


def test_slices_of_a_mesh_and_axes_made_one(gloo_ranks):
    gloo_ranks(4, of_parts_of_meshes)


class Upside(Shard):
    """Cuts a dim as nobody knows."""


class Wrapped(torch.Tensor):
    """Its values are not what lies at its address."""


def unknown(ranks):
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

    line = DeviceMesh("cpu", [[0], [1]])
    known = distribute_tensor(numbered(4), line, [Shard(0), Shard(0)])
    meta = TensorMeta(known.shape, known.stride(), known.dtype)
    specs = [
        DTensorSpec(line, (Upside(0), Replicate()), tensor_meta=meta),
        DTensorSpec(line, known.placements, tensor_meta=meta,
                    shard_order=(ShardOrderEntry(0, (1, 0)),)),
    ]  # fmt: skip
    models = [
        *({"a": DTensor(known.to_local(), spec, requires_grad=False)} for spec in specs),
        {"a": torch.ones(3).as_subclass(Wrapped)},
        {"a": torch.ones(9).as_strided((3, 3), (2, 1))},
        {"a": None},
        [torch.ones(3)],
    ]
    said = []
    for model in models:
        with pytest.raises(ValueError) as caught:
            holdings(model if ranks.rank == 1 else {"a": torch.ones(3)}, ranks)
        said.append(str(caught.value))
    return said


def test_what_has_an_unknown_meaning_is_refused_on_all_ranks(gloo_ranks):
    first, second = gloo_ranks(2, unknown)
    assert first == second
    assert first == [
        "rank 1: a is placed as Upside, whose cut is unknown; redistribute it to Shard or "
        "Replicate",
        "rank 1: a has dim 0 sharded by the mesh's axes in the order (1, 0); redistribute it to "
        "plain Shards, in ascending order",
        "rank 1: a is a Wrapped, which is no plain memory; give the tensors inside",
        "rank 1: a is strided by (2, 1) in shape (3, 3): several of its elements may be one; give "
        "a copy, .contiguous()",
        "rank 1: a is no tensor but NoneType; leave it out",
        "rank 1: a model is a module or tensors by name, not list",
    ]


def refused(ranks):
    line = DeviceMesh("cpu", range(ranks.world_size))
    partial = DTensor.from_local(numbered(2), line, [Partial()])
    shape = (2, 3) if ranks.rank else (3, 2)
    dtype = torch.bfloat16 if ranks.rank == 1 else torch.float32
    models = [
        {"b": partial if ranks.rank == 1 else numbered(2)},
        {"b": numbered(4), "a": numbered(*shape)},
        {"a": numbered(2).to(dtype)},
        {"a": torch.zeros(3, dtype=torch.complex64)} if ranks.rank == 0 else None,
        {"a": numbered(3).expand(2, 3)},
        {"a": torch.empty(3, device="meta")},
    ]
    said = []
    for model in models:
        with pytest.raises(ValueError) as caught:
            holdings(model, ranks)
        said.append(str(caught.value))
    return said


def test_what_cannot_be_described_is_refused_on_all_ranks(gloo_ranks):
    first, *others = gloo_ranks(2, refused)
    assert others == [first]
    parts, shapes, dtypes, complexes, expanded, meta = first
    assert parts.startswith("rank 1: b is placed as Partial, ") and "rank 0" not in parts
    assert shapes.startswith("a is (3, 2) fp32 on rank 0, (2, 3) fp32 on rank 1;")
    assert dtypes.startswith("a is (2,) fp32 on rank 0, (2,) bf16 on rank 1;")
    assert complexes.startswith("rank 0: a is torch.complex64, and only torch.float64, ")
    assert "rank 0: a is expanded" in expanded and "rank 1: a is expanded" in expanded
    assert "a is on the meta device" in meta


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.second = nn.Linear(2, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("kept", torch.ones(()))
        self.register_buffer("cache", torch.ones(4), persistent=False)


def alone(ranks):
    model = Small()
    found = live.tensors(model)
    assert list(found) == ["first.weight", "first.bias", "second.weight", "kept"]
    assert found["second.weight"].data_ptr() == model.first.weight.data_ptr()
    assert not any(tensor.requires_grad for tensor in found.values())
    assert live.tensors(None) == {} == holdings(None, ranks)
    held = holdings(model if ranks.rank else None, ranks)
    assert list(held) == ["first.weight", "first.bias", "kept"]
    assert [piece.rank for piece in held["kept"].layout] == [1]
    both = {"wide": numbered(6, 4).T, "odd": numbered(9)[1:], "none": numbered(0, 3)}
    memory = live.memory(live.gathered(both, ranks), 1)
    return [[buffer, [*entry]] for buffer, entry in memory.items() if buffer.rank == 1]


def test_modules_mappings_and_nothing(gloo_ranks):
    (lies, again) = gloo_ranks(2, alone)
    assert (
        lies
        == again
        == [
            [[1, 1, "wide"], [[4, 6], [1, 4], 4, 8]],
            [[1, 1, "odd"], [[8], [1], 4, 4]],
            [[1, 1, "none"], [[0, 3], [3, 1], 4, 8]],
        ]
    )


def test_replaced_storage_is_noticed_and_changed_values_are_not():
    assert live.Watch(None).replaced() is None

    def watched(change):
        model = Small()
        watch = live.Watch(model)
        assert watch.replaced() is None
        change(model)
        return watch.replaced()

    def step(model):
        model.first(torch.ones(2)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        model.load_state_dict(Small().state_dict())

    def new_data(model):
        model.second.weight.data = torch.ones(3, 2)

    def new_parameter(model):
        model.first.bias = nn.Parameter(torch.ones(3))

    def new_dtype(model):
        model.kept = model.kept.to(torch.bfloat16)

    def new_module(model):
        model.first = nn.Linear(2, 3)

    def removed(model):
        del model.first

    def a_view(model):  # at the same address
        square = model.first.bias.data
        model.first.bias.data = square[:2]

    def other_strides(model):
        model.first.weight.data = model.first.weight.data.view(-1).as_strided((3, 2), (1, 3))

    def other_bits(model):
        model.kept.data = model.kept.data.view(torch.int32)

    def negated(model):  # the same bits mean other numbers
        model.first.bias.data = torch._neg_view(model.first.bias.data)

    def set_to(model):
        with torch.no_grad():
            model.first.weight.set_(torch.ones(3, 2))

    def set_to_a_part(model):
        with torch.no_grad():
            model.first.bias.set_(model.first.bias.untyped_storage(), 0, (1,), (1,))

    def longer(model):
        model.kept.resize_(300)

    def storage_given_back(model):
        model.first.bias.untyped_storage().resize_(0)

    def another_object_of_the_same_memory(model):
        model.first.bias = nn.Parameter(model.first.bias.data)

    assert watched(step) is None
    assert watched(new_data) == "first.weight"  # tied: both names have it
    assert watched(new_parameter) == "first.bias"
    assert watched(new_dtype) == "kept"
    assert watched(removed) == watched(new_module) == "first"
    assert watched(a_view) == watched(set_to_a_part) == watched(negated) == "first.bias"
    assert watched(other_strides) == watched(set_to) == "first.weight"
    assert watched(other_bits) == watched(longer) == "kept"
    assert watched(storage_given_back) == "first.bias"
    assert watched(another_object_of_the_same_memory) is None

    tensors = {"a": torch.ones(2), "b": torch.ones(3)}
    watch = live.Watch(tensors)
    tensors["b"].add_(1)
    assert watch.replaced() is None
    tensors["b"] = torch.ones(3)
    assert watch.replaced() == "b"
    del tensors["a"]
    assert watch.replaced() == "a"


def watched_fsdp(ranks):
    model = made(ranks, ranks.world_size, 1, 2)
    watch = live.Watch(model)
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    before = model(tokens)
    found = watch.replaced()
    for tensor in live.tensors(model).values():  # what the model computes is of what was written
        tensor.zero_()
    return [found, before.abs().max().item() > 0, model(tokens).abs().max().item()]


def watched_dtensors(ranks):
    line = DeviceMesh("cpu", [0, 1])

    def watched(change):
        model = {"a": distribute_tensor(numbered(4, 4), line, [Shard(0)])}
        watch = live.Watch(model)
        assert watch.replaced() is None
        change(model, model["a"])
        return watch.replaced()

    def other_values(model, a):
        a.to_local().add_(1)
        model["a"] = DTensor.from_local(a.to_local(), line, [Shard(0)])

    def other_placements(model, a):
        model["a"] = DTensor.from_local(a.to_local().view(4, 2), line, [Shard(1)])

    def same_memory_placed_otherwise(model, a):
        model["a"] = DTensor.from_local(a.to_local(), line, [Replicate()], run_check=False)

    def local_alone(model, a):
        model["a"] = a.to_local()

    def a_view_of_local(model, a):
        a._local_tensor.data = a._local_tensor.data.view(4, 2).T

    return [
        watched(change)
        for change in (
            other_values, other_placements, same_memory_placed_otherwise, local_alone,
            a_view_of_local,
        )
    ]  # fmt: skip


def test_dtensors_with_other_placements_or_memory_are_noticed(gloo_ranks):
    assert gloo_ranks(2, watched_dtensors) == [[None, "a", "a", "a", "a"]] * 2


def test_gathered_copies_are_dropped_and_not_taken_for_replaced_storage(gloo_ranks):
    assert gloo_ranks(2, watched_fsdp) == [[None, True, 0.0]] * 2
