"""The least that runs, refits and suites need, against closed forms and machines of given sizes."""

import msgspec
import pytest

from meshwise import machine
from meshwise.options.run import RunOptions, Suite
from meshwise.spec import (
    Cluster,
    Device,
    Experts,
    Layout,
    Model,
    Plan,
    Recipe,
    Tier,
    Workload,
    stages_of,
)
from meshwise.verbs import memory, refit, run, suite

GiB = 2**30
H2 = 1024**2
SIZES = {"hidden": 1024, "heads": 8, "ffn": 1024, "vocab": 1024, "max_seq_len": 64}
MODEL = Model(
    name="moe-x", layers=4, **SIZES, experts=Experts(num_experts=8, top_k=2, ffn=1024, every=2)
)
# 4 h^2 of attention and 2 h^2 of each feed-forward, without biases and norms
TABLES, LAYER, ROUTED = H2 + 64 * 1024, 4 * H2 + 2 * H2, 4 * H2 + 8 * 2 * H2
WHOLE = TABLES + 2 * LAYER + 2 * ROUTED
DIVIDED = 2 * 8 * 2 * H2


def cluster(kind="cuda", memory_bytes=GiB, per_host=8, num_hosts=1, **more):
    device = Device(name=f"some {kind}", kind=kind, memory_bytes=memory_bytes)
    return Cluster(
        name="here", num_hosts=num_hosts, num_devices_per_host=per_host, device=device,
        tiers=(Tier(name="links", num_devices=num_hosts * per_host),), **more,
    )  # fmt: skip


def planned(layout, there=None, dtype="fp32", model=MODEL, **recipe):
    rows = layout.microbatch_rows * layout.num_microbatches
    return Plan(
        model=model, workload=Workload(global_batch_size=rows, seq_len=64), layout=layout,
        cluster=there or cluster(), dtype=dtype, lowering="eager", recipe=Recipe(**recipe),
        stages=stages_of(layout, model),
    )  # fmt: skip


def needed(mode="train", dtype="fp32", recipe=None, **layout):
    plan = planned(Layout(**layout), dtype=dtype, **(recipe or {}))
    return memory.needed(plan, RunOptions(mode=mode, new_tokens=36))


def near(count):
    return pytest.approx(count, rel=0.01)


def test_training_needs_weights_gradients_and_moments():
    """Each has 4 bytes, divided as ZeRO and ep say; and bf16 copies of them, whole below ZeRO 3."""

    def least(**of):
        devices, hosts = needed(**of)
        assert len(devices) == len(hosts) and not any(hosts)
        return devices[0]

    assert least() == near(16 * WHOLE)
    assert least(dtype="bf16") == near(18 * WHOLE)
    assert least(recipe={"optimizer": "sgd"}) == near(12 * WHOLE)
    assert least(recipe={"optimizer": "adafactor"}) == near(8 * WHOLE)
    assert least(recipe={"weights": "bf16"}, dtype="bf16") == near(8 * WHOLE)
    assert least(dp=4, zero=2, dtype="bf16") == near((16 / 4 + 2) * WHOLE)
    assert least(dp=4, zero=3, dtype="bf16") == near(16 / 4 * WHOLE)
    assert least(dp=4, replicas=2, zero=3) == near(16 / 2 * WHOLE)
    assert least(dp=4, ep=4) == near(16 * (WHOLE - DIVIDED) + 16 / 4 * DIVIDED)
    piped = {"pp": 2, "tp": 2, "schedule": "1f1b"}  # the first stage has the tables
    devices, _ = needed(**piped)
    assert devices == near([16 * (TABLES + LAYER + ROUTED) / 2] * 2 + [devices[2]] * 2)
    looped = {"pp": 2, "schedule": "interleaved_1f1b", "stages_per_rank": 2, "num_microbatches": 2}
    assert needed(**looped)[0] == near([16 * (TABLES + 2 * ROUTED), 16 * 2 * LAYER])


def test_inference_and_decoding_need_less_or_more():
    assert needed("infer", "bf16", dp=2, zero=3)[0] == near([WHOLE] * 2)
    (decoding,), _ = needed("decode", "bf16", microbatch_size=3)
    assert decoding == near(2 * WHOLE + 4 * 3 * (64 + 36) * 2 * 1024 * 2)
    _, (host,) = needed(recipe={"offload": True}, microbatch_size=2)
    assert host == 3 * 2 * 64 * 1024 * 4  # the inputs of all layers but the last
    piped = {"pp": 2, "schedule": "1f1b", "num_microbatches": 2}
    _, hosts = needed(recipe={"offload": True}, **piped)
    assert hosts == [64 * 1024 * 4, 0]  # two layers each; the second stage receives its input


def test_a_check_needs_the_whole_model_once_the_ranks_have_let_go(monkeypatch):
    plan, asked = planned(Layout(dp=4, zero=3), cluster("cpu")), RunOptions(check=True)
    assert memory.checked(plan) == near([16 * WHOLE, 0, 0, 0])
    monkeypatch.setattr(machine, "host_memory_bytes", lambda: int(16.5 * WHOLE))
    assert memory.shortage(plan, asked) == ""
    monkeypatch.setattr(machine, "host_memory_bytes", lambda: int(4.5 * WHOLE) * 3)
    assert "together need at least" in memory.shortage(plan, asked)
    on_gpus = planned(Layout(dp=4, zero=3), cluster(memory_bytes=int(15 * WHOLE)))
    assert memory.shortage(on_gpus, RunOptions()) == ""
    assert "rank 0 needs at least" in memory.shortage(on_gpus, asked)


def test_a_run_is_refused_before_any_process_starts(tmp_path, monkeypatch):
    """By device on GPUs, by host on CPUs, of which all ranks share the memory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("meshwise.launch.run", lambda *_, **__: pytest.fail("started"))
    layout = Layout(dp=2, zero=1)

    def refused(match, there, **recipe):
        with pytest.raises(ValueError, match=match):
            memory.check(planned(layout, there, **recipe), RunOptions())

    each = memory.needed(planned(layout), RunOptions())[0][0]
    enough = cluster(memory_bytes=int(each) + 1)
    memory.check(planned(layout, enough), RunOptions())
    reserved = msgspec.structs.replace(enough, reserved_bytes=2)
    said = r"moe-x dp2 zero1 mb1x1: rank 0 needs at least .* of device memory, and some cuda has"
    refused(rf"{said} .*; shard with zero 3", reserved)
    monkeypatch.setattr(machine, "host_memory_bytes", lambda: int(2 * each) + 1)
    cpus = cluster("cpu")
    memory.check(planned(layout, cpus), RunOptions())
    monkeypatch.setattr(machine, "host_memory_bytes", lambda: int(2 * each) - 1)
    said = "the ranks of a host together need at least .* of its memory, and here are"
    refused(said, cpus)
    monkeypatch.setattr(machine, "host_memory_bytes", lambda: 2**50)
    refused(said, cluster("cpu", memory_bytes=int(each / 4) - 1))
    monkeypatch.setattr(machine, "host_memory_bytes", lambda: int(2 * each) - 1)
    memory.check(planned(layout, cluster("cpu", per_host=1, num_hosts=2)), RunOptions())
    monkeypatch.setattr(machine, "host_memory_bytes", lambda: 1)
    memory.check(planned(layout, enough), RunOptions())
    refused(said, enough, offload=True)
    for mode in ("train", "infer", "decode"):
        with pytest.raises(ValueError, match=said):
            run.run(model=MODEL, cluster=stored(tmp_path, cpus), mode=mode, layout=Layout())


def stored(folder, there):
    from meshwise import store

    store.write(folder / "cluster.toml", there)
    return folder / "cluster.toml"


def test_refits_and_suites_pass_over_what_does_not_fit(tmp_path, monkeypatch):
    """The sizes of a scenario per rank; the others are measured all the same."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "host_memory_bytes", lambda: 1000)
    there = stored(tmp_path, cluster("cpu", per_host=4))
    monkeypatch.setattr("meshwise.launch.run", lambda *_, **__: pytest.fail("started"))
    monkeypatch.setattr("meshwise.verbs.world.check_machine", lambda *_: None)
    from meshwise import store

    run_dir = refit.refit(
        train={"tp": 2}, infer={"tp": 1}, cluster=there, method="gloo", output_dir=tmp_path
    )
    (sample,) = store.load(run_dir)[1]
    assert sample.status == "skipped"
    assert "of a host together need at least" in sample.reason and "1000 B" in sample.reason
    settings = Suite(cluster=there, nproc=1)
    for result in suite.run_suite("gpt.perf_test_fast_2d", settings):
        assert "use --scale-to-fit" in result.row["Metadata"]
