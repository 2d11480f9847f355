"""The correctness matrix: every model family under every parallelism and legal combinations.

A case is a family, a layout and an optimizer. The engine loads the weights that ``oracle.py`` made
from a checkpoint and trains five steps in float64, which it does where torch's default dtype is
that; losses, weights, optimizer states and running statistics must equal those of the oracle, which
shares no code with the package. ``test_matrix.py`` runs a part of it, ``make test-all`` the whole;
with a table of errors:

    python -m tests.dist.matrix OUT.md [WORLD...] [FAMILY...] [compiled]

``compiled``: layers by the compiler up to, but without, its code; less the schedules that split
backwards, which it cannot.
"""

import contextlib
import itertools
import os
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from meshwise import schedule
from meshwise.engine import checkpoint, data, step
from meshwise.models import placement
from meshwise.parallel import mesh
from meshwise.reshard.regions import whole
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
from tests.dist import oracle
from tests.errors import largest, loss_error

SIZES = {"hidden": 32, "layers": 4, "heads": 4, "vocab": 101, "max_seq_len": 32}
SHARED = Experts(
    num_experts=8, top_k=2, ffn=32, shared_ffn=32, first_dense=1, router_bias=True, groups=4,
    top_groups=2, routed_scale=2.5,
)  # fmt: skip
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
    "mixtral": Decoder(
        kv_heads=2, head_dim=8, ffn=64, experts=Experts(num_experts=8, top_k=2, ffn=32), **SIZES
    ),
    "deepseek": Decoder(kv_heads=4, head_dim=12, ffn=64, experts=SHARED, mla=LATENT, **SIZES),
    "wide-resnet": WideResNet(
        blocks=(1, 1, 1, 1), channels=8, width_factor=2, image_size=64, num_classes=10
    ),
}
FAMILIES = {name: msgspec.structs.replace(model, name=name) for name, model in FAMILIES.items()}
RECIPES = {
    "adamw": Recipe(learning_rate=3e-3, max_grad_norm=0.5),
    "adafactor": Recipe(optimizer="adafactor", learning_rate=3e-2, max_grad_norm=0.5),
    "sgd": Recipe(optimizer="sgd", learning_rate=3e-2, max_grad_norm=0.5),
}
STEPS, SEED = 5, 7
LOSS, VALUE = 1e-10, 1e-8  # relative
PART = 40  # cases of one set of processes
WRONG = " **wrong**"

SCHEDULES = {
    "1f1b": 1, "interleaved_1f1b": 2, "gpipe": 1, "zbv": 2, "looped_bfs": 2,
    "interleaved_zero_bubble": 2, "dualpipev": 2,
}  # fmt: skip
SPLIT = ("zbv", "interleaved_zero_bubble", "dualpipev")

# What the oracle calls the modules of ``nn``, by family; of a layer i behind h<i>, l<i> or b<i>.
DECODER = {
    "embed": "tok", "norm1": "attention_norm", "qkv.q": "wq", "qkv.k": "wk", "qkv.v": "wv",
    "attention.q_norm": "q_norm", "attention.k_norm": "k_norm", "qkv.q_down": "w_dq",
    "qkv.q_norm": "q_norm", "qkv.q_up": "w_uq", "qkv.kv_down": "w_dkv", "qkv.kv_norm": "kv_norm",
    "qkv.kv_up": "w_ukv", "out": "wo", "norm2": "ffn_norm", "post1": "attention_post",
    "post2": "ffn_post", "gate_up.gate": "w1", "gate_up.up": "w3",
    "down": "w2", "moe.router": "router", "moe.experts": "e",
    "moe.shared.gate": "s1", "moe.shared.up": "s3", "moe.shared.down": "s2",
    "moe.shared.score": "score", "head.norm": "norm", "head.projection": "output",
}  # fmt: skip
GPT = {
    "embed": "wte", "positions": "wpe", "norm1": "ln1", "attention.qkv": "attn",
    "attention.out": "proj", "norm2": "ln2", "mlp.up": "fc", "mlp.down": "out",
    "moe.router": "router", "moe.experts": "e", "head.norm": "lnf",
}  # fmt: skip
RESNET = {
    "stem": "stem", "stem_norm": "stem.n", "conv1": "0", "norm1": "0.n", "conv2": "1",
    "norm2": "1.n", "conv3": "2", "norm3": "2.n", "shortcut": "3", "shortcut_norm": "3.n",
    "head": "fc",
}  # fmt: skip
MODULES = {Model: ("h", GPT), Decoder: ("l", DECODER), WideResNet: ("b", RESNET)}
OWN = {
    "weight": ".w", "bias": ".b", "first": "1.w", "first_bias": "1.b", "down": "2.w",
    "down_bias": "2.b", "running_mean": ".mean", "running_var": ".var",
}  # fmt: skip
STATES = {
    "exp_avg": "m", "exp_avg_sq": "v", "momentum_buffer": "momentum", "row_var": "row",
    "col_var": "col", "variance": "variance",
}  # fmt: skip


def oracles_name(model, name):
    """What the oracle calls a parameter or statistic of ``nn``."""
    letter, modules = MODULES[type(model)]
    layer, module, own = re.fullmatch(r"(?:layers\.(\d+)\.)?(.+)\.(\w+)", name).groups()
    at = "" if layer is None else f"{letter}{layer}."
    return f"{at}{modules[module]}{OWN[own]}"


class Case(NamedTuple):
    """On ``world`` ranks."""

    world: int
    name: str
    layout: Layout
    optimizer: str

    def plan(self, lowering="eager"):
        return plan_of(FAMILIES[self.name], self.layout, self.optimizer, lowering)


def plan_of(model, layout, optimizer, lowering="eager"):
    from tests.dist.conftest import _plan

    plan = _plan(model, workload(layout.num_devices, model), layout, lowering=lowering)
    stages = stages_of(layout, model)
    return msgspec.structs.replace(plan, recipe=RECIPES[optimizer], stages=stages)


def workload(world, model):
    batch = 12 if world == 3 else 8
    return Workload(global_batch_size=batch, seq_len=1 if isinstance(model, WideResNet) else 24)


def cases(worlds, names=tuple(FAMILIES)):
    """Every layout of the families; optimizers take turns, the same for a case of any selection."""
    found, kinds = [], list(RECIPES)
    for world, name in itertools.product(worlds, names):
        for turn, layout in enumerate(layouts(name, world), list(FAMILIES).index(name) + world):
            found.append(Case(world, name, layout, kinds[turn % len(kinds)]))
    return found


def pairs(case):
    """What a case combines, two and two."""
    words = {*features(case.layout), case.name, case.optimizer}
    return set(itertools.combinations(sorted(words), 2))


def pairwise(found):
    """Few of these cases that combine whatever two axes, options, optimizers and kinds of model any
    of them combines, and have every family and schedule once: the one with most that is new for its
    ranks, and again."""
    combined = {}
    for case in found:
        layout, model = case.layout, FAMILIES[case.name]
        words = {*features(layout), case.optimizer, type(model).__name__} - SCHEDULES.keys()
        words |= {"experts"} if getattr(model, "experts", None) else set()
        combined[case] = {*itertools.combinations(sorted(words), 2), case.name, layout.schedule}
    lacking, chosen = set().union(*combined.values()), []
    while lacking:
        chosen.append(max(found, key=lambda case: len(combined[case] & lacking) / (1 + case.world)))
        lacking -= combined[chosen[-1]]
    return sorted(chosen, key=lambda case: (case.world, case.name))


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
    count = min(rows, 4) if pp > 1 else (1, 2)[turn // 2 % 2]
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
            placement.check(model, work, layout.of_rank(rank))
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


@contextlib.contextmanager
def float64():
    """Modules, positions and optimizer states that are made here are in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def batches(plan, rows=slice(None)):
    """As the engine makes them; images in float64."""
    found = data.batches(plan.model, plan.workload, steps=STEPS, seed=SEED, file=None, rows=rows)
    is_of_images = isinstance(plan.model, WideResNet)
    return found._replace(inputs=found.inputs.astype("f8")) if is_of_images else found


def expected(folder, plan, started, double=True):
    """The checkpoint, before step 0, with the oracle's weights, and the file with what the oracle
    makes of a plan. Each is made once in a folder, by a process with one thread: several spin."""
    recipe, work, count = plan.recipe, plan.workload, plan.layout.num_microbatches
    start = Path(folder, f"{plan.model.name}-{work.global_batch_size}-{recipe.optimizer}")
    file = Path(f"{start}-{count}.safetensors")
    if not start.exists():
        layout = Layout(microbatch_size=work.global_batch_size)
        stages = stages_of(layout, plan.model)
        alone = msgspec.structs.replace(plan, layout=layout, stages=stages, lowering="eager")
        text = msgspec.json.encode(alone).decode()
        started(1, save_start, plan=text, folder=str(start), double=double)
    if not file.exists():
        text = msgspec.json.encode(plan).decode()
        started(1, save_due, plan=text, file=str(file), eps1=2.0**-52 if double else 2.0**-23)
    return str(start), str(file)


def save_due(ranks, plan, file, eps1):
    """Losses, weights before and after, states and statistics."""
    plan = msgspec.json.decode(plan, type=Plan)
    sizes, recipe = msgspec.to_builtins(plan.model), plan.recipe
    first, biases = oracle.start(sizes, SEED), oracle.router_biases(sizes, SEED)
    words = (recipe.optimizer, recipe.learning_rate, recipe.weight_decay, recipe.max_grad_norm)
    theirs = oracle.Recipe(*words, recipe.aux_loss, eps1)
    steps = zip(*map(torch.from_numpy, batches(plan)), strict=True)
    trained = oracle.train(sizes, first, biases, steps, theirs, plan.layout.num_microbatches)
    kinds = {"start": first, "weight": trained.weights, "statistic": trained.statistics}
    found = {f"{kind} {name}": x for kind, of in kinds.items() for name, x in of.items()}
    for name, states in trained.states.items():
        found |= {f"{key} of {name}": x for key, x in states.items()}
    found["losses"] = torch.tensor(trained.losses, dtype=torch.float64)
    save_file({name: x.contiguous() for name, x in found.items()}, file)


def save_start(ranks, plan, folder, double):
    plan = msgspec.json.decode(plan, type=Plan)
    sizes = msgspec.to_builtins(plan.model)
    theirs = oracle.start(sizes, SEED) | oracle.router_biases(sizes, SEED)
    with float64() if double else contextlib.nullcontext():
        training = prepared(ranks, plan)
        module = training.pipeline.stages[0].module
        names = {name for name, _ in module.named_parameters()}
        names |= {name for name, _ in module.named_buffers() if name.endswith("router.bias")}
        with torch.no_grad():
            for name, tensor in module.state_dict(keep_vars=True).items():
                if name in names:
                    tensor.copy_(theirs.pop(oracles_name(plan.model, name)))
        assert not theirs, f"nn has no {', '.join(theirs)}"
        with checkpoint.saving(ranks, folder) as save:
            save(training, plan, step=0, seed=SEED)


def prepared(ranks, plan):
    """The training as the engine prepares it, in float64."""
    place, mine = mesh.build(plan.layout, "cpu"), batches(plan, step.rows(plan.layout, ranks.rank))
    training = step.prepare(plan, place, mine, ranks.device, dtype="fp32", seed=SEED)
    return replace(training, pipeline=replace(training.pipeline, dtype=torch.float64))


def errors(ranks, plan, start, file):
    """[error of losses, error of values, whose], as this rank sees them."""
    plan = msgspec.json.decode(plan, type=Plan)
    torch._dynamo.reset()
    if plan.lowering == "compiled":
        nn.Module.compile = by_aot
    with float64():
        training, due = prepared(ranks, plan), load_file(file)
        checkpoint.load(ranks, training, start, plan, seed=SEED)
        losses = [float(step.run(training, index)) for index in range(STEPS)]
        reports = [r for r in ranks.gather(losses if training.reports else []) if r]
        means = [sum(of_step) / len(of_step) for of_step in zip(*reports, strict=True)]
        worst = value_errors(training, plan.model, due)
    where = max(worst, key=worst.get)
    return [loss_error(means, due["losses"].tolist()), largest(worst.values()), where]


def by_aot(module, *, options=None, **rest):
    module._compiled_call_impl = torch.compile(module._call_impl, backend="aot_eager", **rest)


def value_errors(training, model, due):
    """|found - due| of this rank's weights, relative to how far they moved, and relative to itself
    of what the optimizer and norms over batches keep."""
    errors = {}
    for stage in training.pipeline.stages.values():
        module = stage.module
        for name, parameter in module.named_parameters():
            theirs = oracles_name(model, module.origin(name))
            last = due[f"weight {theirs}"]
            moved = last - due[f"start {theirs}"]
            errors[name] = apart(model, name, parameter, last, moved)
            state = {k: x for k, x in training.optimizer.state[parameter].items() if x is not None}
            assert state.pop("step", torch.tensor(STEPS)).item() == STEPS
            assert state and len(state) == sum(k.endswith(f" of {theirs}") for k in due)
            for key, value in state.items():
                exact = due[f"{STATES[key]} of {theirs}"]
                errors[f"{key} of {name}"] = apart(model, name, value, exact, exact)
        for name, buffer in module.named_buffers():
            if name.rpartition(".")[2] not in ("cos", "sin"):
                exact = due[f"statistic {oracles_name(model, name)}"]
                errors[name] = apart(model, name, buffer, exact, exact)
    return errors


def apart(model, name, found, exact, size):
    """|found - exact| / |size| of the part that this rank has; nobody gathers: to ask torch how
    would take a minute where experts lie on four axes."""
    part = checkpoint._slices(checkpoint._box(found), whole(found.shape))
    seen = torch.ones_like(exact)
    if name.endswith("attention.qkv.bias"):
        # A softmax does not see what all its keys share: their bias' gradient is rounding alone.
        seen.view(model.heads, 3, -1)[:, 1] = 0
    difference = (checkpoint._local(found) - exact[part]) * seen[part]
    return (difference.norm() / ((size * seen).norm() + 1e-12)).item()


def run(started, plan, folder):
    """[loss error, value error, whose], the worst of a plan's ranks."""
    start, file = expected(folder, plan, started)
    text = msgspec.json.encode(plan).decode()
    replies = started(plan.layout.num_devices, errors, plan=text, start=start, file=file)
    losses, values, names = zip(*replies, strict=True)
    value = largest(values)
    return largest(losses), value, names[values.index(value)] if value in values else names[0]


def is_right(plan, loss, value):
    """Where a gradient is nothing but rounding, Adafactor makes a step of it, and of that the size
    of the others: GPT's bias of q, k and v."""
    blind = isinstance(plan.model, Model) and plan.recipe.optimizer == "adafactor"
    return loss <= (1e-7 if blind else LOSS) and value <= (1e-4 if blind else VALUE)


def table(world, name, lowering, cases):
    """Run cases of a family on so many ranks: a line each, and whether it is wrong."""
    from tests.dist.conftest import _GlooRanks, forking

    lines = []
    with tempfile.TemporaryDirectory() as folder, forking() as forks:
        started = _GlooRanks(forks)
        for case in cases:
            plan = case.plan(lowering)
            loss, value, where = run(started, plan, folder)
            mark = "" if is_right(plan, loss, value) else WRONG
            told = (world, name, case.layout.name, case.optimizer, f"{loss:.1e}")
            lines.append(f"| {' | '.join(map(str, told))} | {value:.1e} {where} |{mark}")
            print(lines[-1], flush=True)
        for n in list(started.jobs):
            started.end(n)
    return lines


def of_world(world, families, lowering):
    """The lines of the families, as many parts at a time as there are cores for."""
    out = SPLIT if lowering == "compiled" else ()
    parts = [
        (world, name, lowering, some[start : start + PART])
        for name in families
        for some in [[case for case in cases([world], [name]) if case.layout.schedule not in out]]
        for start in range(0, len(some), PART)
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
    head = "| ranks | family | layout | optimizer | losses | values |\n|---|---|---|---|---|---|"
    out.write_text(f"{len(lines)} cases, {wrong} wrong.\n\n{head}\n" + "\n".join(lines) + "\n")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
