"""The correctness matrix beside the oracle: a part that combines every two things, and all of it;
models that are not in the matrix, and a run as a user starts it."""

import itertools
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from safetensors.torch import load_file

from meshwise.engine import train
from meshwise.engine.frame import RunRequest
from meshwise.models import placement
from meshwise.options.run import Course
from meshwise.spec import Cuts, Decoder, Experts, Layout, Mla, Model, WideResNet
from tests.dist import matrix, oracle
from tests.errors import largest, loss_error

pytestmark = pytest.mark.dist

WORLDS = (1, 2, 3, 4)  # of `make test`
EVERY = 37  # of so many cases one is compiled in `make test`

SIZES = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "vocab": 61}
SIZES |= {"max_seq_len": 32, "ffn": 48}
MODELS = {
    # routing as DeepSeek-V2 has it, queries without a latent
    "deepseek-v2": Decoder(
        **SIZES | {"kv_heads": 4},
        mla=Mla(kv_lora_rank=16, nope_head_dim=8, rope_head_dim=4, v_head_dim=6),
        experts=Experts(
            num_experts=8, top_k=3, ffn=16, shared_ffn=32, first_dense=1, normalized=False,
            routed_scale=2.0, groups=4, top_groups=2,
        ),
    ),
    "qwen-moe": Decoder(
        **SIZES,
        qkv_bias=True,
        rope_theta=300.0,
        experts=Experts(
            num_experts=6, top_k=2, ffn=16, shared_ffn=24, shared_gate=True, normalized=False
        ),
    ),
    "biased": Decoder(
        **SIZES, mlp_bias=True, out_bias=True, norm_eps=1e-2,
        experts=Experts(num_experts=4, top_k=1, ffn=16, shared_ffn=24, every=2),
    ),
    "without gates": Decoder(
        **SIZES, gated=False, tied=True, experts=Experts(num_experts=4, top_k=2, ffn=16, every=2)
    ),
    # Two places for an expert, of which the copies of six tokens want three or four.
    "gshard with capacity": Model(
        hidden=32, layers=2, heads=4, ffn=48, vocab=61, max_seq_len=32,
        experts=Experts(
            num_experts=4, top_k=2, ffn=32, every=2, capacity_factor=0.7, group_size=6
        ),
    ),
    "experts with capacity": Decoder(
        **SIZES, experts=Experts(
            num_experts=8, top_k=3, ffn=16, shared_ffn=24, first_dense=1, normalized=False,
            capacity_factor=1.25, group_size=6, routed_scale=2.0,
        ),
    ),
    "gemma": Decoder(
        **SIZES, tied=True, norms="both", qk_norm=True, activation="gelu", embed_scale=32**0.5,
        softmax_scale=0.3, window=5, full_layers=(1,), local_rope_theta=100.0, rope_theta=3000.0,
    ),
    "granite": Decoder(
        **SIZES, embed_scale=3.0, residual_scale=0.4, logits_scale=0.25, softmax_scale=0.2,
        mlp_bias=True, window=7,
    ),
    "olmo": Decoder(**SIZES, norms="after", qk_norm=True, qk_norm_over="projection"),
    "deeper images": WideResNet(
        blocks=(2, 1), channels=6, width_factor=3, image_size=48, num_classes=7
    ),
}  # fmt: skip
# Relative, of a run in float32: what its rounding makes of losses, weights' ways and states.
SINGLE_LOSS, SINGLE_VALUE = 1e-6, 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the oracle says, computed once."""
    return tmp_path_factory.mktemp("oracle")


@pytest.fixture
def check(gloo_ranks, folder, capsys):
    def check(cases, of, lowering="eager"):
        with capsys.disabled():
            print(f"\nmatrix: {len(cases)} of {len(of)} cases, {lowering}", end=" ", flush=True)
        for case in cases:
            plan = case.plan(lowering)
            loss, value, where = matrix.run(gloo_ranks, plan, folder)
            told = (case.name, case.layout.name, case.optimizer, loss, value, where)
            assert matrix.is_right(plan, loss, value), told

    return check


@pytest.mark.parametrize("world", WORLDS[1:])
def test_every_two_things_combined_train_as_the_oracle_does(check, world):
    everything = matrix.cases(WORLDS)
    parts = (matrix.pairwise(everything), everything)
    check(*([case for case in part if case.world == world] for part in parts))


@pytest.mark.whole
@pytest.mark.parametrize("name", matrix.FAMILIES)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_everything_trains_as_the_oracle_does(check, world, name):
    everything = matrix.cases([world], [name])
    check(everything, everything)


@pytest.mark.parametrize("every", [EVERY, pytest.param(1, marks=pytest.mark.whole)])
def test_compiled_layers_train_as_the_oracle_does(check, every):
    everything = [c for c in matrix.cases([2]) if c.layout.schedule not in matrix.SPLIT]
    check(everything[::every], everything, "compiled")


@pytest.mark.parametrize("optimizer", matrix.RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_models_beside_the_matrix_train_as_the_oracle_does(gloo_ranks, folder, name, optimizer):
    model = msgspec.structs.replace(MODELS[name], name=name)
    plan = matrix.plan_of(model, Layout(microbatch_size=4, num_microbatches=2), optimizer)
    loss, value, where = matrix.run(gloo_ranks, plan, folder)
    assert matrix.is_right(plan, loss, value), (loss, value, where)


def test_biases_of_experts_enter_a_sum_over_ranks_once(gloo_ranks, folder):
    layout = Layout(dp=2, tp=2, zero=3, sequence_parallel=True, microbatch_size=4)
    plan = matrix.plan_of(msgspec.structs.replace(MODELS["biased"], name="biased"), layout, "adamw")
    loss, value, where = matrix.run(gloo_ranks, plan, folder)
    assert matrix.is_right(plan, loss, value), (loss, value, where)


@pytest.mark.parametrize("turn", range(7))
@pytest.mark.parametrize(
    "name",
    ["gemma", *(pytest.param(n, marks=pytest.mark.whole) for n in ("granite", "olmo"))],
)
def test_norms_scales_and_windows_train_so_in_every_layout(gloo_ranks, folder, name, turn):
    model, rows = msgspec.structs.replace(MODELS[name], name=name), {"microbatch_size": 4}
    layout = [
        Layout(tp=2, recompute="selective", num_microbatches=2, **rows),
        Layout(tp=2, sequence_parallel=True, num_microbatches=2, **rows),
        Layout(cp=2, num_microbatches=2, **rows),
        Layout(pp=2, schedule="1f1b", num_microbatches=2, recompute="full", **rows),
        Layout(dp=2, zero=3, recompute="selective", **rows),
        Layout(dp=2, tp=2, zero=2, sequence_parallel=True, **rows),
        Layout(dp=2, zero=3, recompute="selective", **rows),
    ][turn]
    plan = matrix.plan_of(model, layout, "adamw", "compiled" if turn == 6 else "eager")
    if name == "olmo" and layout.tp > 1:
        with pytest.raises(ValueError, match="normed over all heads"):
            placement.check(model, plan.workload, layout)
        return
    loss, value, where = matrix.run(gloo_ranks, plan, folder)
    assert matrix.is_right(plan, loss, value), (loss, value, where)


WHOLE_EXPERTS = Cuts(stream="seq", experts="experts")


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, ep=2, zero=2, microbatch_size=2, num_microbatches=2),
        Layout(tp=2, sequence_parallel=True, microbatch_size=4, num_microbatches=2),
        Layout(tp=2, cuts=WHOLE_EXPERTS, microbatch_size=4, num_microbatches=2),
        Layout(cp=2, ep=2, zero=3, microbatch_size=4, num_microbatches=2, recompute="full"),
        Layout(tp=2, cuts=Cuts(stream="batch", experts="seq"), microbatch_size=8),
        Layout(dp=2, tp=2, ep=2, zero=3, cuts=WHOLE_EXPERTS, microbatch_size=4),
    ],
    ids=lambda layout: layout.name,
)
def test_experts_with_a_capacity_drop_the_same_in_every_layout(gloo_ranks, folder, layout):
    """Groups of 6 tokens, of which every rank has whole ones."""
    model = msgspec.structs.replace(MODELS["gshard with capacity"], name="gshard with capacity")
    plan = matrix.plan_of(model, layout, "adamw")
    loss, value, where = matrix.run(gloo_ranks, plan, folder)
    assert matrix.is_right(plan, loss, value), (loss, value, where)


CUTS = [
    Cuts(attention="whole", embed="whole", head="whole"),
    Cuts(attention="batch", feed_forward="seq", experts="seq"),
    Cuts(stream="seq", attention="batch", experts="batch"),
    Cuts(stream="batch", feed_forward="whole", experts="whole"),
    Cuts(stream="batch", attention="batch", embed="batch", head="batch"),
    Cuts(stream="seq", attention="whole", feed_forward="batch", embed="seq", head="seq"),
    Cuts(embed="batch", head="seq", feed_forward="whole", experts="whole"),
    Cuts(stream="seq", feed_forward="seq", experts="seq", embed="whole", head="batch"),
]


def fits(name, layout):
    model = matrix.FAMILIES[name]
    return matrix._fits(model, matrix.workload(layout.num_devices, model), layout)


def other_cuts():
    """Layouts whose parts are cut over tp in other ways than by weights alone."""
    names = [name for name in matrix.FAMILIES if name != "wide-resnet"]
    shapes = [
        Layout(tp=2, microbatch_size=4, num_microbatches=2),
        Layout(dp=2, tp=2, zero=3, microbatch_size=4, recompute="selective"),
        Layout(tp=4, microbatch_size=8, recompute="full"),
        Layout(tp=2, pp=2, schedule="1f1b", microbatch_size=4, num_microbatches=2),
        Layout(cp=2, tp=2, zero=2, microbatch_size=8),
    ]
    found = []
    for turn, (name, cuts) in enumerate(itertools.product(names, CUTS)):
        for shape in shapes:
            layout = msgspec.structs.replace(shape, cuts=cuts)
            if fits(name, layout):
                optimizer = list(matrix.RECIPES)[turn % len(matrix.RECIPES)]
                found.append(matrix.Case(layout.num_devices, name, layout, optimizer))
    return found


@pytest.mark.parametrize("every", [46, pytest.param(1, marks=pytest.mark.whole)])
def test_parts_cut_in_other_ways_train_as_the_oracle_does(check, every):
    everything = other_cuts()
    check(everything[::every], everything)


@pytest.mark.parametrize("every", [300, pytest.param(16, marks=pytest.mark.whole)])
def test_parts_cut_in_other_ways_compile(check, every):
    everything = other_cuts()
    check(everything[5::every], everything, "compiled")


BY_TOKENS = Cuts(stream="seq", attention="batch", embed="seq", head="seq", experts="seq")
SP = {"sequence_parallel": True, "tp": 2}
SUMS = [
    Layout(dp=2, microbatch_size=2, num_microbatches=2, tp_sums="together", **SP),
    Layout(dp=2, tp=2, zero=2, cuts=BY_TOKENS, microbatch_size=2, num_microbatches=2,
           tp_sums="first"),
    Layout(cp=2, microbatch_size=8, recompute="selective", tp_sums="together", **SP),
    Layout(pp=2, schedule="1f1b", microbatch_size=4, num_microbatches=2, tp_sums="first",
           cuts=replace(BY_TOKENS, stream="whole"), tp=2),
    Layout(dp=2, tp=2, cuts=BY_TOKENS, microbatch_size=4, recompute="full", tp_sums="together"),
    Layout(dp=2, pp=2, schedule="zbv", stages_per_rank=2, microbatch_size=2, num_microbatches=2,
           tp_sums="together", tp=2, cuts=BY_TOKENS),
    Layout(dp=2, zero=3, microbatch_size=4, tp_sums="first", **SP),
    Layout(dp=4, zero=1, replicas=2, microbatch_size=1, num_microbatches=2, tp_sums="last", **SP),
    Layout(dp=2, ep=2, microbatch_size=4, cuts=BY_TOKENS, tp=2, tp_sums="together"),
]  # fmt: skip


def sums_over_two_axes():
    """Gradients that are sums over tp and over data ranks, behind one another or at once."""
    names = [name for name in matrix.FAMILIES if name != "wide-resnet"]
    turns = itertools.cycle(matrix.RECIPES)
    return [
        matrix.Case(layout.num_devices, name, layout, optimizer)
        for (name, layout), optimizer in zip(itertools.product(names, SUMS), turns, strict=False)
        if fits(name, layout)
    ]


@pytest.mark.parametrize("every", [14, pytest.param(1, marks=pytest.mark.whole)])
def test_sums_over_two_axes_train_as_the_oracle_does(check, every):
    everything = sums_over_two_axes()
    check(everything[::every], everything)


@pytest.mark.parametrize("every", [60, pytest.param(5, marks=pytest.mark.whole)])
def test_sums_over_two_axes_compile(check, every):
    everything = [c for c in sums_over_two_axes() if c.layout.schedule not in matrix.SPLIT]
    check(everything[2::every], everything, "compiled")


WHOLE_EXPERTS = [
    Layout(dp=2, tp=2, microbatch_size=2, num_microbatches=2),
    Layout(dp=2, tp=2, ep=2, microbatch_size=4),
    Layout(dp=2, tp=2, zero=2, microbatch_size=2, num_microbatches=2),
    Layout(dp=2, tp=2, ep=2, zero=3, microbatch_size=4, recompute="full"),
    Layout(cp=2, tp=2, ep=2, microbatch_size=4, num_microbatches=2),
    Layout(cp=2, tp=2, zero=2, microbatch_size=8),
    Layout(cp=2, tp=2, ep=2, zero=3, microbatch_size=4, num_microbatches=2, recompute="selective"),
    Layout(tp=2, pp=2, schedule="1f1b", microbatch_size=4, num_microbatches=2),
]


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.whole)])
@pytest.mark.parametrize(
    "name", ["mixtral", *(pytest.param(n, marks=pytest.mark.whole) for n in ("deepseek", "gshard"))]
)
def test_whole_experts_on_different_tp_ranks_train_as_the_oracle_does(check, name, every):
    layouts = [
        msgspec.structs.replace(layout, cuts=Cuts(stream=stream, experts="experts"))
        for layout, stream in zip(WHOLE_EXPERTS, itertools.cycle(["seq", "seq", "batch"]))
    ]
    kinds = itertools.cycle(matrix.RECIPES)
    cases = [
        matrix.Case(4, name, layout, kind) for layout, kind in zip(layouts, kinds, strict=False)
    ]
    check(cases[::every], cases)


def result(ranks, text):
    return msgspec.to_builtins(train.measure(ranks, msgspec.json.decode(text, type=RunRequest)))


@pytest.mark.parametrize("optimizer", matrix.RECIPES)
def test_a_run_from_a_checkpoint_to_a_checkpoint_trains_as_the_oracle_does(
    gloo_ranks, tmp_path, optimizer
):
    """As `meshwise run --resume-from ... --save ...` does it, in float32."""
    layout = Layout(dp=2, microbatch_size=4)
    plan = matrix.plan_of(matrix.FAMILIES["mixtral"], layout, optimizer)
    start, file = matrix.expected(tmp_path, plan, gloo_ranks, double=False)
    asked = Course(
        seed=matrix.SEED, steps=matrix.STEPS - 2, warmup=1, resume_from=start, save=tmp_path / "end"
    )
    ordered = RunRequest(plan=plan, run_dir=str(tmp_path), asked=asked)
    sample, _ = gloo_ranks(2, result, text=msgspec.json.encode(ordered).decode())
    due = load_file(file)
    assert loss_error(sample["metrics"]["losses"], due["losses"].tolist()) <= SINGLE_LOSS
    found, errors = {}, {}
    for path in (tmp_path / "end").glob("*/*.safetensors"):
        found |= load_file(path)
    for name, value in found.items():
        _, key, name = name.split(".", 2) if name.startswith("optimizer.") else ("", "", name)
        theirs = matrix.oracles_name(plan.model, name)
        exact = due.pop(f"{matrix.STATES[key]} of {theirs}" if key else f"weight {theirs}")
        size = exact if key else exact - due[f"start {theirs}"]
        errors[name, key] = ((value - exact).norm() / size.norm()).item()
    assert largest(errors.values()) <= SINGLE_VALUE, max(errors.items(), key=lambda e: e[1])
    left = {name for name in due if not name.startswith("start ")}
    assert left == {"losses"}


def test_the_whole_matrix_combines_every_pair():
    """Pairs of axes and options that exclude each other, or that pipelines with unequal meshes have
    tests of their own for (test_pipeline.py), are left out."""
    pairs = set().union(*map(matrix.pairs, matrix.cases((2, 3, 4, 8))))
    words = set().union(*pairs) - set(matrix.FAMILIES)
    alone = [
        set(matrix.SCHEDULES), {"zero1", "zero2", "zero3"}, {"selective", "full"},
        set(matrix.RECIPES),
    ]  # fmt: skip
    for pair in itertools.combinations(sorted(words), 2):
        excluded = "unequal meshes" in pair or any(set(pair) <= group for group in alone)
        assert pair in pairs or excluded, pair
    axes = {"dp", "cp", "tp", "pp", "ep", "hsdp", "sp", "accumulation"}
    assert words >= axes | set(matrix.SCHEDULES) | {"zero1", "zero2", "zero3", "selective", "full"}


def test_the_oracle_shares_nothing_with_the_package():
    path = Path(oracle.__file__)
    code = f"import runpy, sys; runpy.run_path({str(path)!r}); print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch" in found.stdout.split()
    assert not [name for name in found.stdout.split() if name.split(".")[0] == "meshwise"]
