"""Plans with SGD and Adafactor: their operations counted by hand, and priced."""

from collections import Counter

import msgspec
import pytest

import meshwise
from meshwise import models
from meshwise.models import optimizer
from meshwise.models.optimizer import OwnPart
from meshwise.prices import Prices, unmeasured
from meshwise.spec import Cluster, Collective, Elementwise, Layout, Model, Recipe
from meshwise.spec.costs import Curve, HeldOut, Law
from meshwise.verbs import files

TINY = Model(hidden=16, layers=2, heads=2, ffn=32, vocab=64, max_seq_len=8)
SGD, ADAFACTOR = Recipe(optimizer="sgd"), Recipe(optimizer="adafactor")


def tasks(recipe, layout=None):
    """The optimizer's operations, each with how often it runs."""
    layout = layout or Layout()
    program = models.program_of(models.graph(TINY, 1, 8, "bf16"), layout, "bf16", recipe=recipe)
    times = {loop.start: loop.times for loop in program.loops}
    ops = [(at, task.op) for at, task in enumerate(program.tasks) if task.phase == "optimizer"]
    return program, [(op, times.get(at, 1)) for at, op in ops]


def test_sgd_moves_its_passes():
    """Four passes over float32 elements read 7 and write 4; weight decay reads 2 and writes 1."""
    count = models.num_parameters(TINY)
    for decay, each in ((0.0, 44), (0.1, 56)):
        recipe = msgspec.structs.replace(SGD, weight_decay=decay)
        program, found = tasks(recipe)
        ((op, times),) = [(op, n) for op, n in found if op.kind == "sgd"]
        assert (op.bytes, times) == (each * count, 1)
        assert program.resident_bytes["optimizer state"] == 4 * count
        assert program.scratch_bytes == (4 * count if decay else 0)


def test_adafactor_keeps_rows_and_columns():
    program, found = tasks(ADAFACTOR)
    ffn, heads = 2 * (16 + 32), (48 + 16) + (16 + 16)
    vectors = 4 * 16 + 48 + 16 + 32 + 16  # norms and biases
    kept = 2 * (ffn + heads + vectors) + (64 + 16) + (8 + 16) + 2 * 16  # embeddings, last norm
    assert program.resident_bytes["optimizer state"] == 4 * kept
    assert program.scratch_bytes == 3 * 4 * 64 * 16
    moved = sum(op.bytes * times for op, times in found if op.kind == "adafactor")
    assert moved == pytest.approx(104 * models.num_parameters(TINY), rel=0.1)
    launches = sum(times for op, times in found if op.kind == "adafactor")
    assert launches == optimizer.KERNELS * (2 * 12 + 4)


def test_adafactor_sums_over_what_cuts_a_parameter():
    """FSDP2 cuts rows: norms of weight and update, then the columns and the mean of the rows."""
    sums = Counter()
    for op, times in tasks(ADAFACTOR, Layout(dp=4, zero=3))[1]:
        if isinstance(op, Collective):
            assert (op.kind, op.group_size, op.group_stride) == ("all_reduce", 4, 1)
            sums[op.size_bytes] += times
    matrices = {16: 2 * 3 + 2, 32: 2}  # by their columns
    vectors = 2 * 8 + 2
    assert sums[4] == 3 * sum(matrices.values()) + 2 * vectors
    assert {size: sums[4 * size] for size in matrices} == matrices
    assert not any(isinstance(op, Collective) for op, _ in tasks(ADAFACTOR, Layout(dp=4))[1])


def test_a_cut_of_columns_splits_the_rows_means():
    share = OwnPart((8, 4), ((1, 2, 1),))
    found = [task.op for task, _ in optimizer.update(ADAFACTOR, {share: 1})]
    sizes = sorted(op.size_bytes for op in found if isinstance(op, Collective))
    assert sizes == [4, 4, 4 * 8]


def test_another_optimizer_is_planned_for(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    of = {"cluster": "h100-hgx", "hosts": 1, "layout": '{"dp": 8}'}
    told = {
        name: meshwise.plan("gpt-1.3b", recipe=f'{{"optimizer": "{name}"}}', **of).prediction
        for name in ("adamw", "sgd", "adafactor")
    }
    state = {
        name: sum(part.value for part in of.memory_parts if part.name == "optimizer state")
        for name, of in told.items()
    }
    assert state["sgd"] == state["adamw"] / 2 and state["adafactor"] < state["adamw"] / 100
    update = {
        name: next(part.value for part in of.time_parts if part.name == "optimizer")
        for name, of in told.items()
    }
    assert update["adamw"] < update["sgd"] < update["adafactor"]
    assert {of.tier for of in told.values()} == {"datasheet"}


def test_sgd_is_priced_by_adamws_curve():
    one = {"held_out": HeldOut(median=0.0, p90=0.1, num_points=3)}
    curve = Curve(
        like=Elementwise(kind="adamw", read_bytes=16, write_bytes=12), regime="cold",
        law="lines", laws={"lines": Law(**one)}, x_bytes=(2.0**20, 2.0**30),
        time_s=(1e-5, 1e-2), end_s_per_byte=1e-11, end_range_s_per_byte=(1e-11, 1e-11),
        beyond=one["held_out"], runs=("x",),
    )  # fmt: skip
    costs = unmeasured(files.take("h100-hgx", Cluster))
    prices = Prices(msgspec.structs.replace(costs, curves=(curve,)))
    sgd, adamw = (
        prices.estimate(Elementwise(kind=kind, read_bytes=2**26, write_bytes=2**26))
        for kind in ("sgd", "adamw")
    )
    assert sgd.time_s == adamw.time_s and sgd.error == pytest.approx(adamw.error + 0.35)
    assert sgd.source == "transferred" and "adamw" in sgd.note
