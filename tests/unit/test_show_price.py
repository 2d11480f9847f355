"""show price: operations, their prices and what these rest on."""

import json
from pathlib import Path

import msgspec
import pytest

import meshwise
from meshwise.cli import app
from meshwise.models import block_tasks
from meshwise.pages import show
from meshwise.prices import Prices
from meshwise.verbs import price as verb
from tests import sample_records as known

LOGS = Path(__file__).resolve().parents[1] / "data" / "nccl_tests_a100x8"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def shown(words, capsys):
    with pytest.raises(SystemExit) as ended:
        app.main(["show", "price", *words.split()])
    return ended.value.code, capsys.readouterr()


def test_logs_of_others_become_prices_and_a_plan(capsys):
    """NCCL's logs of 8 A100, on the data sheet of their host; what they lack is the sheet's."""
    from meshwise.verbs.imports import import_files

    run_dirs = import_files(tuple(LOGS.glob("*.log")), cluster="dgx-a100-80gb", runs="runs")
    with pytest.raises(ValueError, match=r"name their runs: meshwise calibrate runs/\*-meas"):
        meshwise.calibrate()
    costs = meshwise.calibrate(tuple(run_dirs))
    assert len(costs.curves) == 12 and not any(curve.held_out.noisy for curve in costs.curves)
    code, said = shown("all_reduce 64MiB --group 8 --dtype fp32 --regime pipelined --json", capsys)
    (found,) = json.loads(said.out)
    assert code == 0 and found["tier"] == "transferred"  # torch's own calls were not measured
    assert found["time_s"] == pytest.approx(582e-6, rel=0.01)  # the log's
    assert found["rests_on"].startswith("a similar operation: cubic at 64.0 MiB and ")
    assert found["rests_on"].endswith(", of 6 runs")
    assert found["low_s"] < 0.8 * found["time_s"] < 1.2 * found["time_s"] < found["high_s"]
    assert "nccl stands in" in " ".join(found["notes"])
    plan = meshwise.plan("gpt-2.6b", gpus=8, costs="costs.json")
    assert plan.prediction.tier == "datasheet" and plan.dtype == "bf16"
    told = plan.prediction  # CUDA and NCCL take memory of which an allocator does not know
    assert costs.memory_overhead_bytes == 2 * 2**30
    assert told.allocated_bytes == tuple(
        of - 2 * 2**30
        for of in (told.peak_memory_bytes, told.memory_low_bytes, told.memory_high_bytes)
    )


def test_each_kind_of_work(capsys):
    from meshwise import store

    store.write("costs.json", known.COSTS)
    for words, named in {
        "copy 1GiB": "copy",
        "gemm 4096,4096,4096": "gemm bf16 nt",
        "attention 2,1024,16,64 --direction backward": "attention",
        "layer --model gpt-125m --tp 2": "layer",
    }.items():
        code, said = shown(f"{words} --json", capsys)
        assert code == 0, said.err
        (found,) = json.loads(said.out)
        assert found["name"].startswith(named)
        assert 0 <= found["low_s"] <= found["time_s"] <= found["high_s"]
    gathered, scattered = verb.price(what="unit", model="gpt-125m", group=2, dtype="bf16")
    assert gathered.op.size_bytes == 2 * 7_087_872  # GPT-125M: a layer's parameters
    assert scattered.op.size_bytes == 2 * gathered.op.size_bytes  # fp32 gradients


def test_whatever_is_measured_can_be_asked(capsys):
    """Reductions other than sum, roots, whole numbers, experts' products and convolutions."""
    from meshwise import store
    from meshwise.prices import unmeasured
    from meshwise.spec import Cluster
    from meshwise.verbs import files

    store.write("costs.json", unmeasured(files.take("h100-hgx", Cluster)))
    (largest,) = verb.price(what="all_reduce", size="1MiB", dtype="int8", op="max")
    assert (largest.op.redop, largest.op.dtype) == ("max", "int8")
    (sent,) = verb.price(what="broadcast", size="1MiB", root=1)
    assert sent.op.root == 1
    (grouped,) = verb.price(what="gemm", shape="4096,512,512", groups=8)
    assert grouped.op.groups == 8
    back = verb.price(what="conv", shape="32,64,64,56,56,3,1", direction="backward")
    assert [price.op.product for price in back] == ["dgrad", "wgrad"]
    assert all(price.op.flops == 2 * 32 * 64 * 64 * 56 * 56 * 9 for price in back)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("all_redduce 1MiB", "error: what = 'all_redduce': must be one of all_reduce"),
        ("all_reduce", "error: size: all_reduce needs one, as 64MiB"),
        ("gemm", "error: shape: gemm needs one, as M,N,K"),
        ("gemm 4096,4096", "error: shape = '4096,4096': must be M,N,K, whole numbers"),
        ("layer", "error: model: layer needs one, as gpt-2.6b"),
        ("all_to_all_v", "error: splits: all_to_all_v needs them: --splits FILE"),
        ("gemm ²,1,1", "error: shape = '²,1,1': must be M,N,K, whole numbers"),
        ("layer --model gpt-2.6b --tp 3", "error: --tp = 3: must divide"),
        ("unit --model gpt-2.6b --tp 3", "error: --tp = 3: must divide"),
        ("copy 1MiB --dtype fp8", "error: --dtype: the price of copy does not depend on it"),
        ("layer --model gpt-2.6b --regime graph", "error: --regime: the price of layer does not"),
        ("layer --model gpt-2.6b --seq-len 0", "error: --seq-len = 0: must be >= 1"),
        ("layer --model gpt-2.6b --dtype fp8", "error: --dtype = 'fp8': is priced and measured of"),
        ("gemm 8,8,8 --dtype fp8", "gemm fp8 nt tensor cold; measure it: meshwise measure gemm --"),
        ("gemm 8,8,8 --dtype int8", "error: --dtype = 'int8': only collectives have it"),
        ("all_gather 1MiB --op max", "error: --op: the price of all_gather does not depend on it"),
        ("broadcast 1MiB --root 4", "error: --root = 4: must be < 2 ranks"),
        ("conv 8,8,8", "error: shape = '8,8,8': must be BATCH,IN,OUT,HEIGHT,WIDTH,KERNEL,STRIDE"),
    ],
)
def test_what_is_missing_is_named(words, message, capsys):
    from meshwise import store

    store.write("costs.json", known.COSTS)
    code, said = shown(words, capsys)
    assert code == 2 and message in said.err


def test_an_uneven_all_to_all_costs_what_its_busiest_rank_does(capsys):
    from meshwise import store

    store.write("costs.json", known.COSTS)
    splits = [[0, 2**20], [2**10, 0]]
    (found,) = verb.price(what="all_to_all_v", splits=splits)
    assert found.op.size_bytes == 2**20 and found.op.group_size == 2


@pytest.mark.parametrize(
    "splits", [[[0, -1], [1, 0]], [[0, 1.5], [1, 0]], [], 5, [[0, 1, 2], [1, 0]]]
)
def test_splits_that_are_none_are_refused_by_name(splits):
    from meshwise import store

    store.write("costs.json", known.COSTS)
    with pytest.raises(ValueError, match=r"^splits"):
        verb.price(what="all_to_all_v", splits=splits)


def test_a_log_s_own_price_is_exact(capsys):
    """A row costs what the log says, if it is asked for as it was timed."""
    from meshwise.verbs.imports import import_files

    (run_dir,) = import_files(LOGS / "nccl_allreduce.log", cluster="dgx-a100-80gb", runs="runs")
    costs = meshwise.calibrate(run_dir)
    words = "all_reduce 64MiB --group 8 --dtype fp32 --regime pipelined --backend nccl"
    (found,) = json.loads(shown(f"{words} --json", capsys)[1].out)
    assert found["tier"] == "measured" and found["time_s"] in costs.curves[1].time_s
    (out,) = json.loads(shown(f"{words} --in-place no --json", capsys)[1].out)
    assert out["time_s"] in costs.curves[0].time_s


def test_a_layer_of_which_nothing_was_measured_has_a_wide_interval(capsys):
    """Operations of one data sheet are off together: a root of squares over all would say 6 %."""
    from meshwise import store
    from meshwise.prices import unmeasured
    from meshwise.spec import Cluster
    from meshwise.verbs import files

    store.write("costs.json", unmeasured(files.take("h100-hgx", Cluster)))
    (found, *_) = verb.price(what="layer", model="wresnet-1b")
    assert found.high_s > 1.2 * found.time_s and found.low_s < found.time_s / 1.2
    assert "measured" not in found.rests_on


def test_a_cluster_that_was_never_measured_has_its_data_sheet_s_prices(capsys):
    """NVLink moves 450 GB/s each way; a host's network eight times 50."""
    times_s = {}
    for group in (8, 64):
        words = f"all_gather 1GiB --group {group} --cluster h100-hgx --hosts 8 --json"
        code, said = shown(words, capsys)
        (found,) = json.loads(said.out)
        assert (code, found["tier"]) == (0, "datasheet")
        times_s[group] = found["time_s"]
    assert 1 < times_s[8] / (7 / 8 * 2**30 / 450e9) < 1.6
    assert 1 < times_s[64] / (63 / 64 * 2**30 / 400e9) < 1.6
    code, said = shown("all_gather 1GiB", capsys)
    assert code == 2 and "or go by data sheets with --cluster (a file, or h100-hgx)" in said.err


def test_work_on_no_bytes_takes_no_time():
    from meshwise import store

    store.write("costs.json", known.COSTS)
    for what in ("all_reduce", "adamw", "copy"):
        (found,) = verb.price(what, "0")
        assert (found.low_s, found.time_s, found.high_s) == (0, 0, 0)
        assert found.rests_on == "no bytes"


def test_a_layer_of_any_host_and_ratio_has_a_price():
    """A damaged costs.json may hold hosts whose fourth powers overflow."""
    (factor, *_) = known.COSTS.factors
    off = msgspec.structs.replace(factor, host_s=(1e200,) * len(factor.ratio))
    prices = Prices(msgspec.structs.replace(known.COSTS, factors=(off,)))
    ratio, _ = prices.factor(factor.like, block_tasks(factor.like))
    assert ratio > 1e190


def test_what_an_interval_is_of_is_said_of_the_tiers_shown(capsys):
    from meshwise import store

    store.write("costs.json", known.COSTS)
    for words in ("all_reduce 8MiB --group 4", "all_reduce 3MiB --group 4"):
        tier = json.loads(shown(f"{words} --json", capsys)[1].out)[0]["tier"]
        said = shown(words, capsys)[1].out
        assert [of for of in show.WITHIN if f"{of}: {show.WITHIN[of]}." in said] == [tier]
