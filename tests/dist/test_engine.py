"""``frame.run_ranks`` from request to sample: metrics, check, token files, faults."""

import dataclasses
import math
import weakref
from pathlib import Path
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from meshwise import store
from meshwise.engine import check, data, step
from meshwise.engine.frame import RunRequest, run_ranks
from meshwise.engine.train import measure
from meshwise.options.run import Course
from meshwise.spec import Layout, Model, Sample, WideResNet, Workload
from tests.dist.matrix import by_aot

MODEL = Model(hidden=32, layers=2, heads=4, ffn=128, vocab=64, max_seq_len=16)
WORKLOAD = Workload(global_batch_size=4, seq_len=16)
SHARDED = Layout(dp=2, zero=3, microbatch_size=1, num_microbatches=2)
SPLIT = Layout(tp=2, microbatch_size=4)


@pytest.fixture
def request_of(plan_of, tmp_path):
    def build(layout=SHARDED, run_dir=tmp_path, of=(MODEL, WORKLOAD), lowering="eager", **changes):
        plan = plan_of(*of, layout, lowering=lowering)
        changes = {"steps": 3, "warmup": 1} | changes
        ordered = RunRequest(plan=plan, run_dir=str(run_dir), asked=Course(**changes))
        return msgspec.json.encode(ordered).decode()

    return build


def result(ranks, text):
    return msgspec.to_builtins(measure(ranks, msgspec.json.decode(text, type=RunRequest)))


def order(ranks, text):
    run_ranks(ranks, text.encode())


@pytest.mark.dist
def test_a_run_leaves_one_sample(gloo_ranks, request_of, plan_of, tmp_path):
    run_dir = store.create(
        tmp_path,
        verb="run",
        slug="t",
        cluster=plan_of(MODEL, WORKLOAD, SHARDED).cluster,
        world_size=2,
        command=("test",),
        provenance={},
    )
    gloo_ranks(2, order, text=request_of(run_dir=run_dir, check=True))
    _, samples, warnings = store.load(run_dir)
    assert not warnings
    (sample,) = samples
    assert (sample.status, sample.reason) == ("ok", "")
    assert sample.case.op.layout == SHARDED
    assert len(sample.times_s) == 3
    assert len(sample.rank_times_s) == 2
    assert sample.times_s == tuple(map(max, *sample.rank_times_s))
    assert [state.rank for state in sample.before] == [0, 1]
    metrics = sample.metrics
    assert metrics["num_parameters"] == sum(
        [2 * (12 * 32**2 + 13 * 32), 64 * 32, 16 * 32, 2 * 32]  # layers, embedding, positions, norm
    )
    assert metrics["check_loss_error"] <= 1e-5
    assert len(metrics["losses"]) == 5  # one of set-up, one untimed, three timed
    assert metrics["tokens_per_s"] == pytest.approx(4 * 16 / sorted(sample.times_s)[1])
    fp32_state = 4 * metrics["num_parameters"] / 2 * 3  # this rank's parameters and two moments
    assert fp32_state < metrics["peak_bytes"] < 10 * fp32_state
    assert "reserved_bytes" not in metrics


def losses(ranks, text):
    return result(ranks, text)["metrics"]["losses"]


@pytest.mark.dist
def test_layouts_see_the_same_data(gloo_ranks, request_of):
    texts = [
        request_of(layout, seed=7) for layout in (SHARDED, SPLIT, Layout(dp=2, microbatch_size=2))
    ]
    first, *others = [gloo_ranks(2, losses, text=text)[0] for text in texts]
    for other in others:
        assert other == pytest.approx(first, rel=1e-5)
    assert first == gloo_ranks(2, losses, text=texts[0])[1]  # both ranks report the mean


def losses_compiled(ranks, text):
    with mock.patch.object(nn.Module, "compile", by_aot):
        return losses(ranks, text)


@pytest.mark.dist
@pytest.mark.parametrize(
    "layout", [Layout(dp=2, microbatch_size=2), Layout(cp=2, microbatch_size=4)]
)
def test_timed_steps_of_compiled_layers_train_as_others(gloo_ranks, request_of, layout):
    (eager, _), (compiled, _) = (
        gloo_ranks(2, function, text=request_of(layout, lowering=lowering))
        for function, lowering in ((losses, "eager"), (losses_compiled, "compiled"))
    )
    assert compiled == pytest.approx(eager, rel=1e-5)


def wrong_check(ranks, text):
    """One device learns ten times as fast as the plan."""
    prepare_alone = step.prepare_alone

    def altered(*arguments, **options):
        training = prepare_alone(*arguments, **options)
        for group in training.optimizer.param_groups:
            group["lr"] *= 10
        return training

    step.prepare_alone = altered
    try:
        return result(ranks, text)
    finally:
        step.prepare_alone = prepare_alone


@pytest.mark.dist
def test_a_wrong_plan_fails_its_check(gloo_ranks, request_of):
    text = request_of(check=True)
    for sample in gloo_ranks(2, wrong_check, text=text):
        assert sample["status"] == "error"
        assert "its losses differ from those of one device" in sample["reason"]
        assert sample["metrics"]["check_loss_error"] > check.TOLERANCE["cpu"]
        assert len(sample["times_s"]) == 3


@pytest.mark.dist
def test_kinks_of_images_do_not_fail_the_check(gloo_ranks, request_of):
    images = WideResNet(channels=16, image_size=32, num_classes=10)
    of = images, Workload(global_batch_size=8, seq_len=1)
    text = request_of(Layout(dp=2, microbatch_size=4), of=of, check=True)
    assert gloo_ranks(2, result, text=text)[0]["metrics"]["check_loss_error"] < 1e-6


def nan_alone(ranks, text):
    """The losses of one device are not finite; the sample as rank 0 would write it."""
    run, prepare_alone = step.run, step.prepare_alone

    def altered(*arguments, **options):
        step.run = lambda training, index: torch.tensor(float("nan"))
        return prepare_alone(*arguments, **options)

    step.prepare_alone = altered
    try:
        return msgspec.json.encode(result(ranks, text)).decode()
    finally:
        step.run, step.prepare_alone = run, prepare_alone


@pytest.mark.dist
def test_a_check_that_is_not_finite_is_a_sample_that_can_be_read(gloo_ranks, request_of):
    for text in gloo_ranks(2, nan_alone, text=request_of(check=True)):
        sample = msgspec.json.decode(text, type=Sample)
        assert sample.status == "error"
        assert "differ from those of one device by nan" in sample.reason
        assert "check_loss_error" not in sample.metrics


def faulty(ranks, text, failing_ranks, kind):
    """Train with a step that fails at index 2 on some ranks."""
    run = step.run

    def failing(training, index):
        if index == 2 and ranks.rank in failing_ranks:
            if kind == "cuda":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            if kind == "cpu":
                torch.empty(2**60, dtype=torch.uint8)
            run(training, index)
            return torch.tensor(float("nan"))
        return run(training, index)

    step.run = failing
    try:
        return result(ranks, text)
    finally:
        step.run = run


@pytest.mark.dist
@pytest.mark.parametrize(("failing", "kind"), [([0, 1], "cuda"), ([1], "cpu")])
def test_memory_that_runs_out_is_a_sample(gloo_ranks, request_of, failing, kind):
    """Also when one rank alone lacks it and the other waits for that rank in a collective."""
    text = request_of()
    found = gloo_ranks(2, faulty, text=text, failing_ranks=failing, kind=kind)
    assert found[0] == found[1]
    assert found[0]["status"] == "oom"
    assert "timed steps, step 2: " in found[0]["reason"]
    assert "memory" in found[0]["reason"]
    assert not found[0]["times_s"]
    if failing == [1]:
        assert found[0]["reason"].startswith("rank 1, ")
        gloo_ranks.end(2)  # the collective that timed out broke their group
    else:
        assert len(gloo_ranks(2, losses, text=text)[0]) == 5  # they go on with the next plan


@pytest.mark.dist
def test_a_loss_that_is_not_finite_names_its_step(gloo_ranks, request_of):
    text = request_of()
    for sample in gloo_ranks(2, faulty, text=text, failing_ranks=[1], kind="nan"):
        assert (sample["status"], sample["reason"]) == ("error", "the loss is nan at step 2")
        assert len(sample["metrics"]["losses"]) == 2


def spoiled(ranks, text, rank, at):
    """The sample, and how many steps this rank began, when the loss of one rank is nan from the
    step ``at`` on."""
    prepare, run, begun = step.prepare, step.run, []

    def prepared(*arguments, **options):
        training = prepare(*arguments, **options)

        def loss(logits, labels):
            value = training.loss(logits, labels)
            return value * math.nan if ranks.rank == rank and len(begun) > at else value

        return dataclasses.replace(training, loss=loss)

    def counted(training, index, *rest):
        begun.append(index)
        return run(training, index, *rest)

    with mock.patch.multiple(step, prepare=prepared, run=counted):
        return result(ranks, text), len(begun)


OF_ONE_RANK = {
    "dp2": (Layout(dp=2, microbatch_size=2), 1),
    "fsdp2": (SHARDED, 0),
    "pp2": (Layout(pp=2, schedule="1f1b", microbatch_size=2, num_microbatches=2), 1),
    "tp2": (SPLIT, 1),
}


@pytest.mark.dist
@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("name", OF_ONE_RANK)
def test_all_ranks_stop_behind_a_loss_that_is_not_finite(gloo_ranks, request_of, name, clip):
    """Only one rank has it. Without that they would go on to the last of eight steps."""
    layout, rank = OF_ONE_RANK[name]
    asked = msgspec.json.decode(request_of(layout, steps=6, save=None))
    asked["plan"]["recipe"]["max_grad_norm"] = clip
    text = msgspec.json.encode(asked).decode()
    for at in (0, 3):  # in the warm-up, and in a timed step
        found = gloo_ranks(2, spoiled, text=text, rank=rank, at=at)
        assert {begun for _, begun in found} == {at + 1}
        for sample, _ in found:
            assert (sample["status"], sample["reason"]) == (
                "error",
                f"the loss is nan at step {at}",
            )
            assert len(sample["metrics"]["losses"]) == at


@pytest.mark.dist
def test_a_checkpoint_from_before_a_nan_stays(gloo_ranks, request_of, tmp_path):
    text = request_of(save=str(tmp_path / "kept"), save_every=1)
    gloo_ranks(2, spoiled, text=text, rank=1, at=2)
    assert store.read(tmp_path / "kept" / "checkpoint.json", dict)["step"] == 2


def search(ranks, text):
    """How many trainings of before are still there whenever one is made."""
    prepare, made, alive = step.prepare, [], []

    def watched(*arguments, **options):
        alive.append(sum(training() is not None for training in made))
        training = prepare(*arguments, **options)
        made.append(weakref.ref(training))
        return training

    step.prepare = watched
    try:
        sample = faulty(ranks, text, [0, 1], "nan")
    finally:
        step.prepare = prepare
    return sample["reason"], alive


@pytest.mark.dist
def test_the_search_for_the_first_nan_has_the_memory_for_itself(gloo_ranks, request_of):
    """The fault of this test is in no module, so the search finds none."""
    for reason, alive in gloo_ranks(2, search, text=request_of(find_nonfinite=True)):
        assert reason == "the loss is nan at step 2; the second time all was finite"
        assert alive == [0, 0]


def test_rows_of_all_ranks_make_the_global_batch():
    layout = Layout(dp=2, tp=2, microbatch_size=1, num_microbatches=2)
    everything = batches(slice(None)).inputs
    for rank in range(4):
        mine = batches(step.rows(layout, rank)).inputs
        assert np.array_equal(mine, everything[:, [0, 2] if rank < 2 else [1, 3]])
    assert everything.shape == (2, 4, 16)
    assert not np.array_equal(everything[0], everything[1])
    assert everything.min() >= 0 and everything.max() < 64


def test_rows_of_an_uneven_pipeline():
    layout = Layout(
        pp=2, schedule="1f1b", meshes=((1, 1), (2, 1)), microbatch_size=2, num_microbatches=2
    )
    found = [step.rows(layout, rank).tolist() for rank in range(3)]
    assert found == [[0, 1, 2, 3], [0, 2], [1, 3]]


def batches(rows, file=None):
    file = None if file is None else str(file)
    model = Model(hidden=4, layers=1, heads=1, ffn=4, vocab=64)
    return data.batches(model, WORKLOAD, steps=2, seed=0, file=file, rows=rows)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("t.bin", np.uint16), ("t.uint32.bin", np.uint32), ("t.npy", np.int64)],
)
def test_token_files_yield_windows(tmp_path, name, dtype):
    tokens = (np.arange(500) * 7 % 64).astype(dtype)
    file = tmp_path / name
    np.save(file, tokens) if name.endswith(".npy") else tokens.tofile(file)
    found, following = batches(slice(None), file)
    assert found.dtype == np.int64
    assert np.all(np.diff(found) % 64 == 7)  # neighbours in the file are neighbours here
    assert np.all((following - found) % 64 == 7)
    assert len(np.unique(found[:, :, 0])) > 1


def written(folder: Path, name: str, tokens: np.ndarray) -> str:
    file = folder / name
    np.save(file, tokens) if name.endswith(".npy") else tokens.tofile(file)
    return str(file)


def test_bad_token_files_are_named_with_the_fix(tmp_path):
    few = written(tmp_path, "few.bin", np.zeros(16, np.uint16))
    large = written(tmp_path, "large.bin", np.full(100, 64, np.uint16))
    negative = written(tmp_path, "negative.npy", np.full(100, -1))
    floats = written(tmp_path, "floats.npy", np.zeros(100))
    odd = written(tmp_path, "odd.bin", np.zeros(101, np.uint8))
    text = written(tmp_path, "text.npy", np.zeros(0, np.uint8))
    Path(text).write_text("no array")
    for file, words in [
        (str(tmp_path / "none.bin"), "no such file; name a .bin or .npy file"),
        (few, "holds 16 tokens, but one sequence needs 17; use a longer file"),
        (large, "holds token 64, but the model's vocab is 64; use a file of its tokenizer"),
        (negative, "holds token -1"),
        (floats, "holds float64 of shape (100,); write a one-dimensional integer array"),
        (odd, "is 101 bytes"),
        (text, "is not an array"),
        (written(tmp_path, "tokens.txt", np.zeros(9)), "ends in '.txt'; name a .bin or .npy"),
    ]:
        with pytest.raises(ValueError) as caught:
            batches(slice(None), file)
        assert words in str(caught.value)
        assert file in str(caught.value)
