"""``detect`` measures the links between ranks, and plans take its rates."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import meshwise
from meshwise import store
from meshwise.probe.tiers import rings
from meshwise.spec import Cluster, Layout, Tier
from meshwise.verbs import files, forecast
from tests import sample_records as known
from tests.pace import paced

pytestmark = pytest.mark.dist
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")


def detect(folder: Path, *words: str, launcher: tuple[str, ...] = ()) -> Tier:
    """Run detect; return the only tier that it wrote."""
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "meshwise", "detect", *words],
        cwd=folder, env=ENVIRONMENT, capture_output=True, text=True,
        timeout=paced(180),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (tier,) = store.read(folder / "cluster.toml", Cluster).tiers
    return tier


@pytest.mark.parametrize(
    ("words", "launcher"),
    [((), TORCHRUN), (("--measure", "--nproc", "2"), ())],
    ids=["torchrun", "alone"],
)
def test_ranks_measure_their_links_and_plans_take_the_rate(tmp_path, words, launcher):
    tier = detect(tmp_path, *words, launcher=launcher)
    assert (tier.num_devices, tier.source, tier.sheet_bytes_per_s) == (2, "measured", None)
    assert 1e6 < tier.bytes_per_s < 1e12
    assert 1e-7 < tier.latency_s < 1
    found = store.read(tmp_path / "cluster.toml", Cluster)
    assert forecast.links(found).rates.rank_bytes_per_s == tier.bytes_per_s
    # the same links between GPUs, whose data sheet prices the rest of the step
    shipped = files.take("h200-hgx", Cluster)
    there = msgspec.structs.replace(shipped, num_devices_per_host=2, num_hosts=1)
    step_s = []
    for links in (tier, *shipped.tiers[:1]):
        links = msgspec.structs.replace(links, num_devices=2)
        file = store.write(tmp_path / "gpus.toml", msgspec.structs.replace(there, tiers=(links,)))
        plan = meshwise.plan("gpt-125m", cluster=file, layout=Layout(tp=2, microbatch_size=8),
                             global_batch_size=8, seq_len=1024,
                             out=tmp_path / "plan.json")  # fmt: skip
        step_s.append(plan.prediction.step_time_s)
    # each layer sums its stream over both ranks twice forward and twice backward
    sent = 12 * 4 * 8 * 1024 * 768 * 2  # bytes
    assert step_s[0] - step_s[1] > 0.9 * sent * (1 / tier.bytes_per_s - 1 / 450e9)


@pytest.mark.parametrize(
    ("words", "launcher"), [(("--no-measure",), TORCHRUN), ((), ())], ids=["torchrun", "alone"]
)
def test_who_only_looks_starts_no_ranks_and_measures_nothing(tmp_path, words, launcher):
    tier = detect(tmp_path, *words, launcher=launcher)
    assert (tier.bytes_per_s, tier.latency_s, tier.source) == (None, None, "")


def test_messages_cross_each_tier_between_all_devices_of_it():
    def of(hosts: int, per_host: int, *reaches: int) -> list[tuple[str, int, int]]:
        tiers = tuple(Tier(name=f"{reach}", num_devices=reach) for reach in reaches)
        cluster = msgspec.structs.replace(
            known.CLUSTER, num_hosts=hosts, num_devices_per_host=per_host, tiers=tiers
        )
        return [(tier.name, size, stride) for tier, size, stride in rings(cluster)]

    assert of(2, 8, 8, 16) == [("8", 8, 1), ("16", 2, 8)]
    assert of(1, 8, 4, 8) == [("4", 4, 1), ("8", 2, 4)]
    assert of(2, 1, 1, 2) == [("2", 2, 1)]
    assert of(1, 4, 3, 4) == []  # no whole rings


def test_ranks_meet_where_the_command_says(tmp_path):
    """No host has the address in the variables; that on the command line goes before it."""
    with socket.create_server(("127.0.0.1", 0)) as spare:
        port = str(spare.getsockname()[1])
    given = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.1"}
    words = (
        "detect",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        port,
        "--setup-timeout",
        "90s",
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "meshwise", *words], cwd=tmp_path, stderr=subprocess.PIPE,
            env=ENVIRONMENT | given | {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": "1"},
        )
        for rank in "01"
    ]  # fmt: skip
    told = [process.communicate(timeout=paced(180))[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], told
    assert store.read(tmp_path / "cluster.toml", Cluster).tiers[0].source == "measured"
