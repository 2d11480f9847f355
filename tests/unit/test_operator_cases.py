"""Which cases ``measure gemm``, ``attention``, ``overlap``, ``layer`` time; the best shape."""

import dataclasses
import math

import pytest

from meshwise.models.primus import AttentionShape
from meshwise.options.measure import AttentionOptions, GemmOptions, LayerOptions, OverlapOptions
from meshwise.probe.cases import attention, gemm, layer, overlap
from meshwise.probe.cases.scope import Scope
from meshwise.spec import (
    Attention,
    Case,
    Cluster,
    Decoder,
    Device,
    Experts,
    Gemm,
    Mla,
    Sample,
    Tier,
)

LLAMA_8B = Decoder(
    name="llama", hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14336,
    vocab=128256, max_seq_len=8192,
)  # fmt: skip


def scope(kind: str = "cuda", world_size: int = 1, dtype: str = "bf16") -> Scope:
    cluster = Cluster(
        name="test",
        num_hosts=1,
        num_devices_per_host=world_size,
        device=Device(name="x", kind=kind, memory_bytes=2**36),
        tiers=(Tier(name="host", num_devices=world_size),),
    )
    return Scope(cluster, world_size, dtype)


def shape(case: Case) -> tuple[int, int, int]:
    assert isinstance(case.op, Gemm)
    return case.op.m, case.op.n, case.op.k


def test_a_model_gives_the_published_products_in_the_order_of_primus():
    found = gemm.derived(scope(), GemmOptions(configs={"Llama3.1_8B": (LLAMA_8B, 8192)}))
    assert [row.name for row in found[::3]] == ["qkv", "out", "gate_up", "down", "vocab"]
    # Primus, benchmark_gemm.py: forward shapes at microbatch 1, then weight and input gradient
    assert [shape(row.case) for row in found[::3]] == [
        (8192, 6144, 4096), (8192, 4096, 4096), (8192, 28672, 4096), (8192, 4096, 14336),
        (8192, 128256, 4096),
    ]  # fmt: skip
    assert [shape(row.case) for row in found[1:3]] == [(6144, 4096, 8192), (8192, 4096, 6144)]
    stored = [(row.case.op.trans_a, row.case.op.trans_b) for row in found[:3]]
    assert stored == [(False, True), (True, False), (False, False)]
    assert sum(row.case.op.flops for row in found[::3]) == pytest.approx(12.181e12, rel=1e-4)
    eight = gemm.derived(
        scope(),
        GemmOptions(configs={"Llama3.1_8B": (LLAMA_8B, 8192)}, microbatch_sizes=tuple(range(1, 9))),
    )
    assert len(eight) == 120  # rows of its CSV
    assert {row.case for row in found} <= set(
        gemm.cases(scope(), GemmOptions(model=(LLAMA_8B,), seq_len=8192))
    )


def test_fp8_is_stored_as_its_kernels_take_it_and_scaled_both_ways():
    found = gemm.cases(scope(), GemmOptions(model=(LLAMA_8B,), dtypes=("fp8",), modes=("cold",)))
    assert {(case.op.trans_a, case.op.trans_b) for case in found} == {(False, True)}
    assert [case.op.scaling for case in found[:4]] == ["tensor", "row", "tensor", "row"]
    assert [shape(case) for case in found[:6:2]] == [
        (4096, 6144, 4096), (6144, 4096, 4096), (4096, 4096, 6144),
    ]  # fmt: skip


def test_without_options_every_kind_of_shape_is_measured_once():
    found = gemm.cases(scope(), GemmOptions())
    assert len(found) == len({case.id for case in found})
    cold = {shape(case) for case in found if case.regime == "cold"}
    assert {(8192, 8192, 8192), (128, 8192, 8192), (64, 64, 64)} <= cold
    assert [shape(case) for case in found if case.regime == "sustained"] == [(16384,) * 3]
    on_cpu = gemm.cases(scope("cpu", dtype="fp32"), GemmOptions())
    assert {case.regime for case in on_cpu} == {"warm"}
    assert sum(case.op.flops for case in on_cpu) < 1e10  # a second or so in all
    only = gemm.cases(scope(), GemmOptions(square=(512,), modes=("warm",)))
    assert [shape(case) for case in only] == [(512, 512, 512)]


def test_shapes_asked_for_are_the_only_ones_and_the_largest_is_sustained():
    found = gemm.cases(scope(), GemmOptions(shape=("512:1024:256,64,32", "8,8,8")))
    assert [shape(case) for case in found if case.regime == "cold"] == [
        (512, 64, 32), (768, 64, 32), (8, 8, 8),
    ]  # fmt: skip
    assert [shape(case) for case in found if case.regime == "sustained"] == [(768, 64, 32)]


def samples_of(cases: list[Case], rate) -> list[Sample]:
    """As if measured on a device whose FLOP/s are ``rate(m, n, k)``; 0 stands for no memory."""
    found = []
    for case in cases:
        per_s = rate(*shape(case))
        outcome = {"status": "ok", "times_s": (case.op.flops / per_s,)} if per_s else {}
        failure = {"status": "oom", "reason": "out of memory"}
        found.append(Sample(case_id=case.id, case=case, **(outcome or failure)))
    return found


def search(rate, **options) -> tuple[list[Sample], list[Case]]:
    """The samples of the search, and what it asked for when it had ended."""
    samples = samples_of(gemm.cases(scope(), GemmOptions(search=True, **options)), rate)
    while wanted := gemm.next_shapes(samples):
        assert not {case.id for case in wanted} & {sample.case_id for sample in samples}
        assert gemm.next_shapes(samples) == wanted
        if wanted[0].regime == "sustained":
            break
        samples += samples_of(wanted, rate)
    assert gemm.next_shapes(samples + samples_of(wanted, rate)) == []
    return samples, wanted


def best(samples: list[Sample]) -> tuple[int, int, int]:
    ok = [sample for sample in samples if sample.status == "ok"]
    return shape(max(ok, key=lambda sample: sample.case.op.flops / sample.times_s[0]).case)


def test_the_search_walks_to_a_peak_between_the_points_of_its_grid():
    def rate(m, n, k):
        return 8e14 - 1e14 * abs(math.log(m / 6144)) - 1e14 * abs(math.log(n * k / 8192 / 10922))

    samples, (last,) = search(rate)
    m, n, k = best(samples)
    assert (m, n * k) == (6144, pytest.approx(8192 * 10922, rel=0.03))
    assert last == Case(op=Gemm(m=m, n=n, k=k), regime="sustained")
    assert {sample.case.regime for sample in samples} == {"cold"}
    assert all(size % 256 == 0 for sample in samples for size in shape(sample.case))


def test_the_search_ends_where_nothing_is_better_or_after_four_rounds():
    peak = (8192, 8192, 8192)
    samples, _ = search(lambda *mnk: 8e14 if mnk == peak else 7e14)
    assert (best(samples), len(samples)) == (peak, 15 + 8)
    samples, _ = search(lambda m, n, k: 1e9 * m * n * k)  # the longer the better, for ever
    assert max(shape(samples[-1].case)) == 51456  # 21760, 28928, 38656: each 4/3 of the last
    samples, wanted = search(lambda *_: 0)  # nothing fits
    assert (len(samples), wanted) == (15, [])
    samples, _ = search(lambda m, n, k: 0 if m > 8192 else 1e9 * m)  # the larger ones do not fit
    assert best(samples)[0] <= 8192
    assert gemm.next_shapes([]) == []


def test_each_dtype_and_scaling_is_searched_by_itself():
    samples, _ = search(lambda *_: 1e14, dtypes=("bf16", "fp8"))
    kinds = [(sample.case.op.dtype, sample.case.op.scaling) for sample in samples]
    assert {kind: kinds.count(kind) for kind in kinds} == dict.fromkeys(
        (("bf16", "none"), ("fp8", "tensor"), ("fp8", "row")), 15 + 8
    )


def test_attention_of_lists_and_models_by_every_back_end():
    deepseek = AttentionShape("deepseek_v3", 8192, 8192, 128, 128, 192, 128, True)
    found = attention.cases(scope(), AttentionOptions(shapes=[deepseek]))
    assert [case.backend for case in found[::2]] == list(attention.BACKENDS)
    ways = [case.op.direction for case in found]
    assert ways == ["forward", "backward"] * 9  # a budget cuts back ends, not directions
    assert len(found) == 2 * 9
    assert {(case.op.head_dim, case.op.value_dim) for case in found} == {(192, 128)}
    # Primus' forward FLOPs of it, 2 * S^2 * heads * (192 + 128) / 2
    assert found[0].op.flops == 2_748_779_069_440

    latent = Mla(kv_lora_rank=512, nope_head_dim=128, rope_head_dim=64, v_head_dim=128)
    v2_lite = Decoder(
        name="v2-lite", hidden=2048, layers=1, heads=16, kv_heads=16, head_dim=128, ffn=10944,
        vocab=102400, max_seq_len=4096, mla=latent,
    )  # fmt: skip
    (only,) = attention.cases(
        scope(),
        AttentionOptions(
            model=(v2_lite,), seq_lens=(1024,), microbatch_sizes=(3,), backends=("flex",),
            directions=("backward",), causal=False,
        ),
    )  # fmt: skip
    wanted = Attention(
        batch=3, q_len=1024, kv_len=1024, heads=16, kv_heads=16, head_dim=192, head_dim_v=128,
        causal=False, direction="backward",
    )  # fmt: skip
    assert only == Case(op=wanted, regime="cold", backend="flex")
    assert found[0].op.dtype == "bf16"


def test_windows_come_beside_the_whole_mask_and_need_causality():
    found = attention.cases(
        scope("cpu"), AttentionOptions(windows=(32, 64), backends=("math",), seq_lens=(128,))
    )
    assert {case.op.window for case in found} == {None, 32, 64}
    with pytest.raises(ValueError, match=r"windows = \(32,\): only causal attention has a window"):
        attention.cases(scope("cpu"), AttentionOptions(windows=(32,), causal=False))
    with pytest.raises(ValueError, match="backends = fash: must be of flash, cudnn"):
        attention.cases(scope(), AttentionOptions(backends=("fash",)))
    long = [
        case.op for case in attention.cases(scope(), AttentionOptions()) if case.backend == "flash"
    ]
    assert {op.batch * op.q_len for op in long} == {16384}


def test_overlap_pairs_a_layer_with_the_collectives_of_training():
    found = overlap.cases(scope(world_size=4), OverlapOptions(model=(LLAMA_8B,), sizes="1048581"))
    assert [case.op.collective.kind for case in found] == list(overlap.KINDS)
    # the largest of a layer is gate and up; the vocabulary's is larger but not of a layer
    assert {(c.op.compute.m, c.op.compute.n, c.op.compute.k) for c in found} == {
        (4096, 28672, 4096)
    }
    assert {case.op.collective.size_bytes for case in found} == {2**20}
    assert {case.op.collective.group_size for case in found} == {4}
    assert len(overlap.cases(scope("cpu", 2), OverlapOptions())) == 8
    with pytest.raises(ValueError, match="1 rank has no collective; use at least 2"):
        overlap.cases(scope(), OverlapOptions())
    with pytest.raises(ValueError, match="sizes = '7': must be at least 8 bytes"):
        overlap.cases(scope(world_size=4), OverlapOptions(sizes="7"))


SMALL = Decoder(
    hidden=64, layers=4, heads=4, kv_heads=4, head_dim=16, ffn=96, vocab=128, max_seq_len=64,
    window=8, full_layers=(3,), experts=Experts(num_experts=4, top_k=2, ffn=32, first_dense=1),
)  # fmt: skip


def test_layers_of_each_kind_over_every_degree_that_divides():
    asked = LayerOptions(
        model=(SMALL,), seq_len=32, microbatch_sizes=(1, 4), tp=(1, 2), cp=(1, 4), ep=(1, 4)
    )
    ops = [case.op for case in layer.cases(scope(world_size=4), asked)]
    assert {(op.part, op.form) for op in ops} == {
        ("head", ""), ("layer", "dense w8"), ("layer", "experts w8"), ("layer", "experts")
    }  # fmt: skip
    assert all(op.model.layers == 4 for op in ops)  # the last of them is a kind of its own
    found = {(op.tp, op.sequence_parallel, op.cp, op.ep) for op in ops if "experts" in op.form}
    assert found == {
        (1, False, 1, 1), (1, False, 1, 4), (1, False, 4, 1), (1, False, 4, 4),
        (2, True, 1, 1), (2, False, 1, 1),  # tp * cp = 8 and 4 experts over 2 ranks do not divide
    }  # fmt: skip
    assert {op.ep for op in ops if "experts" not in op.form} == {1}
    assert [op.direction for op in ops] == ["forward", "backward"] * (len(ops) // 2)
    assert len(set(ops)) == len(ops)
    assert {op.microbatch_size for op in ops} == {1, 4}


def test_only_the_backward_of_layers_is_measured_recomputed():
    plain = LayerOptions(model=(SMALL,), seq_len=32, microbatch_sizes=(1,))
    asked = dataclasses.replace(plain, recompute=("none", "full", "selective"))
    before, after = (layer.cases(scope(world_size=1), each) for each in (plain, asked))
    more = [case.op for case in after if case not in before]
    assert [case for case in after if case in before] == before
    assert [(op.part, op.direction, op.recompute) for op in more] == 3 * [
        ("layer", "backward", "full"), ("layer", "backward", "selective")
    ]  # fmt: skip


def test_layers_that_no_ranks_divide_are_refused():
    asked = LayerOptions(model=(SMALL,), seq_len=32, ep=(3,))
    with pytest.raises(ValueError, match="ep = 3: do not divide 4 ranks"):
        layer.cases(scope(world_size=4), asked)
    with pytest.raises(ValueError, match="ep = 2: the model has no experts; use 1"):
        layer.cases(scope(world_size=4), LayerOptions(model=(LLAMA_8B,), seq_len=32, ep=(2,)))
