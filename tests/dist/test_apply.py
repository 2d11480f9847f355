"""Modules that are not ours, laid out: Hugging Face's and one with names of its own.

The oracle is the same module untouched, in one process, on the whole batch, with torch's AdamW.
"""

import copy
import dataclasses
import functools
import logging
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import meshwise
from meshwise.spec import Layout, Recipe
from tests.errors import largest
from tests.pace import paced

pytestmark = pytest.mark.dist
ROOT = Path(__file__).parents[2]
STEPS, ROWS, SEQ, VOCAB = 3, 8, 12, 101  # a vocabulary that 2 ranks cannot share evenly
CLIP = 0.5  # below the norm of the gradients
TIGHT = {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.1}  # gradients that are 0 stay without effect


class Mixer(nn.Module):
    """Attention and what follows it, under odd names, with sizes kept as attributes."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.width = heads, width
        self.calm = nn.LayerNorm(width)
        self.asks = nn.Linear(width, 3 * width)
        self.tell = nn.Linear(width, width)
        self.per_head = nn.Parameter(torch.linspace(0.5, 1.5, width // heads))
        self.scale = nn.Parameter(torch.ones(width))
        self.wide = nn.Linear(width, 48)
        self.slim = nn.Linear(48, width)

    def forward(self, x, *, bias):
        b, s, _ = x.shape
        q, k, v = (
            part.view(b, s, self.heads, -1).transpose(1, 2)
            for part in self.asks(self.calm(x)).split(self.width, -1)
        )
        y = F.scaled_dot_product_attention(q * self.per_head, k, v, is_causal=True)
        x = x + self.tell(y.transpose(1, 2).flatten(2)) * self.scale
        return x + self.slim(F.gelu(self.wide(x))) + bias


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, 32, padding_idx=3)
        self.register_buffer("bias", torch.linspace(-0.1, 0.1, 32))
        self.stack = nn.ModuleList(Mixer(32, 4) for _ in range(2))
        self.guess = nn.Linear(32, VOCAB)

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.stack:
            x = block(x, bias=self.bias)
        return self.guess(x)


OWN = {
    "words": "vocab",
    "stack.*.calm": "replicated",
    "stack.*.asks": "col/3",
    "stack.*.tell": "row",
    "stack.*.per_head": "summed",
    "stack.*.wide": "col",
    "stack.*.slim": "row",
    "guess": "vocab",
}
OWN_SIZES = ("stack.*.heads", "stack.*.width")


def build(kind, seed=0):
    torch.manual_seed(seed)
    if kind == "own":
        return Own()
    import transformers

    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 16,
        "head_dim": 8, "tie_word_embeddings": kind == "Llama", "use_cache": False,
    }  # fmt: skip
    if kind == "GPT2":
        config = transformers.GPT2Config(
            vocab_size=VOCAB, n_positions=16, n_embd=32, n_layer=2, n_head=4,
            embd_pdrop=0, attn_pdrop=0, resid_pdrop=0,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
    else:
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
        config = getattr(transformers, f"{kind}Config")(
            **sizes, **(experts if kind == "Mixtral" else {})
        )
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for name, parameter in model.named_parameters():  # no gradient is to be near 0
        if parameter.ndim == 1:
            nn.init.normal_(parameter, 1.0 if "norm" in name or "ln_" in name else 0.0, 0.1)
        else:
            nn.init.normal_(parameter, 0.0, 0.2)
    return model


def logits_of(model, tokens):
    out = model(tokens)
    return out if isinstance(out, torch.Tensor) else out.logits


def loss_of(model, batch):
    return F.cross_entropy(
        logits_of(model, batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten()
    )


def batches():
    return torch.from_numpy(np.random.default_rng(5).integers(VOCAB, size=(STEPS, ROWS, SEQ + 1)))


def whole(tensor):
    if not isinstance(tensor, DTensor):
        return tensor
    try:
        return tensor.full_tensor()
    except ValueError:  # torch 2.11 takes the parts of a fused [q|k|v] for an order of shards
        spec = dataclasses.replace(tensor._spec, use_strided_shard_as_shard_order=False)
        return DTensor(tensor.to_local().detach(), spec, requires_grad=False).full_tensor()


def norm_of_difference(found, due):
    return largest(
        ((whole(found[name]) - due[name]).norm() / (due[name].norm() + 1e-3)).item() for name in due
    )


def one_process(model):
    """First logits, losses, first gradients, last parameters, and the norms before clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), **TIGHT)
    logits, losses, gradients, norms = None, [], {}, []
    for batch in batches():
        if logits is None:
            logits = logits_of(model, batch[:, :-1]).detach()
        loss = loss_of(model, batch)
        loss.backward()
        gradients = gradients or {n: p.grad.clone() for n, p in model.named_parameters()}
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return logits, losses, gradients, dict(model.named_parameters()), norms


def differences(ranks, kind, layouts, **options):
    """Of each layout: how far logits, losses, gradients, parameters and norms are from the oracle.
    And what is not mapped."""
    start = build(kind)
    logits, losses, gradients, parameters, norms = one_process(copy.deepcopy(start))
    found = []
    for layout in layouts:
        layout = msgspec.convert(layout, Layout)
        model = copy.deepcopy(start)
        own = {"strategies": OWN, "divided": OWN_SIZES} if kind == "own" else {}
        applied = meshwise.apply(layout, model, **own, **options)
        optimizer = torch.optim.AdamW(model.parameters(), **TIGHT, fused=layout.ep > 1)
        mine = slice(
            applied.data_rank * (ROWS // layout.data_ranks),
            (applied.data_rank + 1) * (ROWS // layout.data_ranks),
        )
        apart = dict.fromkeys(("logits", "losses", "gradients", "parameters", "norms"), 0.0)
        for step, batch in enumerate(batches()):
            if step == 0:
                with torch.no_grad():
                    ours = logits_of(model, batch[mine, :-1])
                apart["logits"] = (ours - logits[mine]).abs().max().item()
            loss = 0.0
            parts = batch[mine].chunk(layout.num_microbatches)
            for number, part in enumerate(parts):
                applied.before_backward(last=number == len(parts) - 1)
                share = loss_of(model, part) / len(parts)
                share.backward()
                loss += share.detach()
            if step == 0:
                got = {name: p.grad for name, p in model.named_parameters()}
                apart["gradients"] = norm_of_difference(got, gradients)
            norm = applied.clip_gradients(CLIP).item()
            apart["norms"] = largest((apart["norms"], abs(norm - norms[step]) / norms[step]))
            optimizer.step()
            optimizer.zero_grad()
            total = sum(ranks.gather(loss.item())) / ranks.world_size
            apart["losses"] = largest((apart["losses"], abs(total - losses[step])))
        apart["parameters"] = norm_of_difference(dict(model.named_parameters()), parameters)
        found.append((layout.name, apart, applied.unmapped))
    return found


LIMITS = {
    "logits": 2e-5, "losses": 1e-5, "gradients": 1e-4, "parameters": 1e-4, "norms": 1e-5,
}  # fmt: skip


def check(found):
    for rank in found:
        for name, apart, _ in rank:
            assert all(apart[what] < limit for what, limit in LIMITS.items()), (name, apart)


def fields(**layout):
    return msgspec.to_builtins(Layout(microbatch_size=1, **layout))


TWO = [
    fields(dp=2),
    fields(dp=2, zero=2, num_microbatches=2),
    fields(dp=2, zero=3, recompute="full"),
    fields(tp=2),
    fields(tp=2, recompute="full", recompute_layers=1),
]
FOUR = [
    fields(dp=2, tp=2),
    fields(dp=2, tp=2, zero=3, num_microbatches=2, recompute="full"),
    fields(dp=4, zero=2, replicas=2),
]


@pytest.mark.parametrize(
    "kind", ["Llama", "GPT2", "Mixtral", pytest.param("Qwen3", marks=pytest.mark.whole)]
)
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.whole)])
def test_a_class_of_hugging_face_trains_as_in_one_process(gloo_ranks, world_size, kind):
    pytest.importorskip("transformers")
    layouts = {2: TWO, 4: FOUR}[world_size]
    if kind == "Mixtral":
        layouts = (
            layouts
            + {
                2: [fields(dp=2, ep=2)],
                4: [fields(dp=2, tp=2, ep=2, zero=3), fields(dp=4, ep=2, zero=2)],
            }[world_size]
        )
    found = gloo_ranks(world_size, differences, kind=kind, layouts=layouts)
    check(found)
    assert [unmapped for _, _, unmapped in found[0]] == [[]] * len(layouts)


@pytest.mark.parametrize(
    ("world_size", "layouts"), [(2, TWO), pytest.param(4, FOUR, marks=pytest.mark.whole)]
)
def test_a_module_of_ones_own_trains_as_in_one_process(gloo_ranks, world_size, layouts):
    check(gloo_ranks(world_size, differences, kind="own", layouts=layouts))


def stock(ranks, layout):
    """With torch's own clipping and optimizers, which take all parameters at once."""
    start = build("own")
    _, _, _, due, norms = one_process(copy.deepcopy(start))
    found = []
    for kind in ({"fused": True}, {"foreach": True}):
        model = copy.deepcopy(start)
        applied = meshwise.apply(
            msgspec.convert(layout, Layout), model, strategies=OWN, divided=OWN_SIZES
        )
        optimizer = torch.optim.AdamW(model.parameters(), **TIGHT, **kind)
        share = ROWS // applied.layout.data_ranks
        apart = []
        for step, batch in enumerate(batches()):
            loss_of(model, batch[applied.data_rank * share :][:share]).backward()
            norm = whole(nn.utils.clip_grad_norm_(model.parameters(), CLIP)).item()
            apart.append(abs(norm - norms[step]))
            optimizer.step()
            optimizer.zero_grad()
        found.append((largest(apart), norm_of_difference(dict(model.named_parameters()), due)))
    return found


def test_stock_optimizers_and_clipping_take_all_parameters(gloo_ranks):
    for norms, parameters in gloo_ranks(4, stock, layout=fields(dp=2, tp=2, zero=3))[0]:
        assert norms < 1e-4 and parameters < 1e-4


def compiled(ranks, kind, layout):
    """Losses by aot_eager, and how many graphs were compiled."""
    import torch._dynamo.testing

    backend = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    plain = nn.Module.compile
    nn.Module.compile = functools.partialmethod(plain, backend=backend)
    try:
        ranks.arrive("training")  # imports for compiling take as long as collectives wait
        found = differences(ranks, kind, [layout], lowering="compiled")
    finally:
        nn.Module.compile = plain
        torch.compiler.reset()
    return found, backend.frame_count


@pytest.mark.parametrize("kind", ["own", pytest.param("Llama", marks=pytest.mark.whole)])
def test_compiled_units_train_as_in_one_process(gloo_ranks, kind):
    if kind != "own":
        pytest.importorskip("transformers")
    found = gloo_ranks(2, compiled, kind=kind, layout=fields(tp=2))
    check([rank for rank, _ in found])
    assert all(graphs > 0 for _, graphs in found)


def in_bf16(ranks):
    """The largest difference of a logit from fp32, and the dtypes of weights and result."""
    start = build("own")
    tokens = batches()[0, :, :-1]
    due = start(tokens).detach()
    model = copy.deepcopy(start)
    applied = meshwise.apply(
        Layout(tp=2),
        model,
        strategies=OWN,
        divided=OWN_SIZES,
        dtype="bf16",
        recipe=Recipe(prefetch=2),
    )
    found = applied.model(tokens)
    found.float().sum().backward()
    weight = model.stack[0].asks.weight
    return (found - due).abs().max().item(), [str(x.dtype) for x in (found, weight, weight.grad)]


def test_bf16_computes_on_fp32_masters(gloo_ranks):
    apart, dtypes = gloo_ranks(2, in_bf16)[0]
    assert 0 < apart < 0.05
    assert dtypes == ["torch.bfloat16", "torch.float32", "torch.float32"]


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.grow = nn.Conv2d(3, 8, 3, padding=1)
        self.shrink = nn.Conv2d(8, 5, 3, stride=2)

    def forward(self, x):
        return self.shrink(torch.relu(self.grow(x)))


def channels(ranks):
    torch.manual_seed(0)
    start = Pictures()
    images = torch.randn(2, 3, 9, 9)
    due = start(images)
    due.square().sum().backward()
    model = copy.deepcopy(start)
    model.zero_grad()
    strategies = {"grow": "channel_col", "shrink": "channel_row"}
    applied = meshwise.apply(Layout(tp=2), model, strategies=strategies, units=())
    found = model(images)
    found.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    due_gradients = {name: p.grad for name, p in start.named_parameters()}
    apart = (found - due).abs().max().item(), norm_of_difference(gradients, due_gradients)
    return apart, list(model.grow.weight.to_local().shape), applied.unmapped


def test_convolutions_are_split_by_channels(gloo_ranks):
    (result, gradients), shape, unmapped = gloo_ranks(2, channels)[0]
    assert result < 1e-5 and gradients < 1e-5
    assert shape == [4, 3, 3, 3] and unmapped == []


def from_meta(ranks):
    """The largest difference between a module that had its weights and one that was given them."""
    start = build("own")
    values = dict(start.named_parameters()) | dict(start.named_buffers())
    with torch.device("meta"):
        model = Own()
    layout = Layout(tp=2)
    with pytest.raises(ValueError, match=r"words\.weight: is on the meta device; give init"):
        meshwise.apply(layout, model, strategies=OWN, divided=OWN_SIZES)
    meshwise.apply(
        layout, model, strategies=OWN, divided=OWN_SIZES, init=lambda name, _: values[name].detach()
    )
    tokens = batches()[0, :, :-1]
    return (model(tokens) - start(tokens)).abs().max().item()


def test_a_module_on_the_meta_device_is_filled(gloo_ranks):
    assert gloo_ranks(2, from_meta)[0] < 2e-5


def report(ranks, plan_file):
    strategies = {name: s for name, s in OWN.items() if name != "stack.*.calm"} | {"stak.*": "col"}
    model = build("own")
    sizes = (*OWN_SIZES, "stack.*.depth")
    applied = meshwise.apply(plan_file, model, strategies=strategies, divided=sizes)
    return applied.mapped, applied.unmapped, applied.units, str(applied)


def test_the_report_names_what_is_mapped_and_what_is_not(gloo_ranks, plan_of, tmp_path):
    from meshwise import store
    from meshwise.spec import Model, Workload

    sizes = Model(hidden=32, layers=2, heads=4, ffn=48, vocab=VOCAB, max_seq_len=16)
    workload = Workload(global_batch_size=ROWS, seq_len=SEQ)
    plan = plan_of(sizes, workload, Layout(tp=2, microbatch_size=ROWS))
    file = store.write(tmp_path / "plan.json", plan)
    mapped, unmapped, units, text = gloo_ranks(2, report, plan_file=str(file))[0]
    assert units == ["stack.0", "stack.1"]
    assert mapped["stack.1.asks.bias"] == "col/3" and mapped["words.weight"] == "vocab"
    whole = "no pattern names it; replicated over tp"
    idle = "names nothing of this model"
    assert [tuple(row) for row in unmapped] == [
        ("stack.0.scale", [32], whole),
        ("stack.0.calm.weight", [32], whole),
        ("stack.0.calm.bias", [32], whole),
        ("stack.1.scale", [32], whole),
        ("stack.1.calm.weight", [32], whole),
        ("stack.1.calm.bias", [32], whole),
        ("stak.*", [], idle),
        ("stack.*.depth", [], idle),
    ]
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "Own as tp2"
    assert any(line.startswith("2 units (stack.*), each gathered") for line in lines)
    assert "stack.*.asks.weight (2) 96 x 32 col/3" in lines
    assert f"stack.*.calm.bias (2) 32 {whole}" in lines
    assert f"stak.* {idle}" in lines


def of_no_map(ranks, layouts):
    """For each layout: what is not mapped, what is said, what is logged."""
    found = []
    for layout in layouts:
        records = []
        handler = logging.Handler()
        handler.emit = lambda record, to=records: to.append(record.getMessage())
        log = logging.getLogger("meshwise")
        log.addHandler(handler)
        applied = meshwise.apply(msgspec.convert(layout, Layout), build("own"))
        log.removeHandler(handler)
        said = " ".join(str(applied).split())
        found.append((len(applied.unmapped), said, " ".join(records)))
    return found


def test_a_class_without_a_map_is_said_to_be_cut_by_nothing_over_tp(gloo_ranks):
    layouts = [msgspec.to_builtins(Layout(**sizes)) for sizes in ({"tp": 2}, {"dp": 2, "zero": 3})]
    ((unmapped, said, logged), (none, of_data, silence)), _ = gloo_ranks(
        2, of_no_map, layouts=layouts
    )
    loud = "NOTHING IS CUT OVER TP: there is no map for Own; give strategies=."
    assert loud in said and loud in logged and unmapped > 0
    assert (none, silence) == (0, "")
    assert "not mapped" not in of_data and "over tp" not in of_data.lower()
    sharded = "sharded over 2 ranks: optimizer state, gradients, parameters."
    assert of_data.startswith(f"Own as dp2 zero3 Data parallel over 2 ranks; {sharded}")
    assert "2 units (stack.*)" in of_data


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = 3
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, x, *, bias):
        return x * self.weight + bias


def refused(ranks, cases):
    """The message of each refusal, which leaves the module as it was."""
    messages = []
    for layout, change, options in cases:
        model = CHANGES[change](ranks)
        before, applied = state(model), None
        if change == "meta":
            options = {"init": lambda name, old: torch.ones(old.shape if "words" in name else 3)}
        with pytest.raises(ValueError) as caught:
            applied = meshwise.apply(
                msgspec.convert(layout, Layout),
                model,
                **({"strategies": OWN, "divided": OWN_SIZES} | options),
            )
            loss_of(model, batches()[0]).backward()  # some are seen only there
        assert applied is not None or state(model) == before
        messages.append(str(caught.value))
    return messages


def state(model):
    """Every attribute and hook of every module, as objects; parameters and buffers also as text."""
    tensors = {name: str(tensor) for name, tensor in model.state_dict().items()}
    of_modules = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            same = value if isinstance(value, int) else id(value)
            of_modules[name, key] = [*map(id, value.values())] if isinstance(value, dict) else same
    return tensors, of_modules


def _seeded(seed):
    torch.manual_seed(seed)
    return Own()


def _changed(**children):
    def make(_):
        model = _seeded(0)
        for name, child in children.items():
            setattr(model, name, child())
        return model

    return make


def _tied(_):
    model = _seeded(0)
    model.guess.weight = model.words.weight
    return model


def _tied_units(_):
    model = _seeded(0)
    model.stack[1].wide.weight = model.stack[0].wide.weight
    return model


def _twice(_):
    model = _seeded(0)
    model.stack[1] = model.stack[0]
    return model


CHANGES = {
    "none": lambda _: _seeded(0),
    "seeds": lambda ranks: _seeded(ranks.rank),
    "meta": lambda _: _seeded(0).to("meta"),
    "tied": _tied,
    "tied units": _tied_units,
    "twice": _twice,
    "batch norm": _changed(tail=lambda: nn.BatchNorm1d(4)),
    "torch attention": _changed(tail=lambda: nn.MultiheadAttention(32, 4)),
    "groups": _changed(tail=lambda: nn.Conv1d(4, 4, 1, groups=2)),
    "heads": _changed(stack=lambda: nn.ModuleList([Odd()])),
    "scalar": _changed(scale=lambda: nn.Parameter(torch.tensor(1.5))),
}
REFUSED = {
    "a pipeline": (
        {"pp": 2, "schedule": "1f1b"}, "none", {},
        "Layout.pp: cannot be applied to a module of your own"),
    "context": ({"cp": 2}, "none", {}, "Layout.cp: cannot"),
    "split norms": ({"tp": 2, "sequence_parallel": True}, "none", {}, "Layout.sequence_parallel"),
    "other cuts": ({"tp": 2, "cuts": {"attention": "whole"}}, "none", {}, "Layout.cuts: cannot"),
    "cheap parts": ({"tp": 2, "recompute": "selective"}, "none", {}, "Layout.recompute: cannot"),
    "too few ranks": ({"tp": 4}, "none", {}, "needs 4 ranks, but 2 joined"),
    "no experts": (
        {"dp": 2, "ep": 2}, "none", {}, "Layout.ep = 2: no parameter is mapped as expert"),
    "other weights": ({"tp": 2}, "seeds", {}, "words.weight: its values differ between ranks"),
    "a wrong shape": ({"tp": 2}, "meta", {}, "init gave [3], not ["),
    "another map of one weight": (
        {"tp": 2}, "tied", {"strategies": OWN | {"guess.weight": "replicated"}},
        "guess.weight: is tied to words.weight, but one is replicated and the other vocab"),
    "one weight in two units": (
        {"dp": 2}, "tied units", {},
        "stack.1.wide.weight: is tied to stack.0.wide.weight in another"),
    "one module in two places": ({"dp": 2}, "twice", {}, "stack.1: is stack.0 once more"),
    "statistics": ({"dp": 2}, "batch norm", {}, "tail: BatchNorm1d would take the statistics"),
    "weights read elsewhere": (
        {"tp": 2}, "torch attention", {}, "tail: MultiheadAttention reads"),
    "groups": (
        {"tp": 2}, "groups", {"strategies": {"tail": "channel_col"}},
        "tail: channel_col is not known of a Conv1d"),
    "heads": ({"tp": 2}, "heads", {}, "stack.0.heads = 3: tp = 2 must divide it"),
    "features": (
        {"tp": 2}, "none", {"strategies": {"stack.*.tell": "col/3"}},
        "stack.0.tell (col): 3 * tp = 2 must divide dim 0 of [32, 32]"),
    "no experts there": (
        {"tp": 2}, "none", {"strategies": {"stack.*.wide": "expert"}},
        "stack.0.wide: expert needs stacked gate_up_proj and down_proj"),
    "half a module": (
        {"tp": 2}, "none", {"strategies": {"stack.*.wide.weight": "col"}},
        "stack.0.wide: its parameters have several strategies"),
    "a sum not said": (
        {"tp": 2}, "none", {"strategies": OWN | {"stack.*.per_head": "replicated"}},
        "per_head: its gradient differs between tp ranks; map it as summed"),
    "a scalar": ({"dp": 2}, "scalar", {}, "scale: is a scalar, which cannot be sharded; make it"),
    "a scalar over tp": ({"tp": 2}, "scalar", {}, "scale: is a scalar"),
    "units in units": (
        {"dp": 2}, "none", {"units": ("stack.*", "stack.*.calm")}, "lies within another unit"),
}  # fmt: skip


def test_what_cannot_be_done_is_refused_by_name(gloo_ranks):
    cases = [
        (msgspec.to_builtins(msgspec.convert(layout, Layout)), change, options)
        for layout, change, options, _ in REFUSED.values()
    ]
    found = gloo_ranks(2, refused, cases=cases)
    for name, message, other in zip(REFUSED, *found, strict=True):
        assert REFUSED[name][-1] in message, name
        assert message == other
        assert "\n" not in message


def heads(ranks):
    """A Llama with two key and value heads on four ranks."""
    with pytest.raises(ValueError) as caught:
        meshwise.apply(Layout(tp=4), build("Llama"))
    return str(caught.value)


def test_too_few_key_and_value_heads_are_refused_by_name(gloo_ranks):
    pytest.importorskip("transformers")
    expected = "Layout.tp = 4: must divide num_key_value_heads = 2 of the model"
    assert gloo_ranks(4, heads)[0] == expected


def outside(ranks):
    model = build("own")
    meshwise.apply(Layout(tp=2), model, strategies=OWN, divided=OWN_SIZES)
    table = model.words
    failed = []
    for token in (-1, VOCAB):
        try:
            table(torch.tensor([token]))
        except (IndexError, RuntimeError) as error:
            failed.append(type(error).__name__)
    return failed


def test_a_token_outside_the_vocabulary_fails_as_it_does_without_tp(gloo_ranks):
    failed = [name for rank in gloo_ranks(2, outside) for name in rank]
    assert len(failed) == 2


def test_without_a_job_the_fix_is_named(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="joined no job; start it by torchrun"):
        meshwise.apply(Layout(), Own())


def test_the_example_has_the_same_losses_on_two_and_four_ranks():
    losses = []
    for size in ("2", "4"):
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
             size, "examples/own_model.py"],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
            timeout=paced(180),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "calm.weight" in done.stdout.split("not mapped")[1]
        assert "view tensor" not in done.stderr
        lines = done.stdout.splitlines()
        losses.append([float(line.split("loss ")[1]) for line in lines if line.startswith("step")])
    assert len(losses[0]) == 20 and losses[0][0] - losses[0][-1] > 1
    assert losses[1] == pytest.approx(losses[0], abs=2e-4)
