"""Configurations of other trainers: plans written as them and read back, and files of theirs."""

import json
import shlex
from pathlib import Path

import msgspec
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

import meshwise
from meshwise.cli import app
from meshwise.models import catalogue
from meshwise.models.configured import flags, megatron, plain_layout, torchtitan
from meshwise.prices.datasheet import on_hosts
from meshwise.spec import Cluster, Cuts, Experts, Layout, Plan, Recipe, Way, Workload
from meshwise.verbs import files, given

TOOLS = {"megatron": megatron, "torchtitan": torchtitan}


def plan(model, layout, *, seq_len=1024, cluster="h100-hgx", hosts=64, **fields):
    machine = on_hosts(files.take(cluster, Cluster), hosts)
    usual = {"dtype": "bf16", "lowering": "eager", "recipe": Recipe()}
    work = Workload(global_batch_size=layout.batch_size, seq_len=seq_len)
    return given.build(catalogue.find_any(model), work, layout, machine, **usual | fields)


GOLDEN = {
    "gpt-39b": plan(
        "gpt-39b",
        Layout(pp=16, dp=4, microbatch_size=1, num_microbatches=256, schedule="1f1b",
               recompute="full"),
        cluster="p3.16xlarge", hosts=8,
    ),
    "llama-3-70b": plan(
        "llama-3-70b",
        Layout(dp=8, tp=8, zero=3, sequence_parallel=True, microbatch_size=2, num_microbatches=4,
               recompute="full"),
        seq_len=8192, hosts=8, lowering="compiled",
    ),
    "deepseek-v3": plan(
        "deepseek-v3",
        Layout(dp=64, tp=4, ep=8, zero=3, replicas=2, sequence_parallel=True, num_microbatches=8,
               cuts=Cuts(experts="experts"), recompute="selective"),
        seq_len=4096, hosts=64,
    ),
    "llama-3.1-405b": plan(
        "llama-3.1-405b",
        Layout(pp=8, dp=2, tp=8, zero=2, sequence_parallel=True, num_microbatches=32,
               schedule="interleaved_1f1b", stages_per_rank=2, layers=(7, *[8] * 14, 7)),
        seq_len=8192, hosts=64,
    ),
    "unlike": plan(
        "llama-3-8b",
        Layout(pp=2, meshes=((4, 1), (2, 2)), microbatch_size=4, num_microbatches=4,
               schedule="1f1b", ways=(Way(recompute="full"), Way())),
    ),
}  # fmt: skip


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("name", GOLDEN)
def test_a_plan_is_written_as_it_was(tool, name, golden):
    text, notes = TOOLS[tool].text(GOLDEN[name])
    assert all(f"# not said here: {note}\n" in text for note in notes)
    golden(f"configured-{name}-{tool}.txt", text)


def test_what_megatron_cannot_say_of_unlike_meshes_is_said():
    notes = megatron.text(GOLDEN["unlike"])[1]
    assert any(note.startswith("layout.meshes = ") for note in notes)
    assert any(note.startswith("layout.ways = full,same") for note in notes)


def again(tool, one):
    text, notes = TOOLS[tool].text(one)
    found = TOOLS[tool].read(text, one.layout.num_devices, 0, None)
    if notes:
        return notes
    assert (found.workload, found.recipe, found.dtype) == (one.workload, one.recipe, one.dtype)
    assert plain_layout(found.layout) == plain_layout(one.layout)
    assert found.model == one.model
    assert not found.notes
    return ()


@st.composite
def layouts(draw, tool):
    """Draw layouts that a tool can say, of llama-3.1-8b or deepseek-v2-lite."""
    pick = st.sampled_from
    model = draw(pick(["llama-3.1-8b", "deepseek-v2-lite"]))
    tp, cp, pp, dp = (draw(pick(sizes)) for sizes in ([1, 2, 4], [1, 2], [1, 2, 4], [1, 2, 8]))
    ranks, experts = dp * cp, model.startswith("deepseek")
    levels = [0, 1, 2, 3] if tool == "megatron" else [2, 3]
    zero = draw(pick(levels)) if ranks > 1 else 0
    replicas = draw(pick([1, 2])) if zero and dp > 2 else 1
    is_seq = tool == "torchtitan" or experts or draw(st.booleans())
    whole = experts and tp > 1 and draw(st.booleans())
    ep = draw(pick([1, 2])) if experts and ranks // replicas % 2 == 0 else 1
    if whole and ep * tp == 1:
        whole = False
    if tool == "torchtitan" and ep == 1:
        whole = False  # its experts are divided by tp, or by ep with all of tp
    loops = draw(pick([1, 2])) if pp > 1 else 1
    layers = ()
    total = catalogue.find(model).layers
    if pp > 1:
        stages = pp * loops
        cuts = sorted(
            draw(
                st.lists(
                    st.integers(1, total - 1), min_size=stages - 1, max_size=stages - 1, unique=True
                )
            )
        )
        layers = tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True))
    names = (
        {1: ["1f1b"], 2: ["interleaved_1f1b"]}
        if tool == "megatron"
        else {1: ["1f1b", "gpipe"], 2: ["interleaved_1f1b", "looped_bfs"]}
    )
    recompute = draw(pick(["none", "full"]))
    some = recompute == "full" and tool == "megatron" and draw(st.booleans())
    return model, Layout(
        dp=dp, tp=tp, cp=cp, pp=pp, ep=ep, zero=zero, replicas=replicas, layers=layers,
        sequence_parallel=is_seq and tp > 1, cuts=Cuts(experts="experts") if whole else Cuts(),
        microbatch_size=draw(pick([1, 2])), num_microbatches=4 * draw(pick([1, 3])),
        schedule=draw(pick(names[loops])) if pp > 1 else "none", stages_per_rank=loops,
        recompute=recompute, recompute_layers=2 if some else None,
    )  # fmt: skip


def sayable(tool):
    @drawn(layouts(tool), st.sampled_from(["fp32", "bf16"]), st.sampled_from([512, 4096]))
    @settings(max_examples=60)
    def check(one, weights, seq_len):
        weights = weights if tool == "torchtitan" else "fp32"
        assert again(tool, plan(*one, seq_len=seq_len, recipe=Recipe(weights=weights))) == ()

    return check


@pytest.mark.parametrize("tool", TOOLS)
def test_a_plan_written_and_read_is_the_same(tool):
    sayable(tool)()


@pytest.mark.parametrize(
    "name", [name for name in catalogue.all_names() if not name.startswith("wresnet")]
)
def test_every_model_of_the_catalogue_is_said_in_megatrons_flags(name):
    assert again("megatron", plan(name, Layout(dp=2, zero=1))) == ()


@pytest.mark.parametrize(
    ("change", "tool", "note"),
    [
        ({"cuts": Cuts(head="whole")}, "megatron", "layout.cuts = head:whole; it says the usual"),
        ({"tp_sums": "first"}, "torchtitan", "layout.tp_sums = first; it says last"),
        ({"sequence_parallel": False}, "torchtitan", "layout.sequence_parallel = False; it says T"),
        ({"zero": 1}, "torchtitan", "layout.zero = 1; it says 2"),
        ({"pp": 2, "schedule": "gpipe"}, "megatron", "layout.schedule = gpipe; it says 1f1b"),
    ],
)
def test_what_cannot_be_said_is_named(change, tool, note):
    usual = Layout(dp=2, tp=2, zero=3, sequence_parallel=True)
    notes = TOOLS[tool].text(plan("llama-3.1-8b", msgspec.structs.replace(usual, **change)))[1]
    assert any(one.startswith(note) for one in notes), notes
    experts = Experts(num_experts=8, top_k=2, ffn=512, groups=2, load=1.5)
    odd = msgspec.structs.replace(catalogue.find("gpt-30m"), experts=experts)
    assert any("load 1.5" in one for one in TOOLS[tool].text(plan(odd, usual))[1]) or (
        tool == "torchtitan"
    )


TOML = """
[model]
name = "llama3"
flavor = "{flavor}"
{converters}
[optimizer]
name = "AdamW"
lr = {lr}
[training]
{batch}
seq_len = 8192
max_norm = 1.0
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = {tp}
{asynchronous}
pipeline_parallel_degree = 1
context_parallel_degree = 1
[activation_checkpoint]
mode = '{mode}'
selective_ac_option = 'op'
"""


@pytest.mark.parametrize(
    ("words", "gpus", "name"),
    [  # as torchtitan's train_configs have them; the file of 405B is older than the others
        ({"flavor": "8B", "lr": "3e-4", "batch": "local_batch_size = 1", "mode": "selective"}, 8,
         "llama-3.1-8b dp8 zero3 mb1x1 selective"),
        ({"flavor": "70B", "lr": "1.5e-4", "batch": "local_batch_size = 8", "tp": 8,
          "mode": "full"}, 64, "llama-3.1-70b dp8 tp8+sp zero3 mb8x1 full"),
        ({"flavor": "405B", "lr": "8e-5", "batch": "batch_size = 2\ncompile = true", "tp": 8,
          "mode": "full", "converters": 'converters = "float8"',
          "asynchronous": "enable_async_tensor_parallel = true"}, 128,
         "llama-3.1-405b dp16 tp8+sp zero3 mb2x1 full"),
    ],
)  # fmt: skip
def test_a_job_file_of_torchtitans_means_its_layout(words, gpus, name):
    usual = {"tp": 1, "converters": "", "asynchronous": ""}
    found = torchtitan.read(TOML.format(**usual | words), gpus, 0, None)
    assert f"{found.model.name} {found.layout.name}" == name
    assert found.workload.seq_len == 8192
    assert found.workload.global_batch_size == found.layout.batch_size
    older = words["flavor"] == "405B"
    assert (found.recipe.fp8, found.recipe.async_tp) == (older, older)
    assert found.lowering == ("compiled" if older else "eager")
    of_full = ["activation_checkpoint.selective_ac_option"] * (words["mode"] == "full")
    assert found.ignored == ("training.dataset", *of_full)


@pytest.mark.parametrize(
    ("layers", "stages", "less", "found"),
    [  # what torchtitan 0.2.2 returned: generate_llm_fqn_per_model_part(stages, layers, *less)
        (32, 4, (1, 1), (8, 9, 8, 7)),
        (32, 8, (1, 1), (4, 5, 4, 4, 4, 4, 4, 3)),
        (126, 16, (1, 1), (7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7)),
        (61, 8, (3, 2), (6, 9, 8, 8, 8, 8, 8, 6)),
        (27, 4, (0, 0), (7, 7, 7, 6)),
    ],
)
def test_stages_have_torchtitans_layers(layers, stages, less, found):
    assert torchtitan._layers(layers, stages, *less) == found


SCRIPT = """#!/bin/bash
GPUS_PER_NODE=8
TP=${TP:-4}
DATA_PATH=$1 #<the tokens>
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes 2
    --master_addr $MASTER_ADDR
)
MODEL_ARGS=(
    --num-layers 24 # a comment's quote
    --hidden-size 2048
    --num-attention-heads 16
    --seq-length 2048 --max-position-embeddings 2048 --vocab-size 51200
    --moe-layer-freq '([0]*4+[1]*20)' --num-experts 8)
OTHERS="--micro-batch-size 2 --global-batch-size 64 --bf16 --data-path $DATA_PATH 0.5 b"
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} \\
    --tensor-model-parallel-size $TP --lr-decay-style=cosine
"""


def test_a_script_of_megatrons_is_read_without_running_it():
    found = megatron.read(SCRIPT, None, 64, None)
    assert found.layout == Layout(dp=4, tp=4, microbatch_size=2, num_microbatches=8)
    assert (found.model.layers, found.model.vocab) == (24, 51200)
    assert found.model.experts.first_dense == 4
    assert found.ignored == ("--data-path", "--lr-decay-style")


LEAST = ("--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 512 "
         "--micro-batch-size 1")  # fmt: skip


@pytest.mark.parametrize(
    ("more", "layers"),
    [
        (
            "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3",
            (1, 2, 2, 3),
        ),
        ("--decoder-last-pipeline-num-layers 2", ()),
        ("--num-layers-per-virtual-pipeline-stage 1", ()),
        ("--pipeline-model-parallel-layout Et|(t|t|)*2t|t|t*1|L", None),
        ("--pipeline-model-parallel-layout Et|t*3|(tt|)*1,ttL", (1, 3, 2, 2)),
    ],
)
def test_stages_are_megatrons(more, layers):
    words = f"{LEAST} --pipeline-model-parallel-size 4 {more.replace('(', chr(92) + '(')}"
    words = words.replace(")*", chr(92) + ")*").replace("|", chr(92) + "|")
    if layers is None:
        with pytest.raises(ValueError, match="8 t in stages, a multiple of 4, none"):
            megatron.read(words, 4, 0, None)
    else:
        assert megatron.read(words, 4, 0, None).layout.layers == layers


def test_every_flag_of_megatron_is_taken():
    words = {"switches": "", "values": " x", "lists": " x y"}
    known = [f"{flag}{words[kind]}" for flag, kind in flags.takes().items()]
    assert len(known) > 800
    assert len(flags.parsed(" ".join(known))[0]) == len(known)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-layer 8", "--num-layer: is no flag of Megatron-LM; did you mean --num-layers"),
        ("8 --swiglu", "'8': belongs to no flag; leave it out"),
        ("--seq-length --swiglu", "--seq-length: no value is given"),
        (LEAST.replace("512", "$V"), "--vocab-size = '$V': must be a whole number >= 1; the scr"),
        (LEAST.replace("--hidden-size 64", ""), "--hidden-size is missing"),
        (f"{LEAST} --tensor-model-parallel-size 3", "gpus = 4: must be a multiple of"),
        (f"{LEAST} --global-batch-size 6", "--global-batch-size = 6: must be a multiple of"),
        (f"{LEAST} --num-experts 4 --moe-layer-freq 2*3", "--moe-layer-freq = '2*3': must be"),
        (f"{LEAST} --moe-layer-freq '[0]*999999999999' --num-experts 4", "repeats more"),
        (f"{LEAST} --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout 't*99999'",
         "'t*99999': repeats more than any model has layers"),
        (LEAST.replace("8", "99999999999999"), "--num-layers = 99999999999999: must be <= 10000"),
        (f"{LEAST} --lr nan", "--lr = 'nan': must be a number"),
        (f"{LEAST} 'open", "no words of a shell: No closing quotation"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_flags_is_said(words, message):
    with pytest.raises(ValueError) as error:
        megatron.read(words, 4, 0, None)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("tensor_parallel_degree", "tensor_paralel_degree"), "did you mean tensor_parallel_degr"),
        (('"8B"', '"9B"'), "model.flavor = '9B' of 'llama3': known are llama3 8B"),
        (("degree = -1", "degree = 3"), "data_parallel_shard_degree = 3: 8 ranks leave 8"),
        (("8192", "'long'"), "training.seq_len = 'long': must be a whole number >= 1"),
        (("tensor_parallel_degree = 1", "tensor_parallel_degree = 3"), "gpus = 8: must be a"),
        (('"llama3"', "[1]"), "model.flavor = '8B' of '[1]'"),
        (("pipeline_parallel_degree = 1", 'pipeline_parallel_degree = 2\n'
          'module_fqns_per_model_part = 3'), "32 layers as ; none may be empty"),
        (("pipeline_parallel_degree = 1", 'pipeline_parallel_degree = 2\n'
          'pipeline_parallel_schedule = "2F2B"'), "pipeline_parallel_schedule = 2F2B: is no sched"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_job_file_is_said(change, message):
    text = TOML.format(flavor="8B", lr=1e-4, batch="", tp=1, converters="", asynchronous="",
                       mode="full")  # fmt: skip
    with pytest.raises(ValueError) as error:
        torchtitan.read(text.replace(*change), 8, 0, None)
    assert message in str(error.value)


def call(*words):
    with pytest.raises(SystemExit) as ended:
        app.main(list(words))
    return ended.value.code


@pytest.mark.usefixtures("here")
def test_a_plan_goes_through_the_command_line_and_back(capsys, caplog):
    layout = '{"dp": 4, "tp": 2, "zero": 1, "microbatch_size": 2, "num_microbatches": 2}'
    first = meshwise.plan("gpt-2.6b", cluster="h100-hgx", layout=layout)
    assert call("show", "plan.json", "--as", "megatron") == 0
    text = capsys.readouterr().out
    Path("flags.txt").write_text(text)
    with caplog.at_level("INFO", "meshwise"):
        words = ["--cluster", "h100-hgx", "--out", "b.json", "--json"]
        assert call("plan", "--megatron-args", "flags.txt", *words) == 0
        found = msgspec.json.decode(capsys.readouterr().out, type=Plan)
        plain = " ".join(line for line in text.splitlines() if line[0] != "#")
        assert call("plan", "--megatron-args", f"{plain} --log-interval 10", *words) == 0
    assert found == first
    assert msgspec.json.decode(capsys.readouterr().out, type=Plan) == first
    assert "ignored, as no plan depends on it: --log-interval" in caplog.text
    assert call("show", "plan.json", "--as", "torchtitan", "--json") == 0
    assert "layout.zero = 1; it says 2" in json.loads(capsys.readouterr().out)["not_said"]


@pytest.mark.usefixtures("here")
def test_what_has_no_price_is_left_out_and_said(caplog):
    words = {"flavor": "405B", "lr": "8e-5", "batch": "local_batch_size = 2", "tp": 8,
             "mode": "full", "converters": 'converters = ["float8"]',
             "asynchronous": "enable_async_tensor_parallel = true"}  # fmt: skip
    Path("job.toml").write_text(TOML.format(**words))
    found = meshwise.plan(torchtitan="job.toml", cluster="h100-hgx", hosts=16)
    assert found.layout.name == "dp16 tp8+sp zero3 mb2x1 full"
    assert (found.recipe.fp8, found.recipe.async_tp, found.lowering) == (False, False, "eager")
    assert "async_tp True: has no price; planned without" in caplog.text
    assert "fp8: planned without; fp8 casts products of whole weights" in caplog.text


@pytest.mark.parametrize("name", ["layout", "seq_len", "torchtitan", "fewest"])
def test_a_configuration_and_what_it_says_are_not_both_given(name):
    value = {"seq_len": 8, "fewest": True}.get(name, "{}")
    with pytest.raises(ValueError, match=f"{name}: .*leave one of them out"):
        meshwise.plan(megatron_args=LEAST, **{name: value})


@pytest.mark.usefixtures("here")
def test_refit_takes_all_of_megatrons_flags(caplog, capsys):
    words = "--scenario tp2-tp4 --num-layers 1 --dry-run"
    with caplog.at_level("INFO", "meshwise"):
        more = "--lr_decay_style cosine --data-path a b --kv-channels 64 --swiglu"
        assert call("refit", *shlex.split(f"{words} {more}")) == 0
    assert "ignored: --lr-decay-style, --data-path" in caplog.text
    assert "ignored, though weights depend on it: --kv-channels" in caplog.text
    told = {"--num-layer 2": "did you mean --num-layers", "4": "4: not understood here",
            "--scenari a": "did you mean --scenario"}  # fmt: skip
    for wrong, told_of_it in told.items():
        assert call("refit", *f"{words} {wrong}".split()) == 2
        assert told_of_it in capsys.readouterr().err


def test_image_models_are_neither_tools():
    with pytest.raises(ValueError, match="wresnet-250m is an image model; Megatron-LM has none"):
        megatron.text(plan("wresnet-250m", Layout(dp=2), seq_len=1))
