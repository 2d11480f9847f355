"""The correctness matrix: every model family under every parallelism and legal combinations.

A case is a family and a layout. It is right when the gradients of the first step and the losses of
three steps equal those of one process, the plain module of ``nn`` and torch's own AdamW: in
float32, of Wide-ResNets in float64 (``check.in_float64``).
``test_matrix.py`` runs a part of it; all of it, with a table of errors:

    python -m tests.dist.matrix OUT.md [WORLD...] [FAMILY...] [compiled]

``compiled``: layers by the compiler up to, but without, its code; less the schedules that split
backwards, which it cannot.
"""

import functools
import itertools
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch
from torch import nn

from meshwise import schedule
from meshwise.engine import data, step
from meshwise.engine.check import in_float64
from meshwise.models import fits
from meshwise.nn import build
from meshwise.nn.stage import cross_entropy
from meshwise.parallel import apply, mesh, pipeline
from meshwise.spec import (
    Decoder,
    Experts,
    Layout,
    Mla,
    Model,
    Plan,
    Recipe,
    WideResNet,
    Workload,
    stages_of,
)
from tests.errors import largest, loss_error

SIZES = {"hidden": 32, "layers": 4, "heads": 4, "vocab": 101, "max_seq_len": 32}
SHARED = Experts(num_experts=8, top_k=2, ffn=32, shared_ffn=32, first_dense=1)
LATENT = Mla(q_lora_rank=12, kv_lora_rank=16, nope_head_dim=8, rope_head_dim=4, v_head_dim=8)
FAMILIES = {
    # an uneven vocabulary; a tied head
    "gpt": Model(ffn=64, **SIZES),
    # fewer key heads than ranks of some layouts
    "llama": Decoder(kv_heads=2, head_dim=8, ffn=64, **SIZES),
    "qwen": Decoder(
        kv_heads=1, head_dim=8, ffn=64, tied=True, qk_norm=True, qkv_bias=True, **SIZES
    ),
    # 16 experts for few tokens, so that some have none
    "gshard": Model(ffn=64, experts=Experts(num_experts=16, top_k=2, ffn=64, every=2), **SIZES),
    "deepseek": Decoder(kv_heads=4, head_dim=12, ffn=64, experts=SHARED, mla=LATENT, **SIZES),
    "wide-resnet": WideResNet(
        blocks=(1, 1, 1, 1), channels=8, width_factor=2, image_size=32, num_classes=10
    ),
}
RECIPE = Recipe(max_grad_norm=0.5)
STEPS = 3
LOSS, GRADIENT = 1e-5, 1e-4  # relative
PART = 40  # cases of one set of processes
WRONG = " **wrong**"

SCHEDULES = {
    "1f1b": 1, "interleaved_1f1b": 2, "gpipe": 1, "zbv": 2, "looped_bfs": 2,
    "interleaved_zero_bubble": 2, "dualpipev": 2,
}  # fmt: skip
SPLIT = ("zbv", "interleaved_zero_bubble", "dualpipev")


def workload(world, model):
    batch = 12 if world == 3 else 8
    return Workload(global_batch_size=batch, seq_len=1 if isinstance(model, WideResNet) else 24)


def layouts(name, world):
    """Every product of degrees that fills ``world`` ranks, with every sharding of each; schedules,
    recomputation and the number of microbatches take turns."""
    model, turn = FAMILIES[name], itertools.count(len(name))
    found = []
    for dp, cp, tp, pp in itertools.product((1, 2, 3, 4, 8), repeat=4):
        if dp * cp * tp * pp != world:
            continue
        for zero, replicas, sp, ep in itertools.product(
            range(4), (1, 2), (False, True), (1, 2, 4, 8)
        ):
            layout = _layout(world, next(turn), dp, cp, tp, pp, zero, replicas, sp, ep)
            if layout is not None and _fits(model, workload(world, model), layout):
                found.append(layout)
    return [*found, *(one for one in _uneven(world) if _fits(model, workload(world, model), one))]


def _layout(world, turn, dp, cp, tp, pp, zero, replicas, sp, ep):
    order = "none" if pp == 1 else list(SCHEDULES)[turn % len(SCHEDULES)]
    if pp > 2 and SCHEDULES.get(order, 1) > 1:
        order = "1f1b" if turn % 2 else "gpipe"
    rows = (12 if world == 3 else 8) // dp
    count = rows if pp > 1 else (1, 2)[turn // 2 % 2]
    if rows % count:
        count = 1
    word = ("none", "selective", "full", "full")[turn % 4]
    try:
        return Layout(
            dp=dp, cp=cp, tp=tp, pp=pp, ep=ep, zero=zero, replicas=replicas, sequence_parallel=sp,
            schedule=order, stages_per_rank=SCHEDULES.get(order, 1), num_microbatches=count,
            microbatch_size=rows // count, recompute=word,
            recompute_layers=1 if turn % 4 == 3 else None,
        )  # fmt: skip
    except ValueError:  # not a layout, for example shards of one rank
        return None


def _uneven(world):
    """Pipelines whose stages have different layers and meshes."""
    meshes = {
        3: [((1, 1), (1, 2)), ((2, 1), (1, 1))],
        4: [((1, 1), (1, 1), (1, 2)), ((1, 1), (1, 1), (2, 1)), ((1, 1), (3, 1))],
        8: [((1, 2), (1, 2), (1, 4)), ((2, 1), (2, 1), (4, 1)), ((2, 2), (4, 1)), ((1, 2), (2, 3))],
    }
    for each in meshes.get(world, []):
        layers = (1, 3) if len(each) == 2 else (1, 2, 1)
        for zero, sp in ((0, True), (2, False), (3, True)):
            wide = max(dp for dp, _ in each) > 1
            if (zero and not wide) or (sp and max(tp for _, tp in each) == 1):
                continue
            rows = 12 if any(dp == 3 for dp, _ in each) or world == 3 else 8
            if rows != (12 if world == 3 else 8):
                continue
            yield Layout(
                pp=len(each), meshes=each, layers=layers, schedule="1f1b", zero=zero,
                sequence_parallel=sp, num_microbatches=2, microbatch_size=rows // 2,
            )  # fmt: skip


def _fits(model, work, layout):
    piped = (layout.schedule, layout.pp, layout.stages_per_rank, layout.num_microbatches)
    if schedule.check(*piped):
        return False
    try:
        layout.stage_layers(model.layers)
        for rank in range(layout.pp):
            fits.check(model, work, layout.of_rank(rank))
    except ValueError:
        return False
    experts = getattr(model, "experts", None)
    return layout.ep == 1 or experts is not None


def features(layout):
    """What a layout combines, in words."""
    found = {f"{axis}{getattr(layout, axis)}" for axis in ("dp", "cp", "tp", "pp", "ep")}
    found = {word for word in found if not word.endswith("1")}
    found = {word[:2] for word in found}
    found |= {f"zero{layout.zero}"} if layout.zero else set()
    found |= {"hsdp"} if layout.replicas > 1 else set()
    found |= {"sp"} if layout.sequence_parallel else set()
    found |= {layout.schedule} if layout.pp > 1 else set()
    found |= {"accumulation"} if layout.num_microbatches > 1 else set()
    found |= {"unequal meshes"} if layout.meshes else set()
    return found | ({layout.recompute} if layout.recompute != "none" else set())


@functools.cache
def one_device(name, world, count):
    """Losses, and gradients of the first step, of the whole batch in ``count`` microbatches."""
    model = FAMILIES[name]
    work = workload(world, model)
    module = build(model)
    module.init_weights(0)
    is_double = isinstance(model, WideResNet)
    if is_double:
        module.double()
    step.balance(module, RECIPE.aux_loss / count)
    adamw = torch.optim.AdamW(module.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    losses, gradients = [], {}
    for inputs, targets in zip(*map(torch.from_numpy, _batches(model, work)), strict=True):
        total = 0.0
        inputs = inputs.double() if is_double else inputs
        for x, y in zip(inputs.chunk(count), targets.chunk(count), strict=True):
            loss = cross_entropy(module(x), y) / count
            loss.backward()
            total += loss.item()
        gradients = gradients or {n: p.grad.clone() for n, p in module.named_parameters()}
        torch.nn.utils.clip_grad_norm_(module.parameters(), RECIPE.max_grad_norm)
        adamw.step()
        adamw.zero_grad()
        losses.append(total)
    return losses, gradients


def _batches(model, work, rows=slice(None)):
    return data.batches(model, work, steps=STEPS, seed=5, file=None, rows=rows)


def errors(ranks, name, plan, layouts):
    """[error of losses, error of gradients, where] of each layout, as this rank sees them."""
    plan, model = msgspec.json.decode(plan, type=Plan), FAMILIES[name]
    found = []
    if plan.lowering == "compiled":
        nn.Module.compile = by_aot
    for layout in msgspec.json.decode(layouts, type=list[Layout]):
        torch._dynamo.reset()
        work = workload(ranks.world_size, model)
        stages = stages_of(layout, model.layers, {})
        plan = msgspec.structs.replace(
            plan, model=model, workload=work, layout=layout, stages=stages, recipe=RECIPE
        )
        place = mesh.build(layout, "cpu")
        mine = _batches(model, work, step.rows(layout, ranks.rank))
        training = step.prepare(plan, place, mine, ranks.device, dtype="fp32", seed=0)
        if isinstance(model, WideResNet):
            training = in_float64(training)
        losses, gradients = one_device(name, ranks.world_size, layout.num_microbatches)
        worst = _gradient_error(training, gradients)
        reported = [float(step.run(training, index)) for index in range(STEPS)]
        reports = [r for r in ranks.gather(reported if training.reports else []) if r]
        means = [sum(of_step) / len(of_step) for of_step in zip(*reports, strict=True)]
        loss = loss_error(means, losses)
        found.append([loss, *worst])
    return found


def by_aot(module, *, options=None, **rest):
    module._compiled_call_impl = torch.compile(module._call_impl, backend="aot_eager", **rest)


def _gradient_error(training, expected):
    """The largest of |found - expected| / |expected| and its parameter. A gradient that is nothing
    but rounding (of a key's bias) counts against a ten thousandth of them all."""
    built = training.pipeline
    inputs, targets = (
        batch[0].split(built.layout.microbatch_size)
        for batch in (training.inputs, training.targets)
    )
    with apply.loss_context(built.layout):
        pipeline.run(built, inputs, targets, training.loss)
    everything = torch.stack([g.norm() for g in expected.values()]).norm()
    errors = {}
    for stage in built.stages.values():
        for name, parameter in stage.module.named_parameters():
            gradient = parameter.grad
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            exact = expected[name if name in expected else stage.module.origin(name)]
            error = (whole - exact).norm() / (exact.norm() + 1e-4 * everything)
            errors[name] = error.item()
    training.optimizer.zero_grad()
    return largest(errors.values()), max(errors, key=errors.get)


def table(world, name, lowering, cases):
    """Run cases of a family on so many ranks: a line each, and whether it is wrong."""
    from tests.dist.conftest import _GlooRanks, _plan

    started, lines = _GlooRanks(), []
    model = FAMILIES[name]
    plan = _plan(model, workload(world, model), cases[0], lowering=lowering)
    plan = msgspec.json.encode(plan).decode()
    for case in cases:
        text = msgspec.json.encode([case]).decode()
        reports = started(world, errors, name=name, plan=plan, layouts=text)
        loss = largest(report[0][0] for report in reports)
        gradient = largest(report[0][1] for report in reports)
        where = max(reports, key=lambda report: report[0][1])[0][2]
        mark = "" if loss <= LOSS and gradient <= GRADIENT else WRONG
        of_case = f"| {world} | {name} | {case.name} | {loss:.1e} | {gradient:.1e} {where} |{mark}"
        lines.append(of_case)
        print(of_case, flush=True)
    for n in list(started.jobs):
        started.end(n)
    return lines


def of_world(world, families, lowering):
    """The lines of the families, as many parts at a time as there are cores for."""
    out = SPLIT if lowering == "compiled" else ()
    parts = [
        (world, name, lowering, cases[start : start + PART])
        for name in families
        for cases in [[case for case in layouts(name, world) if case.schedule not in out]]
        for start in range(0, len(cases), PART)
    ]
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // world)) as pool:
        return [line for of_part in pool.map(table, *zip(*parts, strict=True)) for line in of_part]


def main():
    """Run everything, or the worlds and families named, and write the table."""
    out, words = Path(sys.argv[1]), sys.argv[2:]
    worlds = [int(word) for word in words if word.isdigit()] or [8, 4, 3, 2, 1]
    named = [word for word in words if not word.isdigit() and word != "compiled"]
    families = named or list(FAMILIES)
    lowering = "compiled" if "compiled" in words else "eager"
    lines = [line for world in worlds for line in of_world(world, families, lowering)]
    wrong = sum(line.endswith(WRONG) for line in lines)
    head = "| ranks | family | layout | losses | gradients |\n|---|---|---|---|---|"
    out.write_text(f"{len(lines)} cases, {wrong} wrong.\n\n{head}\n" + "\n".join(lines) + "\n")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
