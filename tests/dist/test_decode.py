"""Decoded tokens are those of greedy decoding by the plain module without a cache."""

import functools
from unittest import mock

import msgspec
import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace

from meshwise.engine import data, decode, greedy, step
from meshwise.engine.frame import RunRequest
from meshwise.nn import build, cache, initial
from meshwise.options.run import Course
from meshwise.parallel import mesh
from meshwise.spec import Decoder, Experts, Layout, Mla, Model, Workload

PROMPT, NEW, BATCH = 6, 16, 4
SEED = 3

SIZES = {"hidden": 32, "layers": 4, "heads": 4, "ffn": 48, "vocab": 101, "max_seq_len": 24}
GQA = SIZES | {"kv_heads": 2, "head_dim": 8}
GATED = Experts(num_experts=4, top_k=2, ffn=24, shared_ffn=16, shared_gate=True)
MODELS = {
    "gpt": Model(**SIZES),
    "gpt-experts": Model(**SIZES, experts=Experts(num_experts=4, top_k=2, ffn=24, every=2)),
    "llama": Decoder(**GQA),
    "tied": Decoder(**GQA | {"kv_heads": 1}, tied=True, qkv_bias=True, qk_norm=True),
    "windows": Decoder(
        **GQA,
        window=5,
        full_layers=(1,),
        local_rope_theta=50.0,
        norms="both",
        embed_scale=2.0,
        softmax_scale=0.5,
        logits_scale=0.5,
        residual_scale=0.7,
        activation="gelu",
    ),
    "experts": Decoder(**GQA, experts=GATED),
    "latent": Decoder(
        **GQA | {"kv_heads": 4, "head_dim": 12},
        mla=Mla(q_lora_rank=12, kv_lora_rank=8, nope_head_dim=8, rope_head_dim=4, v_head_dim=6),
    ),
}


def piped(pp, **changes):
    return Layout(pp=pp, schedule="1f1b", **changes)


LAYOUTS = {
    1: [Layout()],
    2: [Layout(tp=2), piped(2), piped(2, layers=(1, 3)), Layout(dp=2, ep=2)],
    4: [
        Layout(tp=4),
        piped(2, tp=2, sequence_parallel=True, microbatch_size=4),
        piped(4, num_microbatches=4),
        piped(3, meshes=((1, 1), (1, 2), (1, 1)), layers=(1, 2, 1)),
        piped(2, meshes=((2, 1), (1, 2)), microbatch_size=2),
        Layout(dp=2, tp=2, zero=3),
    ],
}
CASES = [
    pytest.param(name, size, id=f"{name}-{size}", marks=[pytest.mark.whole] * (size > 2))
    for size, names in ((1, MODELS), (2, MODELS), (4, ("gpt", "llama")))
    for name in names
]


def strong_weights():
    """With usual ones a tiny model's next token depends on the last token alone."""
    strong, draw = initial.WEIGHT._replace(std=0.25), initial.draw

    def drawn(start, *rest):
        return draw(strong if start == initial.WEIGHT else start, *rest)

    return mock.patch.object(initial, "draw", drawn)


@functools.cache
def expected(name, batch=BATCH):
    """All rows [batch, new tokens], each token from a forward pass over everything before it."""
    model = MODELS[name]
    workload = Workload(global_batch_size=batch, seq_len=PROMPT)
    found = data.batches(model, workload, steps=1, seed=SEED, file=None, rows=slice(None))
    tokens, module = torch.from_numpy(found.inputs[0]), build(model)
    torch.set_num_threads(1)
    with strong_weights():
        module.init_weights(SEED)
    with torch.no_grad():
        for _ in range(NEW):
            following = module(tokens)[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, following], -1)
    return tokens[:, PROMPT:]


def request_of(plan_of, name, layout, **changes):
    rows = changes.pop("batch", BATCH)
    size = rows * layout.microbatch_size // layout.microbatch_rows
    layout = msgspec.structs.replace(layout, microbatch_size=size, num_microbatches=1)
    plan = plan_of(MODELS[name], Workload(global_batch_size=rows, seq_len=PROMPT), layout)
    options = {"new_tokens": NEW, "seed": SEED} | changes
    return RunRequest(plan=plan, run_dir="", asked=Course(mode="decode", **options))


def decoded(ranks, requests):
    """Of each request this rank's rows in the batch and their tokens, decoded twice."""
    found = []
    for request in msgspec.json.decode(requests, type=list[RunRequest]):
        plan = decode.plan_for(request)
        place = mesh.build(plan.layout, "cpu")
        numbers = {"new_tokens": NEW, "seed": SEED}
        with strong_weights():
            ready = greedy.prepare(plan, place, ranks.device, **numbers, shortest=8)
        mine = decode.prompts_of(plan, ranks.rank, SEED)
        turns = [greedy.generate(ready, mine, lambda: None, lambda mark: None) for _ in range(2)]
        if turns[0].tokens is None:
            found.append([[], []])
            continue
        assert torch.equal(turns[0].tokens, turns[1].tokens)  # nothing is left of the first
        rows = step.rows(plan.layout, ranks.rank).tolist()
        found.append([rows, turns[0].tokens.flatten(0, 1).tolist()])
    return found


@pytest.mark.dist
@pytest.mark.parametrize(("name", "size"), CASES)
def test_tokens_are_those_of_the_plain_module(gloo_ranks, plan_of, name, size):
    model = MODELS[name]
    layouts = [layout for layout in LAYOUTS[size] if layout.ep == 1 or model.experts is not None]
    requests = [request_of(plan_of, name, layout) for layout in layouts]
    found = gloo_ranks(size, decoded, requests=msgspec.json.encode(requests).decode())
    reference = expected(name)
    for layout, of_ranks in zip(layouts, zip(*found, strict=True), strict=True):
        seen = set()
        for rows, tokens in of_ranks:
            if rows:
                assert tokens == reference[rows].tolist(), layout.name
                seen.update(rows)
        assert seen == set(range(BATCH)), layout.name
    assert len(reference.unique()) > 8  # not one token again and again


@pytest.mark.dist
def test_one_sequence_goes_through_a_pipeline(gloo_ranks, plan_of):
    request = request_of(plan_of, "llama", piped(2), batch=1)
    assert decode.plan_for(request).layout.num_microbatches == 1
    found = gloo_ranks(2, decoded, requests=msgspec.json.encode([request]).decode())
    ((rows, tokens),) = found[1]
    assert rows == [0]
    assert tokens == expected("llama", 1).tolist()


def sample(ranks, request):
    ordered = msgspec.json.decode(request, type=RunRequest)
    return msgspec.to_builtins(decode.measure(ranks, ordered))


@pytest.mark.dist
def test_a_run_is_one_sample(gloo_ranks, plan_of):
    request = request_of(plan_of, "gpt", piped(2))
    found = gloo_ranks(2, sample, request=msgspec.json.encode(request).decode())
    assert found[0]["status"] == "ok"
    assert found[0]["case"]["op"]["mode"] == "decode"
    assert found[0]["case"]["op"]["new_tokens"] == NEW
    times_s, metrics = found[0]["times_s"], found[0]["metrics"]
    assert times_s == found[1]["times_s"]
    assert len(times_s) == NEW - 1  # the first token has a time of its own
    assert metrics["time_to_first_token_s"] > 0
    median_s = sorted(times_s)[len(times_s) // 2]
    assert metrics["tokens_per_s"] == pytest.approx(BATCH / median_s)
    # 2 groups of 2 rows, 2 layers a stage, keys and values of 256 tokens
    assert metrics["cache_bytes"] == 4 * 2 * 256 * 32 * 2 * 4


def test_what_cannot_be_decoded_is_named(plan_of, monkeypatch):
    def refused(name, layout, **changes):
        with pytest.raises(ValueError) as caught:
            decode.plan_for(request_of(plan_of, name, layout, **changes))
        return str(caught.value)

    assert "max_seq_len = 24" in refused("gpt", Layout(), new_tokens=19)
    assert "Layout.cp = 2" in refused("gpt", Layout(cp=2))
    looped = Layout(pp=2, schedule="looped_bfs", stages_per_rank=2)
    assert "stages_per_rank = 2" in refused("gpt", looped)
    limited = replace(GATED, capacity_factor=1.0, group_size=4)
    monkeypatch.setitem(MODELS, "limited", replace(MODELS["gpt"], experts=limited))
    assert "Experts.group_size = 4: decoding has one token" in refused("limited", Layout())
    with pytest.raises(ValueError, match="new_tokens = 1"):
        request_of(plan_of, "gpt", Layout(), new_tokens=1)


@pytest.mark.parametrize("fresh", [True, False])
def test_cached_attention_is_attention_by_its_definition(fresh):
    """In float64, written out for each query head and position."""
    torch.manual_seed(0)
    rows, tokens, heads, kv_heads, dim = 2, 7, 4, 2, 4
    q = torch.randn(rows, tokens, heads, dim, dtype=torch.float64)
    k, v = torch.randn(2, rows, tokens, kv_heads, dim, dtype=torch.float64)
    now = cache.Now(torch.arange(tokens), 8, fresh=fresh)
    room = torch.full((1, rows, 16, kv_heads, dim), torch.nan, dtype=torch.float64)
    room[:, :, :8] = 0
    kept = cache.Cache(now, room, room.clone())
    cuts = [range(tokens)] if fresh else [range(3), range(3, 6), range(6, 7)]
    out = []
    for cut in cuts:
        now.at = torch.tensor(cut)
        out.append(kept(*(x[:, cut.start : cut.stop] for x in (q, k, v))))
    found = torch.cat(out, 1)
    for row in range(rows):
        for head in range(heads):
            mine = head // (heads // kv_heads)
            for at in range(tokens):
                scores = k[row, : at + 1, mine] @ q[row, at, head] / dim**0.5
                wanted = F.softmax(scores, 0) @ v[row, : at + 1, mine]
                torch.testing.assert_close(found[row, at, head], wanted)
