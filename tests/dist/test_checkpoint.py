"""A training goes on from a checkpoint: the same bits under the same layout, the same numbers under
another one.

The oracles are the training that was not interrupted, and torch's own reader of the files.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil
import threading
import warnings

import msgspec
import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

import meshwise
from meshwise.engine import checkpoint, data, step
from meshwise.engine import folder as commits
from meshwise.parallel import mesh
from meshwise.spec import Cuts, Experts, Layout, Model, Plan, Workload, stages_of
from meshwise.spec.checkpoint import Checkpoint

# 13 rows are uneven over tp, and over dp once more; where FSDP2 cuts them DTensor does not know
MODEL = Model(hidden=12, layers=4, heads=4, ffn=24, vocab=13, max_seq_len=10)
WORKLOAD = Workload(global_batch_size=12, seq_len=8)
STEPS = 4
SEED = 5

pytestmark = pytest.mark.dist


def layout(**degrees):
    """Of ``WORKLOAD`` in two microbatches, or as ``degrees`` say."""
    cut = {"microbatch_size": 6 // degrees.get("dp", 1), "num_microbatches": 2}
    schedule = {"schedule": "1f1b"} if "pp" in degrees else {}
    return Layout(**(cut | schedule | degrees))


ONE = layout()
ZERO3, ZERO1 = layout(dp=2, zero=3), layout(dp=2, zero=1)
TENSOR = layout(tp=2, sequence_parallel=True)
PIPELINE = layout(pp=2)
V_SHAPED = layout(pp=2, schedule="zbv", stages_per_rank=2)
UNEQUAL_ENDS = layout(pp=2, meshes=((1, 1), (1, 2)), layers=(1, 3))
FOUR = layout(dp=2, tp=2, zero=2)
PIPED = layout(pp=2, dp=2, zero=3)
HYBRID = layout(dp=4, zero=3, replicas=2, microbatch_size=3, num_microbatches=1)
V_TENSOR = layout(pp=2, tp=2, schedule="zbv", stages_per_rank=2)
UNEQUAL = layout(pp=3, meshes=((1, 1), (1, 2), (1, 1)), layers=(1, 2, 1))
UNEVEN = layout(dp=3, tp=2, zero=3)
OF_SIZE = [
    [UNEVEN],
    [UNEQUAL_ENDS],
    [FOUR, PIPED, HYBRID, V_TENSOR, UNEQUAL],
    [ZERO3, ZERO1, TENSOR, PIPELINE, V_SHAPED],
    [ONE],
]


@functools.cache
def place_of(layout):
    return mesh.build(msgspec.json.decode(layout, type=Layout), "cpu")


def prepared(ranks, plan, layout, seed=0):
    """A new training of a layout, and its plan."""
    layout = msgspec.convert(layout, Layout)
    plan = msgspec.json.decode(plan, type=Plan)
    plan = msgspec.structs.replace(plan, layout=layout, stages=stages_of(layout, plan.model))
    rows = step.rows(layout, ranks.rank)
    batches = data.batches(plan.model, WORKLOAD, steps=STEPS, seed=SEED, file=None, rows=rows)
    place = place_of(msgspec.json.encode(layout))
    training = step.prepare(plan, place, batches, ranks.device, dtype="fp32", seed=seed)
    return training, plan


def trained(ranks, training, steps):
    """The loss of each step, the mean over ranks that know it."""
    mine = [float(step.run(training, index)) for index in steps]
    reports = [m for m in ranks.gather(mine if training.reports else []) if m]
    return [sum(of_step) / len(of_step) for of_step in zip(*reports, strict=True)]


def tensors_of(training):
    """This rank's parameters and states, by stage and name, tied copies too."""
    found = {}
    for number, stage in training.pipeline.stages.items():
        for name, parameter in stage.module.named_parameters():
            found[f"{number} {name}"] = parameter
            for key, value in training.optimizer.state[parameter].items():
                if value is not None:
                    found[f"{number} {name} {key}"] = value
    return {
        name: (t.to_local() if hasattr(t, "to_local") else t).detach() for name, t in found.items()
    }


def equal(some, others):
    assert some.keys() == others.keys()
    return all(torch.equal(tensor, others[name]) for name, tensor in some.items())


def save(ranks, training, folder, *what, **where):
    with checkpoint.saving(ranks, folder) as into:
        into(training, *what, **where)


def run(ranks, plan, layout, steps, source=None, saves=()):
    """The losses of ``steps``, from ``source`` or the start; saves to [folder, step] on the way."""
    training, plan = prepared(ranks, plan, layout, seed=1 if source else 0)
    if source:
        assert checkpoint.load(ranks, training, source, plan, seed=SEED) == steps[0]
    losses = []
    for index in steps:
        losses += trained(ranks, training, [index])
        for into, at in saves:
            if at == index + 1:
                save(ranks, training, into, plan, step=at, seed=SEED)
    return losses


def copied(ranks, plan, layouts, source, target):
    """Load ``source`` under each layout and save it again, untouched."""
    for index, layout in enumerate(layouts):
        training, its_plan = prepared(ranks, plan, layout, seed=1)
        number = checkpoint.load(ranks, training, source, its_plan, seed=SEED)
        save(ranks, training, f"{target}{index}", its_plan, step=number, seed=SEED)


def interrupted(ranks, plan, layouts, folder):
    """Of each layout: the last losses with and without a stop, and whether all bits are equal."""
    found = []
    for layout in layouts:
        training, its_plan = prepared(ranks, plan, layout)
        trained(ranks, training, range(2))
        save(ranks, training, folder, its_plan, step=2, seed=SEED)
        expected = trained(ranks, training, range(2, STEPS))
        other, _ = prepared(ranks, plan, layout, seed=1)
        assert not equal(tensors_of(training), tensors_of(training) | tensors_of(other))
        start = checkpoint.load(ranks, other, folder, its_plan, seed=SEED)
        losses = trained(ranks, other, range(start, STEPS))
        found.append([losses, expected, equal(tensors_of(other), tensors_of(training))])
    return found


def read(folder):
    """All tensors and numbers of a checkpoint, by torch's reader."""
    record = json.loads((folder / "checkpoint.json").read_text())
    found = {
        name: torch.full(about["shape"], torch.nan, dtype=getattr(torch, about["dtype"]))
        for name, about in record["tensors"].items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, storage_reader=HuggingFaceStorageReader(folder / record["data"]))
    return found | {name: torch.tensor(number) for name, number in record["numbers"].items()}


@pytest.fixture(scope="module")
def plan(plan_of):
    return msgspec.json.encode(plan_of(MODEL, WORKLOAD, UNEVEN)).decode()


@pytest.fixture(scope="module")
def call(gloo_ranks, plan):
    """Call a function with a layout, or several of one size, on as many ranks as it needs."""

    def on_ranks(function, layouts, **arguments):
        one = isinstance(layouts, Layout)
        size = layouts.num_devices if one else layouts[0].num_devices
        arguments["layout" if one else "layouts"] = msgspec.to_builtins(layouts)
        return gloo_ranks(size, function, plan=plan, **arguments)

    return on_ranks


@pytest.fixture(scope="module")
def one(gloo_ranks, plan, tmp_path_factory):
    """The checkpoint of one device after two steps."""
    folder = tmp_path_factory.mktemp("one")
    layout = msgspec.to_builtins(ONE)
    gloo_ranks(1, run, plan=plan, layout=layout, steps=[0, 1], saves=[[str(folder), 2]])
    return folder


@pytest.mark.parametrize(
    "layouts",
    [pytest.param(of, marks=pytest.mark.whole if of[0].num_devices > 4 else ()) for of in OF_SIZE],
    ids=lambda of: f"of {of[0].num_devices}",
)
def test_a_layout_saves_what_it_loads_and_goes_on_bit_for_bit(
    gloo_ranks, call, one, tmp_path, layouts
):
    expected = read(one)
    assert len([name for name in expected if name.startswith("optimizer.exp_avg.")]) == 52
    call(copied, layouts, source=str(one), target=str(tmp_path / "copy"))
    for index, layout in enumerate(layouts):
        assert equal(read(tmp_path / f"copy{index}"), expected), layout.name
    if layouts != [UNEQUAL_ENDS]:  # the copy of a tied weight is rounded there as its cut is
        for of_rank in call(interrupted, layouts, folder=str(tmp_path / "saved")):
            for layout, (losses, uninterrupted, same) in zip(layouts, of_rank, strict=True):
                assert losses == uninterrupted and len(losses) == 2, layout.name
                assert same, layout.name


@pytest.mark.parametrize(
    "chain",
    [
        [ZERO3, TENSOR],
        [PIPELINE, ZERO1],
        [HYBRID, TENSOR, ONE],
        pytest.param([FOUR, PIPED], marks=pytest.mark.whole),
        pytest.param([V_SHAPED, UNEQUAL_ENDS], marks=pytest.mark.whole),
        pytest.param([UNEQUAL, V_TENSOR], marks=pytest.mark.whole),
    ],
    ids=lambda chain: " to ".join(layout.name for layout in chain),
)
def test_another_layout_goes_on_with_the_same_numbers(call, tmp_path, chain):
    folders = [str(tmp_path / str(index)) for index in range(len(chain))]
    saves = [[folders[0], 2], [str(tmp_path / "whole"), STEPS]]
    whole = call(run, chain[0], steps=[0, 1, 2, 3], saves=saves)[0]
    each = (STEPS - 2) // (len(chain) - 1)
    losses, at = [], 2
    for source, target, layout in zip(folders, folders[1:], chain[1:], strict=False):
        steps = list(range(at, at := at + each))
        losses += call(run, layout, steps=steps, source=source, saves=[[target, at]])[0]
    assert losses == pytest.approx(whole[2:], rel=1e-6)
    found, expected = read(pathlib.Path(folders[-1])), read(tmp_path / "whole")
    for name, tensor in expected.items():
        if not name.startswith("optimizer."):
            difference = found[name] - tensor
            if name.endswith("qkv.bias"):  # softmax ignores key biases: their updates are noise
                difference = difference.view(MODEL.heads, 3, -1)[:, ::2]
            assert difference.norm() <= 1e-6 * tensor.norm(), name


def test_whole_experts_of_tp_ranks_go_on_under_plain_ep(gloo_ranks, plan_of, tmp_path):
    """And back: each loads the other's file and goes on with the numbers of the other."""
    model = msgspec.structs.replace(MODEL, experts=Experts(num_experts=4, top_k=2, ffn=16))
    cuts = Cuts(stream="seq", experts="experts")
    over_both = layout(dp=2, tp=2, ep=2, zero=3, cuts=cuts)
    plain = layout(dp=2, tp=2, ep=2, zero=2)
    plan = msgspec.json.encode(plan_of(model, WORKLOAD, plain)).decode()

    def call(layout, steps, source=None, saves=()):
        given = {"layout": msgspec.to_builtins(layout), "steps": steps, "saves": saves}
        return gloo_ranks(4, run, plan=plan, source=source, **given)[0]

    for number, (first, second) in enumerate([(over_both, plain), (plain, over_both)]):
        folder, ends = str(tmp_path / f"{number}"), [tmp_path / f"{number}.{end}" for end in "ab"]
        whole = call(first, [0, 1, 2, 3], saves=[[folder, 2], [str(ends[0]), STEPS]])
        losses = call(second, [2, 3], folder, [[str(ends[1]), STEPS]])
        assert losses == pytest.approx(whole[2:], rel=1e-6)
        due, found = map(read, ends)
        for name in (name for name in due if "moe" in name and "optimizer" not in name):
            assert (found[name] - due[name]).norm() <= 1e-6 * due[name].norm(), name


def refused(ranks, plan, layout, folder, ffn=24, seed=SEED):
    """Why a checkpoint is not loaded; afterwards the ranks still work together."""
    training, plan = prepared(ranks, plan, layout)
    model = msgspec.structs.replace(plan.model, ffn=ffn)
    with pytest.raises(ValueError) as caught:
        other = msgspec.structs.replace(plan, model=model)
        checkpoint.load(ranks, training, folder, other, seed=seed)
    assert len(trained(ranks, training, [0])) == 1
    return str(caught.value)


@pytest.fixture
def saved(call, tmp_path):
    call(run, ZERO3, steps=[0], saves=[[str(tmp_path), 1]])
    return tmp_path


def test_what_does_not_fit_is_refused_by_name(call, saved):
    def why(**arguments):
        of_ranks = call(refused, ZERO3, **({"folder": str(saved)} | arguments))
        assert of_ranks[0] == of_ranks[1] and "\n" not in of_ranks[0]
        return of_ranks[0]

    assert "model.ffn = 48: the checkpoint has 24" in why(ffn=48)
    assert "seed = 6: the checkpoint has 5" in why(seed=6)
    assert "elsewhere/checkpoint.json does not exist" in why(folder=str(saved / "elsewhere"))
    path = saved / "checkpoint.json"
    record = json.loads(path.read_text())
    tensors, numbers = record["tensors"], record["numbers"]
    path.write_text(json.dumps(record | {"step": 2}))
    assert "checkpoint.json is not as saved: its content has the digest" in why()
    changed = {
        "schema_version is 3, this version reads 2": {"schema_version": 3},
        "optimizer = 'adamw': the checkpoint has 'sgd'": {"optimizer": "SGD"},
        "lacks positions.weight": {"tensors": without("positions.weight", tensors)},
        "lacks optimizer.step.embed.weight": {
            "numbers": without("optimizer.step.embed.weight", numbers)
        },
        "float32 [12], but the checkpoint's is float32 [9]": {
            "tensors": tensors | {"head.norm.weight": {"shape": [9], "dtype": "float32"}}
        },
        "model = 3": {"model": 3},
    }
    for expected, fields in changed.items():
        path.write_text(json.dumps(sealed(record | fields)))
        assert expected in why()


def late(ranks, plan, layout, folder):
    """Load where rank 0 sees a checkpoint at once, and the other a second later."""
    training, plan = prepared(ranks, plan, layout)
    path = pathlib.Path(folder if ranks.rank == 0 else f"{folder}-late")
    if ranks.rank:
        threading.Timer(1.0, path.symlink_to, (folder,)).start()
    return checkpoint.load(ranks, training, path, plan, seed=SEED)


def test_a_checkpoint_that_a_host_sees_late_is_loaded(call, saved):
    assert call(late, ZERO3, folder=str(saved)) == [1, 1]


def sealed(record):
    """A changed ``checkpoint.json`` that says it is as it was saved, if it can be read at all."""
    try:
        return msgspec.to_builtins(msgspec.convert(record, Checkpoint).sealed())
    except msgspec.ValidationError:
        return record


def test_damaged_files_are_refused_by_name(call, saved):
    def why():
        return call(refused, ZERO3, folder=str(saved))[0]

    data = json.loads((saved / "checkpoint.json").read_text())["data"]
    file = max((saved / data).iterdir())
    content = file.read_bytes()
    file.write_bytes(bytes(len(content)))
    assert f"{file.name}: bytes 0 to 8 (its header) are not as saved" in why()
    header = 8 + int.from_bytes(content[:8], "little")
    file.write_bytes(content[:header] + bytes(len(content) - header))
    assert f"{file.name}: bytes {header} to {len(content)} (" in why()
    file.write_bytes(content[:-1])
    assert f"{file.name} has {len(content) - 1} bytes of {len(content)}" in why()
    file.unlink()
    assert f"{file.name} is missing" in why()


def loaded(ranks, plan, layout, folders):
    """Of each folder: why it is not loaded, or nothing if it is."""
    training, plan = prepared(ranks, plan, layout)
    found = []
    for folder in folders:
        try:
            checkpoint.load(ranks, training, folder, plan, seed=SEED)
            found.append("")
        except ValueError as error:
            found.append(str(error))
    return found


def damages(content, draw):
    """Ways to damage a tensor of fp32 in a file, after which its size and header are as before."""
    header = 8 + int.from_bytes(content[:8], "little")
    told = json.loads(content[8:header])
    matrices = [one for name, one in told.items() if len(one.get("shape", ())) > 1]
    chosen = matrices[draw.integers(len(matrices))]
    first, last = (header + at for at in chosen["data_offsets"])
    whole = np.frombuffer(content, np.uint8)
    words = whole[first:last].view(np.uint32)
    rows = words.reshape(chosen["shape"][0], -1)
    row, other = draw.choice(len(rows), 2, replace=False) if len(rows) > 1 else (0, 0)
    some, half = int(draw.integers(len(words))), len(words) // 2
    both = slice(2 * half)
    least = np.abs(words.view(np.float32)).argmin()
    return {
        "a sign": lambda: words.__setitem__(some, words[some] ^ 2**31),
        "two signs": lambda: np.bitwise_xor.at(words, draw.choice(len(words), 2, False), 2**31),
        "all signs": lambda: words.__ixor__(np.uint32(2**31)),
        "a mantissa bit": lambda: words.__setitem__(some, words[some] ^ 2 ** draw.integers(23)),
        "mantissa bits": lambda: words.__ixor__(np.uint32(1)),
        "an exponent bit": lambda: words.__setitem__(some, words[some] ^ 2**23),
        "swapped numbers": lambda: words.__setitem__([some, least], words[[least, some]]),
        "swapped rows": lambda: rows.__setitem__([row, other], rows[[other, row]]),
        "swapped halves": lambda: words.__setitem__(both, np.roll(words[both], half)),
        "a rolled tensor": lambda: words.__setitem__(slice(None), np.roll(words, 1)),
        "reversed": lambda: words.__setitem__(slice(None), words[::-1].copy()),
        "a zeroed number": lambda: words.__setitem__(least, 0),
        "a zeroed page": lambda: whole.__setitem__(slice(first, first + 4096), 0),
        "a byte": lambda: whole.__setitem__(first + some, whole[first + some] ^ 1),
    }


def test_every_way_to_damage_a_checkpoint_is_seen(call, saved, tmp_path_factory):
    """Each by chance somewhere in a file; and in ``checkpoint.json``."""
    root, draw = tmp_path_factory.mktemp("damaged"), np.random.default_rng(0)
    data = json.loads((saved / "checkpoint.json").read_text())["data"]
    told = {}

    def copied(kind):
        folder = root / f"{len(told)}"
        shutil.copytree(saved, folder)
        told[str(folder)] = kind
        return folder

    for file in sorted((saved / data).iterdir()):
        content = file.read_bytes()
        for kind in damages(bytearray(content), draw):
            for _ in range(4):
                wrong = bytearray(content)
                damages(wrong, draw)[kind]()
                if wrong != content:  # two rows may be equal, a page zero
                    (copied(kind) / data / file.name).write_bytes(wrong)
        (copied("cut off") / data / file.name).write_bytes(content[:-8])
        (copied("too long") / data / file.name).write_bytes(content + bytes(8))
    files = sorted(file.name for file in (saved / data).iterdir())
    folder = copied("another's name")
    (folder / data / files[0]).write_bytes((saved / data / files[1]).read_bytes())
    record = json.loads((saved / "checkpoint.json").read_text())
    number = next(name for name in record["numbers"])
    for field, value in {
        "step": 2,
        "data": "step-1-00000000",
        "numbers": record["numbers"] | {number: 7},
        "layout": "dp1",
        "norms": {},
    }.items():
        (copied(field) / "checkpoint.json").write_text(json.dumps(record | {field: value}))
    assert len(told) > 80
    for folder, why in zip(told, call(loaded, ZERO3, folders=[*told])[0], strict=True):
        assert re.search("as saved|bytes of", why), (told[folder], why)
        with contextlib.suppress(ValueError):  # of checkpoint.json
            assert meshwise.show(folder).damage, told[folder]
    assert call(loaded, ZERO3, folders=[str(saved)])[0] == [""]


def read_alone(ranks, plan, layout, folder):
    """Why this rank cannot read its part, or nothing."""
    training, plan = prepared(ranks, plan, layout)
    record = checkpoint.checked(folder, plan, SEED)
    checkpoint._make_states(training.optimizer)
    try:
        checkpoint._read(pathlib.Path(folder), record, training)
    except ValueError as error:
        return str(error)
    return ""


def test_a_rank_verifies_what_it_reads_and_no_more(call, tmp_path):
    """Of a pipeline each rank has a file of its own; what is damaged in one the other never sees,
    but whoever shows the folder does."""
    call(run, PIPELINE, steps=[0], saves=[[str(tmp_path), 1]])
    record = commits.read(tmp_path / "checkpoint.json")
    file = tmp_path / record.data / "00001-000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    first, last = call(read_alone, PIPELINE, folder=str(tmp_path))
    assert first == "" and f"{file.name}: bytes" in last
    (found,) = meshwise.show(tmp_path).damage
    assert found.file == file.name and found.offset + found.bytes == len(content)


def into_held(ranks, plan, layout, folder):
    """Why a run does not begin to save."""
    with pytest.raises(ValueError) as caught, checkpoint.saving(ranks, folder):
        pass
    return str(caught.value)


def replaced(ranks, plan, layout, folder, other):
    """Save twice, and a third time after another run has saved into the same folder."""
    training, plan = prepared(ranks, plan, layout)
    with checkpoint.saving(ranks, folder) as into:
        for number in (1, 2):
            into(training, plan, step=number, seed=SEED)
        if ranks.rank == 0:
            shutil.copytree(other, folder, dirs_exist_ok=True)
        with pytest.raises(ValueError) as caught:
            into(training, plan, step=3, seed=SEED)
    return str(caught.value)


def test_two_runs_do_not_save_into_one_folder(call, saved, tmp_path_factory):
    held = commits.HeldFolder(saved)
    for why in call(into_held, ZERO3, folder=str(saved)):
        assert f"another run (process {os.getpid()} on " in why and str(saved) in why
    held.close()
    mine = tmp_path_factory.mktemp("mine")
    for why in call(replaced, ZERO3, folder=str(mine), other=str(saved)):
        assert "is not the one that this run wrote or found" in why
    found = meshwise.show(mine)  # the other's checkpoint stays, whole; what this run wrote went
    assert found.checkpoint.step == 1 and not found.damage
    assert not [*mine.glob("step-3-*")]


def test_a_checkpoint_of_version_1_is_read_and_said_to_have_no_hashes(call, saved):
    path = saved / "checkpoint.json"
    record = json.loads(path.read_text())
    sizes = {name: stored["bytes"] for name, stored in record["files"].items()}
    old = without("digest", record) | {"schema_version": 1, "files": sizes}
    path.write_text(json.dumps(old))
    found = call(run, TENSOR, steps=[1], source=str(saved), saves=[[str(saved), 2]])
    assert len(found[0]) == 1
    assert commits.read(path).note == ""
    path.write_text(json.dumps(old))
    assert "without hashes" in commits.read(path).note


@pytest.fixture
def order(saved, tmp_path, monkeypatch):
    """``meshwise run --dry-run`` going on with what is saved, with changes."""
    monkeypatch.chdir(tmp_path)

    def ordered(**changes):
        usual = {"global_batch_size": WORKLOAD.global_batch_size, "seq_len": WORKLOAD.seq_len}
        usual |= {"layout": ONE, "seed": SEED, "steps": 1, "warmup": 1, "resume_from": saved}
        return meshwise.run(model=MODEL, dry_run=True, **usual | changes)

    return ordered


def test_what_cannot_go_on_is_refused_before_any_process(order, saved, tmp_path):
    assert len(order()) == 1
    (tmp_path / "taken").touch()
    smaller = layout(microbatch_size=3)
    for message, changes in {
        "seed = 6: the checkpoint has 5": {"seed": 6},
        "workload.global_batch_size = 6: the checkpoint has 12": {
            "layout": smaller,
            "global_batch_size": 6,
        },
        "taken cannot be written": {"save": tmp_path / "taken"},
    }.items():
        with pytest.raises(ValueError, match=message):
            order(**changes)
    file = max((saved / json.loads((saved / "checkpoint.json").read_text())["data"]).iterdir())
    file.unlink()
    with pytest.raises(ValueError, match=f"{file.name} is missing"):
        order()


def test_the_tokens_of_the_steps_to_come_are_checked(order, tmp_path):
    """Of a file whose every window is bad but those of the first step: step 0 is behind us."""
    size, window = 1_000_000, WORKLOAD.seq_len + 1
    starts = np.random.default_rng((SEED, 0)).integers(
        size - WORKLOAD.seq_len, size=WORKLOAD.global_batch_size
    )
    behind = np.zeros(size, dtype=bool)
    for start in starts:
        behind[start : start + window] = True
    for name, bad in (("behind", behind), ("ahead", ~behind)):
        np.save(tmp_path / f"{name}.npy", np.where(bad, MODEL.vocab, 1).astype(np.uint16))
    order(data=tmp_path / "behind.npy")
    with pytest.raises(ValueError, match=f"holds token {MODEL.vocab}"):
        order(data=tmp_path / "ahead.npy")


def without(name, of):
    return {key: value for key, value in of.items() if key != name}


def killed(ranks, plan, layout, folder):
    """Go on from step 1, and die while step 2 is saved: one rank before all of its is written."""
    training, plan = prepared(ranks, plan, layout, seed=1)
    checkpoint.load(ranks, training, folder, plan, seed=SEED)
    trained(ranks, training, [1])
    write = checkpoint._write

    def write_some(*arguments):
        write(*arguments)
        os._exit(9)

    if ranks.rank == 1:
        checkpoint._write = write_some
    save(ranks, training, folder, plan, step=2, seed=SEED)


def test_a_killed_save_leaves_the_checkpoint_before(call, saved):
    before = read(saved)
    with pytest.raises((EOFError, AssertionError)):  # of rank 1, or what rank 0 says of it
        call(killed, ZERO3, folder=str(saved))
    assert len([*saved.iterdir()]) == 4  # the lock, the JSON, its data, what the killed save left
    assert equal(read(saved), before)
    call(run, ZERO3, steps=[1], source=str(saved), saves=[[str(saved), 2]])
    assert len([*saved.iterdir()]) == 3
    assert json.loads((saved / "checkpoint.json").read_text())["step"] == 2


def failing(ranks, plan, layout, folder):
    """What saves say that cannot be: a full disk, weights that are NaN, parts of a tensor."""
    training, plan = prepared(ranks, plan, layout)
    trained(ranks, training, [0])

    def why():
        with pytest.raises(ValueError) as caught:
            save(ranks, training, folder, plan, step=7, seed=SEED)
        return str(caught.value)

    write, found = checkpoint._write, []

    def full(*arguments):
        raise OSError(28, "No space left on device")

    if ranks.rank == 1:
        checkpoint._write = full
    found.append(why())
    checkpoint._write = write
    (stage,) = training.pipeline.stages.values()
    stage.module.register_buffer("share", torch.full((3,), 1.0 + ranks.rank))
    found.append(why())
    stage.module.share.fill_(torch.nan if ranks.rank == 1 else 1.0)
    found.append(why())
    return found


def test_what_cannot_be_saved_is_said_and_leaves_the_checkpoint_before(call, saved):
    before = sorted(saved.iterdir())
    for full, part, not_finite in call(failing, ZERO3, folder=str(saved)):
        assert "No space left on device" in full
        assert "share on rank 1 is not what another rank has" in part
        assert "share is not finite on rank 1" in not_finite
    assert sorted(saved.iterdir()) == before


OPTIMIZERS = {
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "stateless": functools.partial(torch.optim.SGD, lr=0.1),
    "amsgrad": functools.partial(torch.optim.AdamW, lr=0.1, amsgrad=True),
}


def with_states(ranks, plan, layout, folder, optimizer):
    """Whether any optimizer's states and a module's buffers come back, on every rank."""
    made = []
    for seed in (0, 1):
        training, its_plan = prepared(ranks, plan, layout, seed=seed)
        training = dataclasses.replace(
            training, optimizer=OPTIMIZERS[optimizer](training.parameters())
        )
        for stage in training.pipeline.stages.values():
            layer = next(iter(stage.module.layers.values()))
            layer.register_buffer("mean", torch.full((3,), 2.0 - seed))
            layer.register_buffer("seen", torch.tensor(2**40 - seed))
            layer.register_buffer("own", torch.tensor(float(seed)), persistent=False)
        if seed == 0:
            trained(ranks, training, range(2))
            save(ranks, training, folder, its_plan, step=2, seed=SEED)
        else:
            checkpoint.load(ranks, training, folder, its_plan, seed=SEED)
        buffers = {
            name: buffer
            for stage in training.pipeline.stages.values()
            for name, buffer in stage.module.named_buffers()
        }
        made.append((tensors_of(training), buffers, trained(ranks, training, [2, 3])))
    (one, buffers, losses), (other, loaded, its_losses) = made
    own = [name for name in buffers if name.endswith(".own")]
    same = equal(without(own[0], buffers), without(own[0], loaded))
    return [equal(one, other), same, loaded[own[0]].item(), losses == its_losses]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_states_of_any_optimizer_and_buffers_come_back(call, tmp_path, optimizer):
    for found in call(with_states, PIPELINE, folder=str(tmp_path), optimizer=optimizer):
        assert found == [True, True, 1.0, True]
