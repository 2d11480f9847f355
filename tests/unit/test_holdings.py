"""What ranks hold, against numpy: fused and cut tensors built by their definition, bytes by hand,
and for layouts drawn at random that everything is somewhere and nothing twice."""

from math import lcm, prod
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshwise.models import catalogue
from meshwise.models.decoder import weights
from meshwise.reshard.holdings import HeldTensor, buffers, holdings, of_plan
from meshwise.reshard.regions import moved, replicated, sharded
from meshwise.spec import (
    DTYPE_BYTES,
    Decoder,
    Experts,
    Layout,
    Mla,
    Model,
    WeightLayout,
)
from meshwise.spec.weights import Order
from tests import sample_records as known

# Layer 0 is dense, layer 1 has experts; every kind of bias and norm.
MOE = Decoder(
    hidden=6, layers=2, heads=4, kv_heads=2, head_dim=3, ffn=8, vocab=10, max_seq_len=8,
    qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=True,
    experts=Experts(
        num_experts=4, top_k=1, ffn=4, shared_ffn=8, shared_gate=True, first_dense=1,
        router_bias=True,
    ),
)  # fmt: skip
LATENT = Decoder(
    hidden=6, layers=1, heads=4, kv_heads=4, head_dim=5, ffn=8, vocab=8, max_seq_len=8,
    mla=Mla(q_lora_rank=3, kv_lora_rank=2, nope_head_dim=3, rope_head_dim=2, v_head_dim=4),
)  # fmt: skip
GPT = Model(hidden=8, layers=4, heads=4, ffn=12, vocab=10, max_seq_len=5)
LLAMA = catalogue.find("llama-3-8b")
changed = msgspec.structs.replace


def state_of(held):
    """Every logical tensor with numbers of its own."""
    state, start = {}, 0
    for name, tensor in held.items():
        stop = start + prod(tensor.shape)
        state[name] = np.arange(start, stop, dtype=float).reshape(tensor.shape)
        start = stop
    return state


def filled(held, rank, state):
    """A rank's buffers as the pieces say; -1 where no piece is."""
    found = {name: np.full(shape, -1.0) for name, (shape, _) in buffers(held, rank).items()}
    for name, tensor in held.items():
        for piece in tensor.layout:
            if piece.rank == rank:
                buffer = found[piece.buffer or name]
                missing = len(tensor.shape) - buffer.ndim
                view = buffer.reshape((1,) * missing + buffer.shape)
                view[window(piece.local(piece.box))] = state[name][window(piece.box)]
    return found


def window(box):
    return tuple(slice(low, high) for low, high in zip(box.low, box.high, strict=True))


def part(array, dim, index, parts):
    return np.split(array, parts, axis=dim)[index]


def padded(table, rows, tp, index):
    below = np.full((rows - len(table), table.shape[1]), -1.0)
    return part(np.concatenate([table, below]), 0, index, tp)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def by_kind(of, biased=True):
    """Names and arrays of a weight and its bias."""
    return {kind: of(kind) for kind in (("weight", "bias") if biased else ("weight",))}


def megatron(state, rows, tp, t, ep, e, etp, x):
    """What Megatron-core has on the rank of these indices, of the model ``MOE``."""
    found = {
        "embedding.word_embeddings.weight": padded(state["embed.weight"], rows, tp, t),
        "output_layer.weight": padded(state["head.weight"], rows, tp, t),
        "decoder.final_layernorm.weight": state["norm.weight"],
    }
    for layer in range(2):
        s = {n.removeprefix(f"layers.{layer}."): a for n, a in state.items() if f"s.{layer}." in n}
        to = f"decoder.layers.{layer}."
        found[to + "input_layernorm.weight"] = s["norm1.weight"]
        found[to + "pre_mlp_layernorm.weight"] = s["norm2.weight"]
        found[to + "self_attention.q_layernorm.weight"] = s["q_norm.weight"]
        found[to + "self_attention.k_layernorm.weight"] = s["k_norm.weight"]
        for kind in ("weight", "bias"):
            groups = [
                np.concatenate([part(s[f"{name}.{kind}"], 0, group, 2) for name in "qkv"])
                for group in range(2)
            ]
            qkv = part(np.concatenate(groups), 0, t, tp)
            found[f"{to}self_attention.linear_qkv.{kind}"] = qkv
        found[to + "self_attention.linear_proj.weight"] = part(s["out.weight"], 1, t, tp)
        found[to + "self_attention.linear_proj.bias"] = s["out.bias"]
        prefix, into = ("", "mlp.") if layer == 0 else ("shared.", "mlp.shared_experts.")
        for kind in ("weight", "bias"):
            halves = [part(s[f"{prefix}{half}.{kind}"], 0, t, tp) for half in ("gate", "up")]
            found[f"{to}{into}linear_fc1.{kind}"] = np.concatenate(halves)
        found[f"{to}{into}linear_fc2.weight"] = part(s[f"{prefix}down.weight"], 1, t, tp)
        found[f"{to}{into}linear_fc2.bias"] = s[f"{prefix}down.bias"]
    found[to + "mlp.router.weight"] = s["router.weight"]
    found[to + "mlp.router.expert_bias"] = s["router.bias"]
    found[to + "mlp.shared_experts.gate_weight"] = s["shared_gate.weight"]
    for k, expert in enumerate(range(4 * e // ep, 4 * (e + 1) // ep)):
        for kind in ("weight", "bias"):
            halves = [part(s[f"experts.{half}.{kind}"][expert], 0, x, etp) for half in GATE_UP]
            found[f"{to}mlp.experts.linear_fc1.{kind}{k}"] = np.concatenate(halves)
        down = part(s["experts.down.weight"][expert], 1, x, etp)
        found[f"{to}mlp.experts.linear_fc2.weight{k}"] = down
        found[f"{to}mlp.experts.linear_fc2.bias{k}"] = s["experts.down.bias"][expert]
    return found


GATE_UP = ("gate", "up")


def engine(state, rows, tp, t, ep, e, etp, x):
    """What vLLM has there. Of two kv heads, four ranks hold 0, 0, 1, 1."""
    found = {
        "model.embed_tokens.weight": padded(state["embed.weight"], rows, tp, t),
        "lm_head.weight": padded(state["head.weight"], rows, tp, t),
        "model.norm.weight": state["norm.weight"],
    }
    kv_parts, kv = (tp, t) if tp <= 2 else (2, t // 2)
    for layer in range(2):
        s = {n.removeprefix(f"layers.{layer}."): a for n, a in state.items() if f"s.{layer}." in n}
        to = f"model.layers.{layer}."
        found[to + "input_layernorm.weight"] = s["norm1.weight"]
        found[to + "post_attention_layernorm.weight"] = s["norm2.weight"]
        found[to + "self_attn.q_norm.weight"] = s["q_norm.weight"]
        found[to + "self_attn.k_norm.weight"] = s["k_norm.weight"]
        for kind in ("weight", "bias"):
            q = part(s[f"q.{kind}"], 0, t, tp)
            k, v = (part(s[f"{name}.{kind}"], 0, kv, kv_parts) for name in "kv")
            found[f"{to}self_attn.qkv_proj.{kind}"] = np.concatenate([q, k, v])
        found[to + "self_attn.o_proj.weight"] = part(s["out.weight"], 1, t, tp)
        found[to + "self_attn.o_proj.bias"] = s["out.bias"]
        prefix, into = ("", "mlp.") if layer == 0 else ("shared.", "mlp.shared_expert.")
        for kind in ("weight", "bias"):
            halves = [part(s[f"{prefix}{half}.{kind}"], 0, t, tp) for half in GATE_UP]
            found[f"{to}{into}gate_up_proj.{kind}"] = np.concatenate(halves)
        found[f"{to}{into}down_proj.weight"] = part(s[f"{prefix}down.weight"], 1, t, tp)
        found[f"{to}{into}down_proj.bias"] = s[f"{prefix}down.bias"]
    found[to + "mlp.gate.weight"] = s["router.weight"]
    found[to + "mlp.gate.e_score_correction_bias"] = s["router.bias"]
    found[to + "mlp.shared_expert_gate.weight"] = s["shared_gate.weight"]
    mine = slice(4 * e // ep, 4 * (e + 1) // ep)
    for kind in ("weight", "bias"):
        halves = [part(s[f"experts.{half}.{kind}"][mine], 1, x, etp) for half in GATE_UP]
        found[f"{to}mlp.experts.routed_experts.w13_{kind}"] = np.concatenate(halves, axis=1)
    found[to + "mlp.experts.routed_experts.w2_weight"] = part(
        s["experts.down.weight"][mine], 2, x, etp
    )
    found[to + "mlp.experts.routed_experts.w2_bias"] = s["experts.down.bias"][mine]
    return found


@pytest.mark.parametrize("order", [megatron, engine])
@pytest.mark.parametrize(
    ("tp", "dp", "ep", "etp"),
    [(1, 1, 1, 1), (2, 1, 1, 2), (2, 2, 2, 1), (2, 2, 4, 1), (4, 1, 1, 4), (4, 2, 2, 2)],
)
def test_a_fused_order_is_that_of_its_definition(order, tp, dp, ep, etp):
    layout = WeightLayout(
        tp=tp, dp=dp, ep=ep, etp=etp, first_rank=3, vocab_multiple=16, order=order.__name__
    )
    held = holdings(MOE, layout)
    state = state_of(held)
    for index in range(tp * dp):
        expected = order(state, 16, tp, index % tp, ep, index // etp % ep, etp, index % etp)
        assert_same(filled(held, 3 + index, state), expected)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_plain_order_has_a_buffer_a_tensor_under_its_name(tp):
    """As DTensor cuts: q by rows, out by columns, an uneven vocabulary by torch.chunk."""
    held = holdings(MOE, WeightLayout(tp=tp, etp=tp))
    state = state_of(held)
    rows = {1: [10], 2: [5, 5], 4: [3, 3, 3, 1]}[tp]
    for t in range(tp):
        found = filled(held, t, state)
        assert found.keys() == state.keys()
        low = sum(rows[:t])
        for name, expected in {
            "embed.weight": state["embed.weight"][low : low + rows[t]],
            "layers.0.q.weight": part(state["layers.0.q.weight"], 0, t, tp),
            "layers.1.k.bias": part(state["layers.1.k.bias"], 0, t * min(tp, 2) // tp, min(tp, 2)),
            "layers.0.out.weight": part(state["layers.0.out.weight"], 1, t, tp),
            "layers.0.up.bias": part(state["layers.0.up.bias"], 0, t, tp),
            "layers.1.experts.gate.weight": part(state["layers.1.experts.gate.weight"], 1, t, tp),
            "layers.1.experts.down.weight": part(state["layers.1.experts.down.weight"], 2, t, tp),
        }.items():
            np.testing.assert_array_equal(found[name], expected, err_msg=name)


def test_latent_attention():
    for order, names in {
        "megatron": [
            "linear_q_down_proj", "q_layernorm", "linear_q_up_proj", "linear_kv_down_proj",
            "kv_layernorm", "linear_kv_up_proj", "linear_proj",
        ],
        "engine": [
            "fused_qkv_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_layernorm", "kv_b_proj",
            "o_proj",
        ],
    }.items():  # fmt: skip
        held = holdings(LATENT, WeightLayout(tp=2, order=order))
        state = state_of(held)
        found = filled(held, 1, state)
        attention = [n.split(".")[-2] for n in found if "attention." in n or "attn." in n]
        assert sorted(attention) == sorted(names)
    at = "model.layers.0.self_attn."
    down = [state[f"layers.0.{name}_down.weight"] for name in ("q", "kv")]
    np.testing.assert_array_equal(found[at + "fused_qkv_a_proj.weight"], np.concatenate(down))
    up = part(state["layers.0.kv_up.weight"], 0, 1, 2)
    np.testing.assert_array_equal(found[at + "kv_b_proj.weight"], up)
    whole_q = changed(LATENT, mla=changed(LATENT.mla, q_lora_rank=None))
    names = buffers(holdings(whole_q, WeightLayout(order="engine")), 0)
    assert {at + "q_proj.weight", at + "kv_a_proj_with_mqa.weight"} <= names.keys()
    names = buffers(holdings(whole_q, WeightLayout(order="megatron")), 0)
    assert "decoder.layers.0.self_attention.linear_q_proj.weight" in names


def test_a_gpt_goes_by_the_names_of_its_module_and_its_qkv_lies_by_head():
    plain = holdings(GPT, WeightLayout(tp=2))
    state = state_of(plain)
    qkv = state["layers.2.attention.qkv.weight"]
    np.testing.assert_array_equal(
        filled(plain, 1, state)["layers.2.attention.qkv.weight"], qkv[12:]
    )
    fused = filled(holdings(GPT, WeightLayout(tp=2, order="megatron")), 1, state)
    np.testing.assert_array_equal(
        fused["decoder.layers.2.self_attention.linear_qkv.weight"], qkv[12:]
    )
    served = filled(holdings(GPT, WeightLayout(tp=2, order="engine")), 1, state)
    for kind in ("weight", "bias"):
        by_head = state[f"layers.2.attention.qkv.{kind}"].reshape(4, 3, 2, -1)
        expected = np.concatenate([by_head[2:, j].reshape(4, -1) for j in range(3)])
        found = served[f"transformer.h.2.attn.c_attn.{kind}"]
        np.testing.assert_array_equal(found.reshape(12, -1), expected)


def test_feed_forwards_without_a_gate():
    model = changed(MOE, gated=False)
    names = [weight.name for weight in weights(model)]
    assert "layers.0.gate.weight" not in names
    found = buffers(holdings(model, WeightLayout(tp=2, order="megatron")), 0)
    assert found["decoder.layers.0.mlp.linear_fc1.weight"] == ((4, 6), "bf16")
    assert found["decoder.layers.1.mlp.experts.linear_fc1.weight3"] == ((4, 6), "bf16")
    assert found["decoder.layers.1.mlp.shared_experts.linear_fc1.bias"] == ((4,), "bf16")
    found = buffers(holdings(model, WeightLayout(order="engine")), 0)
    assert found["model.layers.1.mlp.experts.routed_experts.w13_weight"] == ((4, 4, 6), "bf16")


def test_stages_uneven_and_interleaved():
    """Stages of 1, 1, 2 and 1 layers: ranks 0-1 have the first and third, 2-3 the others."""
    model = changed(LLAMA, layers=5)
    layout = WeightLayout(tp=2, pp=2, stages_per_rank=2, layers=(1, 1, 2, 1))
    held = holdings(model, layout)
    ranks = [{p.rank for p in held[f"layers.{i}.q.weight"].layout} for i in range(5)]
    assert ranks == [{0, 1}, {2, 3}, {0, 1}, {0, 1}, {2, 3}]
    assert {p.rank for p in held["embed.weight"].layout} == {0, 1}
    assert {p.rank for n in ("head", "norm") for p in held[f"{n}.weight"].layout} == {2, 3}
    held = holdings(model, changed(layout, order="megatron"))
    names = {piece.buffer for piece in held["layers.3.q.weight"].layout}
    assert names == {"model1.decoder.layers.1.self_attention.linear_qkv.weight"}
    assert "model0.embedding.word_embeddings.weight" in buffers(held, 0)
    assert "model1.output_layer.weight" in buffers(held, 3)
    held = holdings(model, WeightLayout(pp=2, layers=(2, 3), order="megatron"))
    names = {piece.buffer for piece in held["layers.3.q.weight"].layout}
    assert names == {"decoder.layers.1.self_attention.linear_qkv.weight"}
    held = holdings(model, WeightLayout(pp=2, layers=(2, 3), order="engine"))
    names = {piece.buffer for piece in held["layers.3.q.weight"].layout}
    assert names == {"model.layers.3.self_attn.qkv_proj.weight"}


def test_equal_layers_share_their_pieces():
    held = holdings(LLAMA, WeightLayout(tp=4))
    assert held["layers.1.q.weight"] is held["layers.31.q.weight"]


def test_a_tied_head_holds_the_embedding():
    tied = changed(MOE, tied=True)
    assert "head.weight" not in holdings(tied, WeightLayout())
    assert "lm_head.weight" not in buffers(holdings(tied, WeightLayout(order="engine")), 0)
    for layout, ranks in [
        (WeightLayout(order="engine", tied=False), (0, 0)),
        (WeightLayout(order="engine", pp=2), (0, 1)),
        (WeightLayout(order="engine", pp=2, tied=True), (0, 1)),
    ]:
        held = holdings(tied, layout)
        pieces = held["embed.weight"].layout
        assert [(p.rank, p.buffer) for p in pieces] == [
            (ranks[0], "model.embed_tokens.weight"), (ranks[1], "lm_head.weight"),
        ]  # fmt: skip
        assert "head.weight" not in held
    assert [p.buffer for p in holdings(tied, WeightLayout(pp=2))["embed.weight"].layout] == [
        "", "head.weight",
    ]  # fmt: skip
    assert [p.buffer for p in holdings(GPT, WeightLayout(pp=2))["embed.weight"].layout] == [
        "", "head.projection.weight",
    ]  # fmt: skip


def test_rows_of_padding_are_in_the_buffers_and_in_no_piece():
    """Ten words in sixteen rows on four ranks: the last has padding alone."""
    held = holdings(MOE, WeightLayout(tp=4, order="engine", vocab_multiple=16))
    name = "model.embed_tokens.weight"
    assert [buffers(held, rank)[name] for rank in range(4)] == [((4, 6), "bf16")] * 4
    assert [p.box.low[0] for p in held["embed.weight"].layout] == [0, 4, 8]
    assert held["embed.weight"].layout[-1].box.high == (10, 6)


def test_fsdp_cuts_the_first_dim_of_what_is_there():
    """tp 2, then the 5 rows of a half embedding over 4 ranks: 2, 2, 1 and none; experts by
    whole experts, in engine order, over the ranks that would repeat them."""
    held = holdings(MOE, WeightLayout(tp=2, dp=4, fsdp=4))
    rows = [buffers(held, rank).get("embed.weight", ((0,),))[0][0] for rank in range(8)]
    assert rows == [2, 2, 2, 2, 1, 1, 0, 0]
    starts = {p.rank: p.box.low[0] for p in held["embed.weight"].layout}
    assert starts == {0: 0, 1: 5, 2: 2, 3: 7, 4: 4, 5: 9}
    out = {p.rank: p.box for p in held["layers.0.out.weight"].layout}
    assert (out[3].low, out[3].high) == ((2, 6), (4, 12))
    held = holdings(MOE, WeightLayout(dp=4, ep=2, fsdp=4, order="engine"))
    experts = [(p.rank, p.box.low[0], p.box.high[0], p.offset) for p in
               held["layers.1.experts.up.weight"].layout]  # fmt: skip
    assert experts == [
        (0, 0, 1, (0, 4, 0)), (1, 2, 3, (0, 4, 0)), (2, 1, 2, (0, 4, 0)), (3, 3, 4, (0, 4, 0)),
    ]  # fmt: skip
    held = holdings(MOE, WeightLayout(dp=2, fsdp=2, order="megatron"))
    fc1 = [(p.rank, p.box.low, p.box.high, p.offset) for p in
           held["layers.1.experts.up.weight"].layout if p.buffer.endswith("weight2")]  # fmt: skip
    assert fc1 == [(1, (2, 0, 0), (3, 4, 6), (0, 0, 0))]
    assert all(buffers(held, rank)["decoder.layers.1.mlp.router.expert_bias"] == ((4,), "fp32")
               for rank in range(2))  # fmt: skip


def held_bytes(model, layout, rank=0):
    sizes = buffers(holdings(model, layout), rank).values()
    return sum(prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in sizes)


# Four layers of width 1024 as Megatron's refit benchmark has them; attention 4 h^2, feed-forward
# 8 h^2, norms h, fp32; the vocabulary 50257 padded to 50432.
SMALL = Decoder(
    hidden=1024, layers=4, heads=8, kv_heads=8, head_dim=128, ffn=4096, vocab=50257,
    max_seq_len=512, gated=False,
)  # fmt: skip
SMALL_BYTES = 4 * (2 * 50432 * 1024 + 4 * (12 * 1024**2 + 2 * 1024) + 1024)


@pytest.mark.parametrize("order", get_args(Order))
def test_bytes_of_a_rank(order):
    llama = WeightLayout(order=order)
    assert held_bytes(LLAMA, llama) == 16_060_522_496  # 8,030,261,248 parameters as published
    assert round(SMALL_BYTES / 1e6, 1) == 614.5  # reference: what tp2-tp1 copies within ranks
    small = WeightLayout(order=order, dtype="fp32", vocab_multiple=256)
    assert held_bytes(SMALL, small) == SMALL_BYTES
    norms = 4 * 9 * 1024
    halves = [held_bytes(SMALL, changed(small, tp=2), rank) for rank in range(2)]
    assert halves == [(SMALL_BYTES + norms) // 2] * 2
    moe = Experts(num_experts=8, top_k=2, ffn=4096)
    of_experts, router = 4 * 4 * 8 * 2 * 4096 * 1024, 4 * 4 * 8 * 1024
    dense = SMALL_BYTES - 4 * 4 * 8 * 1024**2
    ep2 = changed(small, dp=2, ep=2)
    sizes = [held_bytes(changed(SMALL, experts=moe), ep2, rank) for rank in range(2)]
    assert sizes == [dense + router + of_experts // 2] * 2
    assert round(sum(sizes) / 1e6, 1) == pytest.approx(2034.6, abs=0.3)  # the routers: 0.26
    large = changed(SMALL, hidden=4096, layers=16, heads=32, kv_heads=32, ffn=16384)
    quarter = held_bytes(large, changed(small, tp=2, pp=2, vocab_multiple=512), rank=3)
    assert round(4 * quarter / 1e6 / 4, 1) == pytest.approx(3636.7, abs=0.3)


def orders_of(model):
    return [o for o in get_args(Order) if isinstance(model, Decoder) or not o.startswith("hf")]


@st.composite
def models(draw):
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    sizes = {
        "hidden": 4, "layers": 4, "heads": 4 * draw(st.integers(1, 2)), "kv_heads": kv_heads,
        "head_dim": draw(st.integers(1, 3)), "ffn": 8, "vocab": draw(st.integers(1, 20)),
        "max_seq_len": 8,
    }  # fmt: skip
    flags = ["tied", "qkv_bias", "out_bias", "mlp_bias", "gated"]
    model = Decoder(**sizes, **{name: draw(st.booleans()) for name in flags})
    kind = draw(st.sampled_from(["dense", "experts", "latent", "gpt"]))
    if kind == "gpt":
        width = model.heads * model.head_dim
        return Model(hidden=width, layers=4, heads=model.heads, ffn=8, vocab=model.vocab)
    if kind == "experts":
        shared, dense = 8 * draw(st.integers(0, 1)), draw(st.integers(0, 1))
        moe = Experts(num_experts=4, top_k=1, ffn=4, shared_ffn=shared, first_dense=dense)
        return changed(model, experts=changed(moe, router_bias=draw(st.booleans())))
    if kind == "latent":
        return changed(model, mla=changed(LATENT.mla, q_lora_rank=draw(st.sampled_from([None, 3]))))
    return changed(model, qk_norm=True)


@st.composite
def weight_layouts(draw, model):
    tp, ep, etp = draw(st.sampled_from([1, 2, 4])), 1, 1
    if isinstance(model, Decoder) and model.experts:
        ep, etp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    fsdp = draw(st.sampled_from([1, ep * etp, 2 * ep * etp, 3 * ep * etp]))
    pp, stages_per_rank = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1)]))
    return WeightLayout(
        tp=tp,
        dp=lcm(ep * etp, fsdp) * draw(st.integers(1, 2)),
        pp=pp,
        ep=ep,
        etp=etp,
        fsdp=fsdp,
        stages_per_rank=stages_per_rank,
        layers=(1, 2, 1) if pp == 3 else (),
        first_rank=draw(st.integers(0, 3)),
        vocab_multiple=4 * draw(st.integers(1, 4)),
        tied=draw(st.sampled_from([None, False])),
        order=draw(st.sampled_from(orders_of(model))),
    )


@st.composite
def laid_out(draw):
    model = draw(models())
    layout = draw(weight_layouts(model))
    rows = 0 if isinstance(model, Model) else (model.heads + 2 * model.kv_heads) * model.head_dim
    assume(layout.order != "megatron" or rows % layout.tp == 0)
    return model, layout, holdings(model, layout)


@given(laid_out())
@settings(max_examples=60)
def test_pieces_fill_their_buffers_and_do_not_overlap(case):
    """All but rows of padding belong to one piece; and buffers are on the layout's ranks alone."""
    _, layout, held = case
    vocabulary = {"embed.weight", "head.weight"} & held.keys()
    may_be_padded = {p.buffer or n for n in vocabulary for p in held[n].layout + held[n].padded}
    for rank in range(layout.first_rank, layout.first_rank + layout.num_ranks):
        writes = {name: np.zeros(shape, int) for name, (shape, _) in buffers(held, rank).items()}
        assert writes or layout.fsdp > 2  # torch.chunk of 4 in 3 gives 2, 2 and none
        for name, tensor in held.items():
            for piece in tensor.layout:
                if piece.rank == rank:
                    buffer = writes[piece.buffer or name]
                    view = buffer.reshape((1,) * (len(tensor.shape) - buffer.ndim) + buffer.shape)
                    inside = zip(piece.local(piece.box).high, view.shape, strict=True)
                    assert all(high <= size for high, size in inside)
                    view[window(piece.local(piece.box))] += 1
        for name, counts in writes.items():
            assert counts.max(initial=0) <= 1
            assert counts.min(initial=1) == 1 or name in may_be_padded
    ranks = {piece.rank for tensor in held.values() for piece in tensor.layout}
    assert min(ranks) >= layout.first_rank
    assert max(ranks) < layout.first_rank + layout.num_ranks


@given(laid_out())
@settings(max_examples=60)
def test_the_ranks_together_hold_every_tensor(case):
    model, _, held = case
    total = 0
    for tensor in held.values():
        seen = np.zeros(tensor.shape, bool)
        for piece in tensor.layout:
            seen[window(piece.box)] = True
        assert seen.all()
        total += seen.size
    assert total == sum(weight.num_elements for weight in weights(model))


@given(laid_out(), laid_out())
@settings(max_examples=20)
def test_every_order_has_the_same_logical_tensors(one, other):
    model, _, held = one
    assume(other[1].order in orders_of(model))
    again = holdings(model, WeightLayout(order=other[1].order))
    assert {name: tensor.shape for name, tensor in held.items()} == {
        name: tensor.shape for name, tensor in again.items()
    }


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        (MOE, {"tp": 3}, "WeightLayout.tp = 3: must divide the model's heads = 4"),
        (changed(LLAMA, ffn=12), {"tp": 8}, "WeightLayout.tp = 8: must divide the model's ffn"),
        (changed(LLAMA, kv_heads=2, heads=24, ffn=24), {"tp": 3},
         "WeightLayout.tp = 3: must divide the model's kv_heads = 2 or be a multiple"),
        (MOE, {"dp": 8, "ep": 8}, "WeightLayout.ep = 8: must divide the model's experts.num_exp"),
        (MOE, {"tp": 4, "dp": 2, "etp": 8}, "WeightLayout.etp = 8: must divide the model's"),
        (LLAMA, {"dp": 2, "ep": 2}, "WeightLayout.ep = 2: must be 1, since the model has no exp"),
        (LLAMA, {"pp": 3}, "WeightLayout.pp = 3: 3 stages do not divide the model's 32 layers"),
        (LLAMA, {"pp": 2, "layers": (8, 8)}, "must add up to the model's 32"),
        (LLAMA, {"tied": True}, "WeightLayout.tied = True: the model's embedding and head differ"),
        (MOE, {"tp": 4, "order": "engine"},
         "WeightLayout.vocab_multiple = 1: tp = 4 must divide the 10 rows; use 512"),
        (changed(MOE, heads=8, kv_heads=1, head_dim=1, vocab=8), {"tp": 4, "order": "megatron"},
         "WeightLayout.tp = 4: must divide the 10 rows of q, k and v"),
        (changed(LLAMA, norms="both"), {"order": "engine"},
         "WeightLayout.order = 'engine': has no names for norms after attention; use plain"),
    ],
)  # fmt: skip
def test_what_a_model_cannot_be_cut_into_is_refused_by_name(model, fields, message):
    with pytest.raises(ValueError, match="WeightLayout") as error:
        holdings(model, WeightLayout(**fields))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_model_that_is_only_listed_has_no_holdings():
    with pytest.raises(ValueError, match="gpt-oss-120b is not computed here: its attention has"):
        holdings(catalogue.find("gpt-oss-120b"), WeightLayout())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dp": 2, "ep": 3}, "WeightLayout.ep = 3: ep * etp = 3 must divide dp * tp = 2"),
        ({"tp": 2, "etp": 4}, "ep * etp = 4 must divide dp * tp = 2"),
        ({"dp": 4, "fsdp": 3}, "WeightLayout.fsdp = 3: must divide dp = 4"),
        ({"dp": 4, "ep": 4, "fsdp": 2}, "fsdp * tp must be a multiple of ep * etp = 4"),
        ({"stages_per_rank": 2}, "WeightLayout.stages_per_rank = 2: must be 1 without a pipeline"),
        ({"pp": 2, "layers": (1,)}, "WeightLayout.layers = (1,): must be one number for each of 2"),
    ],
)
def test_degrees_that_do_not_fit_each_other_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match="WeightLayout") as error:
        WeightLayout(**fields)
    assert message in str(error.value)


def test_a_plan_with_even_stages_is_a_plain_layout_in_fp32():
    """The plan computes in bf16; its parameters are fp32. zero 0 and 2 repeat and cut them."""
    for layout, same in [
        (Layout(dp=2, tp=2, zero=3, microbatch_size=4), WeightLayout(tp=2, dp=2, fsdp=2)),
        (Layout(dp=4, zero=2, replicas=2, microbatch_size=2), WeightLayout(dp=4, fsdp=2)),
        (Layout(dp=4, microbatch_size=2), WeightLayout(dp=4)),
        (Layout(dp=2, pp=2, zero=1, schedule="interleaved_1f1b", stages_per_rank=2,
                microbatch_size=2, num_microbatches=2),
         WeightLayout(dp=2, pp=2, fsdp=2, stages_per_rank=2)),
    ]:  # fmt: skip
        assert of_plan(known.plan(layout)) == holdings(known.MODEL, changed(same, dtype="fp32"))


def test_a_plan_whose_ends_meet_on_one_rank_has_two_copies_of_the_tied_weight_there():
    layout = Layout(pp=2, schedule="zbv", stages_per_rank=2, num_microbatches=8)
    held = of_plan(known.plan(layout))
    pieces = held["embed.weight"].layout
    assert [(p.rank, p.buffer) for p in pieces] == [(0, ""), (0, "head.projection.weight")]
    ranks = [held[f"layers.{i}.mlp.up.weight"].layout[0].rank for i in range(4)]
    assert ranks == [0, 1, 1, 0]


def test_a_plan_with_uneven_meshes_is_cut_by_each_of_them():
    layout = Layout(
        pp=2, meshes=((2, 1), (1, 2)), layers=(3, 1), zero=3, schedule="1f1b", microbatch_size=2,
        num_microbatches=4,
    )  # fmt: skip
    held = of_plan(known.plan(layout))
    rows = [(p.rank, p.box.low[0], p.box.high[0], p.buffer) for p in held["embed.weight"].layout]
    head = "head.projection.weight"
    assert rows == [(0, 0, 512, ""), (1, 512, 1024, ""), (2, 0, 512, head), (3, 512, 1024, head)]
    columns = [(p.rank, p.box.low, p.box.high) for p in held["layers.3.mlp.down.weight"].layout]
    assert columns == [(2, (0, 0), (1024, 2048)), (3, (0, 2048), (1024, 4096))]


def test_holdings_made_by_hand():
    """Two ranks with a fused buffer of a and b each, and a bias that both have."""
    held = {
        "a": HeldTensor((4, 3), "bf16", moved(sharded((4, 3), 0, [0, 1]), buffer="ab")),
        "b": HeldTensor(
            (2, 3), "bf16", moved(sharded((2, 3), 0, [0, 1]), buffer="ab", offset=(2, 0))
        ),
        "bias": HeldTensor((3,), "fp32", replicated((3,), [0, 1])),
    }
    assert buffers(held, 1) == {"ab": ((3, 3), "bf16"), "bias": ((3,), "fp32")}
    assert buffers(held, 2) == {}
    mixed = held | {"b": held["b"]._replace(dtype="fp32")}
    with pytest.raises(ValueError, match="buffer ab of rank 1 would hold bf16 of 2 dims and, of b"):
        buffers(mixed, 1)
