"""FSDP2's units and messages against the counts of a real NCCL trace and hand arithmetic."""

import msgspec
import pytest

from meshwise.models import catalogue, decoder, fsdp
from meshwise.spec import Collective, Decoder, Experts, Model

TINY = Decoder(hidden=10, layers=2, heads=3, kv_heads=1, head_dim=4, ffn=9, vocab=11, max_seq_len=8)


@pytest.mark.parametrize(  # three matrices of the feed-forward, q and out, k and v, two norms
    ("name", "layer", "with_norms", "per_rank"),
    [
        ("llama-3-70b", 855_638_016, 855_654_400, 106_956_800),  # the count in Primus' NCCL trace
        ("llama-3.1-405b", 3_187_671_040, 3_187_703_808, 398_462_976),
        ("llama-3-8b", 218_103_808, 218_112_000, 27_264_000),
    ],
)
def test_a_layer_on_eight_ranks(name, layer, with_norms, per_rank):
    for unit in fsdp.units(catalogue.find(name))[:-1]:
        matrices = sum(w.num_elements for w in unit.weights if len(w.shape) == 2)
        assert matrices == layer
        assert fsdp.num_elements(unit) == with_norms
        assert fsdp.shard_elements(unit, 8) == per_rank
        assert fsdp.shard_elements(unit, 1) == with_norms


def test_the_root_of_llama_70b():
    root = fsdp.units(catalogue.find("llama-3-70b"))[-1]
    assert [w.name for w in root.weights] == ["embed.weight", "norm.weight", "head.weight"]
    assert fsdp.num_elements(root) == 2_101_354_496
    assert fsdp.shard_elements(root, 8) == 262_669_312


def test_the_command_of_llama_70b_has_the_total_size():
    plan = fsdp.planned(catalogue.find("llama-3-70b"), shard=8, reduce_dtype="bf16")
    commands = {fsdp.nccl_tests_command(p.collective) for p in plan if p.unit == "layers.0"}
    assert commands == {
        "all_gather_perf -b 1711308800 -e 1711308800 -g 8 -d bfloat16",
        "reduce_scatter_perf -b 1711308800 -e 1711308800 -g 8 -d bfloat16",
    }


@pytest.mark.parametrize(
    ("kind", "dtype", "command"),
    [
        ("all_to_all", "fp32", "alltoall_perf -b 96 -e 96 -g 4 -d float"),
        ("send_recv", "fp16", "sendrecv_perf -b 96 -e 96 -g 4 -d half"),
        ("all_reduce", "fp64", "all_reduce_perf -b 96 -e 96 -g 4 -d double"),
    ],
)
def test_commands_of_other_collectives(kind, dtype, command):
    op = Collective(kind=kind, size_bytes=96, group_size=4, dtype=dtype)
    assert fsdp.nccl_tests_command(op) == command


def test_what_nccl_tests_cannot_do_is_said():
    with pytest.raises(ValueError, match="nccl-tests has no test"):
        fsdp.nccl_tests_command(Collective(kind="send", size_bytes=8, group_size=2))


def test_every_weight_is_padded_in_its_first_dim():
    """By hand, 4 ranks: q [12,10] 3 rows a rank, k and v [4,10] 1, out [10,12] 3, gate and up
    [9,10] 3, down [10,9] 3, two norms [10] 3."""
    layer = fsdp.units(TINY)[0]
    assert fsdp.shard_elements(layer, 4) == 30 + 2 * 10 + 36 + 2 * 30 + 27 + 2 * 3
    assert fsdp.num_elements(layer) == 120 + 2 * 40 + 120 + 2 * 90 + 90 + 2 * 10
    root = fsdp.units(TINY)[-1]
    assert fsdp.shard_elements(root, 4) == 3 * 10 + 3 + 3 * 10
    # more ranks than rows: each still sends one row
    assert fsdp.shard_elements(root, 16) == 10 + 1 + 10


def test_experts_are_cut_between_each_other():
    moe = Experts(num_experts=6, top_k=1, ffn=5, shared_ffn=3, first_dense=1, router_bias=True)
    dense, sparse, _ = fsdp.units(msgspec.structs.replace(TINY, experts=moe))
    rest = fsdp.shard_elements(dense, 4) - 2 * 30 - 27  # without the dense feed-forward
    router, shared = 2 * 10, 10 + 10 + 3 * 3  # ceil(6/4) rows of 10; gate, up [3,10], down [10,3]
    stacked = 2 * (10 * 10) + 2 * (10 * 5)  # ceil(6/4) experts of gate_up [10,10] and down [10,5]
    assert fsdp.shard_elements(sparse, 4) == rest + router + shared + stacked


def test_units_hold_every_weight_once():
    for name in ("llama-2-7b", "mixtral-8x7b", "deepseek-v2-lite", "gpt-125m"):
        model = catalogue.find(name)
        found = fsdp.units(model)
        assert [unit.name for unit in found] == [
            *(f"layers.{i}" for i in range(model.layers)),
            "root",
        ]
        assert sum(map(fsdp.num_elements, found)) == decoder.published_parameters(model)


def test_no_gradient_reaches_the_bias_of_a_router():
    """transformers 4.57.1 has 671,026,404,352 parameters; the bias is a buffer."""
    found = fsdp.units(catalogue.find("deepseek-v3"))
    assert sum(map(fsdp.num_elements, found)) == 671_026_404_352


def test_a_tied_weight_is_in_the_root_once():
    tied = msgspec.structs.replace(TINY, tied=True)
    assert [w.name for w in fsdp.units(tied)[-1].weights] == ["embed.weight", "norm.weight"]
    gpt = Model(hidden=8, layers=1, heads=2, ffn=16, vocab=11, max_seq_len=4)
    assert fsdp.num_elements(fsdp.units(gpt)[-1]) == 11 * 8 + 4 * 8 + 2 * 8


def counted(plan):
    """{(unit, phase, kind): count}"""
    return {(p.unit, p.phase, p.collective.kind): p.count for p in plan}


def test_zero3_gathers_layers_twice_and_the_root_once_a_microbatch():
    assert counted(fsdp.planned(TINY, shard=4, microbatches=3)) == {
        ("root", "forward", "all_gather"): 3,
        ("layers.0", "forward", "all_gather"): 3,
        ("layers.1", "forward", "all_gather"): 3,
        ("layers.1", "backward", "all_gather"): 3,
        ("layers.1", "backward", "reduce_scatter"): 3,
        ("layers.0", "backward", "all_gather"): 3,
        ("layers.0", "backward", "reduce_scatter"): 3,
        ("root", "backward", "reduce_scatter"): 3,
    }


def test_zero2_gathers_once_a_step():
    plan = counted(fsdp.planned(TINY, shard=4, reshard=False, microbatches=3))
    for unit in ("layers.0", "layers.1", "root"):
        assert plan.pop((unit, "forward", "all_gather")) == 1
        assert plan.pop((unit, "backward", "reduce_scatter")) == 3
    assert not plan


def test_sizes_and_groups_of_hsdp():
    layer = fsdp.units(TINY)[0]
    plan = fsdp.planned(TINY, shard=4, replicas=2)
    elements = fsdp.shard_elements(layer, 4)
    ops = {p.collective.kind: p for p in plan if p.unit == "layers.0"}
    assert all(p.elements_per_rank == elements for p in ops.values())
    gather, scatter, reduce = (
        ops[kind].collective for kind in ("all_gather", "reduce_scatter", "all_reduce")
    )
    assert gather == Collective(
        kind="all_gather", size_bytes=2 * 4 * elements, group_size=4, dtype="bf16"
    )
    assert scatter == Collective(
        kind="reduce_scatter", size_bytes=4 * 4 * elements, group_size=4, dtype="fp32"
    )
    assert reduce == Collective(
        kind="all_reduce", size_bytes=4 * elements, group_size=2, group_stride=4, dtype="fp32",
        in_place=True,
    )  # fmt: skip


def test_thousands_of_layers_are_written_once_for_each_kind(monkeypatch):
    written, forward = [], fsdp.families.forward

    def noted(*args, **given):
        written.append(len(given["layers"]))
        return forward(*args, **given)

    monkeypatch.setattr(fsdp.families, "forward", noted)
    experts = Experts(num_experts=4, top_k=2, ffn=6, first_dense=2)
    short, long = (msgspec.structs.replace(TINY, layers=n, experts=experts) for n in (4, 10_000))
    plan = fsdp.planned(long, shard=2)
    assert written == [2]
    by_unit = {unit.name: fsdp.shard_elements(unit, 2) for unit in fsdp.units(long)}
    assert {row.unit: row.elements_per_rank for row in plan} == by_unit
    first = [row for row in plan if row.unit in {"root", *(f"layers.{n}" for n in range(4))}]
    assert first == fsdp.planned(short, shard=2)


def test_one_shard_only_all_reduces_its_replicas():
    assert fsdp.planned(TINY, shard=1) == []
    plan = fsdp.planned(TINY, shard=1, replicas=4, reshard=False)
    assert {p.collective.kind for p in plan} == {"all_reduce"}
    assert sum(p.elements_per_rank for p in plan) == decoder.published_parameters(TINY)


@pytest.mark.parametrize("bad", [{"shard": 0}, {"shard": 2, "replicas": 0}])
def test_impossible_degrees_are_named(bad):
    with pytest.raises(ValueError, match="= 0: must be >= 1"):
        fsdp.planned(TINY, **bad)


def lines(name, ranks=8):
    model = catalogue.find(name)
    found = [f"{name}: bf16 gathered, fp32 scattered, {ranks} ranks"]
    different = {}
    for unit in fsdp.units(model):
        shape = tuple(weight.shape for weight in unit.weights)
        different.setdefault(shape, []).append(unit)
    for same in different.values():
        held, total = fsdp.shard_elements(same[0], ranks), fsdp.num_elements(same[0])
        called = same[0].name if len(same) == 1 else f"{same[0].name} to {same[-1].name}"
        found.append(f"  {called:<24} {total:>14,} elements, {held:>13,} a rank")
    plan = [p for p in fsdp.planned(model, shard=ranks) if p.unit in ("layers.0", "root")]
    found += [f"  {p.unit:<8} {fsdp.nccl_tests_command(p.collective)}" for p in plan]
    return "\n".join(found)


def test_units_of_the_catalogue_are_as_recorded(golden):
    golden("operations_fsdp.txt", "\n\n".join(map(lines, catalogue.decoder_names())) + "\n")
