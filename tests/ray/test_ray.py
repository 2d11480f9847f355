"""Commands on a Ray of three raylets on this host: a head without CPUs, and two with four each.

``make test-ray`` installs Ray and runs this; it is not part of ``make test``.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from meshwise import store
from meshwise.spec import Layout, Model, Workload
from tests.dist.conftest import _plan
from tests.listening import listens_of
from tests.pace import paced

ROOT = Path(__file__).resolve().parents[2]
ON_LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's switch for addresses of loopback alone
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_register_timeout_seconds": "600",
}
TINY = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 250"
BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, *_):
        if name == "ray": raise ModuleNotFoundError("No module named 'ray'", name="ray")
sys.meta_path.insert(0, Blocked())
"""
OLDER = "import ray; ray.__version__ = '2.40.0'"
NODE = {"node_ip_address": "127.0.0.1", "object_store_memory": 100 << 20}


@pytest.fixture(scope="module")
def cluster():
    os.environ.update(ON_LOOPBACK)  # before Ray is imported
    from ray.cluster_utils import Cluster

    found = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **NODE}
    )
    for _ in range(2):
        found.add_node(num_cpus=4, **NODE)
    yield found
    found.shutdown()


@pytest.fixture
def on(cluster, tmp_path):
    return lambda words, **more: meshwise(
        tmp_path, f"{words} --launcher ray --address {cluster.address}", **more
    )


def meshwise(folder, words, before="") -> subprocess.Popen:
    code = f"{before}\nfrom meshwise.__main__ import main\nmain()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *words.split()],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(job, code=0) -> tuple[str, str]:
    out, err = job.communicate(timeout=paced(300))
    assert job.returncode == code, (out, err)
    assert "Traceback" not in err
    return out, err


def records(folder) -> dict[str, tuple[str, tuple[str, ...]]]:
    """The status and the fields of each case of the only run, without rank or host."""
    (path,) = folder.glob("runs/*/samples.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["case_id"]: (row["status"], tuple(sorted(row))) for row in rows}


def ranks_of(folder) -> list[int]:
    """The processes whose working directory is this test's, but for the command."""
    found = []
    for cwd in Path("/proc").glob("[0-9]*/cwd"):
        try:
            command = (cwd.parent / "cmdline").read_bytes().split(b"\0")
            if cwd.readlink() == folder and b"-m" in command:
                found.append(int(cwd.parent.name))
        except OSError:
            continue  # it has just ended
    return sorted(found)


def at_work(job, folder, runs="runs") -> list[int]:
    limit = time.monotonic() + paced(120)
    while not any(path.stat().st_size for path in folder.glob(f"{runs}/*/samples.jsonl")):
        assert job.poll() is None and time.monotonic() < limit, job.communicate()
        time.sleep(0.1)
    return ranks_of(folder)


def all_gone(folder) -> None:
    limit = time.monotonic() + paced(60)
    while ranks_of(folder):
        assert time.monotonic() < limit
        time.sleep(0.1)


def test_nodes_are_listed(on):
    out, _ = ended(on("detect --json"))
    hosts = json.loads(out)["hosts"]
    assert sorted((each["cpus"], each["free_cpus"], each["gpus"]) for each in hosts) == [
        (0, 0, 0), (4, 4, 0), (4, 4, 0)
    ]  # fmt: skip
    assert {each["address"] for each in hosts} == {"127.0.0.1"}


def test_hosts_are_detected(on, tmp_path):
    out, _ = ended(on("detect --nodes 2 --nproc-per-node 2 --json"))
    assert (json.loads(out)["num_hosts"], json.loads(out)["num_devices_per_host"]) == (2, 2)
    assert (tmp_path / "cluster.toml").exists()


@pytest.mark.parametrize(
    "words",
    [
        "measure collectives --sizes 4KiB",  # of several, times say which others follow
        "measure ring 2 --seq-lengths 128 --causal",
    ],
)
def test_records_are_those_of_the_local_launcher(words, on, tmp_path):
    ended(on(f"{words} --nodes 2"))
    (tmp_path / "local").mkdir()
    ended(meshwise(tmp_path / "local", f"{words} --nproc 2"))
    assert records(tmp_path) == records(tmp_path / "local") != {}


def test_a_profile_keeps_to_its_budget(on, tmp_path):
    out, _ = ended(on("measure profile --budget 3s --nodes 2 --json"))
    assert json.loads(out)["status"] == "partial"
    assert {status for status, _ in records(tmp_path).values()} == {"ok"}


def test_a_plan_of_two_stages_runs_across_hosts(on, tmp_path):
    model = Model(name="tiny", hidden=64, layers=2, heads=4, ffn=256, vocab=128, max_seq_len=32)
    layout = Layout(pp=2, schedule="1f1b", microbatch_size=2, num_microbatches=2)
    store.write(
        tmp_path / "plan.json", _plan(model, Workload(global_batch_size=4, seq_len=32), layout)
    )
    out, err = ended(on("run --steps 3 --warmup 1 --check --json --nodes 2"))
    (result,) = json.loads(out)
    assert result["status"] == "ok" and result["check_loss_error"] <= 1e-5, err


def test_weights_move_between_hosts(on, tmp_path):
    words = "refit --refit-mode non-collocated --refit-method gloo --tensor-model-parallel-size 2"
    ended(on(f"{words} {TINY} --rl-inference-tensor-model-parallel-size 1 --nodes 2 "
             "--nproc-per-node 2"))  # fmt: skip
    assert {status for status, _ in records(tmp_path).values()} == {"ok"}


@pytest.mark.parametrize(
    ("suite", "num_hosts", "per_host"),
    [
        ("gpt.perf_test_manual", 2, 2),
        ("gpt.perf_test_fast_2d --shard-only --niter 2", 1, 1),
        pytest.param("gpt.perf_test_fast_2d --shard-only --niter 2", 2, 4, marks=pytest.mark.whole),
    ],
)
def test_alpas_suites_take_a_part_of_the_cluster(suite, num_hosts, per_host, on):
    words = f"run --suite {suite} --scale-to-fit --num-hosts {num_hosts}"
    out, err = ended(on(f"{words} --num-devices-per-host {per_host}"))
    assert f"#GPU: {num_hosts * per_host}" in out and "TFLOPs" in out, err


def test_each_value_of_an_array_is_a_job_that_waits_for_room(on, tmp_path):
    """Three jobs of two hosts with three ranks each: one at a time."""
    words = "measure collectives --nodes 2 --nproc-per-node 3 --array sizes=4KiB,8KiB,nonsense"
    out, err = ended(on(words), 2)
    assert [line for line in err.splitlines() if line.startswith("---")] == [
        "--- sizes = 4KiB", "--- sizes = 8KiB", "--- sizes = nonsense",
    ]  # fmt: skip
    assert len(list(tmp_path.glob("runs/*"))) == 2 and out.count("all_gather, 6 ranks") == 2


def test_the_grid_of_layers_in_the_documentation_makes_prices(tmp_path):
    """Its lines, of a small model on one rank of a CPU; the profile in a few seconds."""
    text = (ROOT / "docs" / "clusters.md").read_text().partition("## Ray\n")[2]
    found = re.search(r"meshwise measure profile [^#]*\n[^#]*calibrate runs/\*", text)
    assert found
    words = found[0].replace("\\\n", " ").replace("gpt-2.6b", "gpt-30m")
    words = words.replace("--address auto --gpus-per-node 1", "--nproc-per-node 1")
    profile, grid, calibrate = (part.replace("meshwise ", "", 1) for part in words.split("&&"))
    ended(meshwise(tmp_path, f"{profile} --budget 5s"))
    ended(meshwise(tmp_path, grid.replace("1,2,4,8", "1,2")))
    runs = sorted(map(str, tmp_path.glob("runs/*")))
    assert len(runs) == 3
    ended(meshwise(tmp_path, calibrate.replace("runs/*", " ".join(runs))))
    assert (tmp_path / "costs.json").exists()


def test_cases_of_a_suite_run_side_by_side_into_one_table(on, tmp_path):
    words = "run --suite gpt_inference.profile --scale-to-fit --niter 2 --nproc-per-node 1"
    ended(on(f"{words} --array case=0,5"))
    head, *rows = (tmp_path / "default.tsv").read_text().splitlines()
    assert head.startswith("Type\t") and len(rows) == 2 and len({*rows}) == 2
    found = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/run.json")]
    assert max(run["started"] for run in found) < min(run["ended"] for run in found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Ray would give out GPUs that are not there")
def test_ranks_see_all_gpus_that_ray_gave_their_job(cluster, on, tmp_path):
    """Ray takes three GPUs on trust; another job has number 0. Ranks compute on the CPU."""
    node = cluster.add_node(num_cpus=0, num_gpus=3, **NODE)
    try:
        other = on("measure profile --gpus-per-node 1 --runs other")
        at_work(other, tmp_path, "other")
        ended(on("measure collectives --sizes 4KiB --gpus-per-node 2"))
        (path,) = tmp_path.glob("runs/*")
        found = store.load(path)[0].provenance["settings"]["CUDA_VISIBLE_DEVICES"]
        assert found == "1,2"
        _, err = ended(on("measure collectives --gpus-per-node 3"), 2)
        assert "hosts with GPUs have 2 of 3" in err
    finally:
        other.send_signal(signal.SIGINT)
        ended(other, 130)
        cluster.remove_node(node)


def test_too_few_hosts_are_said_before_anything_starts(on, tmp_path):
    _, err = ended(on("measure collectives --nodes 3"), 2)
    assert err.splitlines() == [
        "error: --nodes = 3: each needs 1 free CPUs, and the cluster's hosts with CPUs have 4 of "
        "4, 4 of 4; ask for less, or wait"
    ]
    assert not (tmp_path / "runs").exists()
    _, err = ended(on("measure collectives --gpus-per-node 1"), 2)
    assert "hosts with GPUs have none" in err


def test_bad_input_is_said_by_the_ranks(on):
    out, err = ended(on("measure collectives --sizes 4Kip --nodes 2 --json"), 2)
    assert json.loads(out)["exit_code"] == 2
    assert err.count("error: --sizes = '4Kip'") == 1


def test_a_killed_rank_is_named(on, tmp_path):
    job = on("measure profile --nodes 2 --json")
    os.kill(at_work(job, tmp_path)[-1], signal.SIGKILL)
    out, err = ended(job, 4)
    assert "died of SIGKILL" in json.loads(out)["error"], err
    assert records(tmp_path)
    all_gone(tmp_path)


def test_a_killed_actor_is_named_and_its_rank_goes_with_it(on, tmp_path):
    job = on("measure collectives --sizes 4KiB,8KiB --nodes 2")
    rank = at_work(job, tmp_path)[-1]
    number = (Path(f"/proc/{rank}/environ").read_bytes().split(b"\0RANK=")[1])[:1].decode()
    actor = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(actor, signal.SIGKILL)
    _, err = ended(job, 4)
    assert f"error: rank {number}: its actor on 127.0.0.1" in err, err
    assert (before := records(tmp_path))
    all_gone(tmp_path)
    going_on = on("measure collectives --sizes 4KiB,8KiB --nodes 2 --resume")
    going_on.communicate(timeout=paced(300))
    assert going_on.returncode in (0, 4)  # 4: what was under way counts as hung
    after = records(tmp_path)
    assert len(after) > len(before) and after.items() >= before.items()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_ranks_and_gives_their_places_back(number, code, on, tmp_path):
    job = on("measure profile --nodes 2 --nproc-per-node 4")
    at_work(job, tmp_path)
    job.send_signal(number)
    ended(job, code)
    all_gone(tmp_path)
    limit = time.monotonic() + paced(60)
    while sum(each["free_cpus"] for each in json.loads(ended(on("detect --json"))[0])["hosts"]) < 8:
        assert time.monotonic() < limit
    (path,) = tmp_path.glob("runs/*")
    assert store.load(path)[0].status == "interrupted"


def test_what_cannot_be_reached_is_said_in_a_line(on, tmp_path):
    words = "measure collectives --launcher ray"
    _, err = ended(meshwise(tmp_path, words, BLOCKED), 2)
    assert err == "error: ray: not installed; pip install 'meshwise[ray]'\n"
    _, err = ended(on("measure collectives", before=OLDER), 2)
    assert "the cluster has Ray 2." in err and "this environment Ray 2.40.0" in err
    assert "pip install ray==2." in err.splitlines()[-1]
    _, err = ended(meshwise(tmp_path, f"{words} --address 127.0.0.1:1"), 2)
    assert err == (
        "error: --address = '127.0.0.1:1': no Ray answers there (Connection refused); give the "
        "one that ray start --head printed\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, as a wrong port may
        port = silent.getsockname()[1]
        _, err = ended(meshwise(tmp_path, f"{words} --address 127.0.0.1:{port}"), 2)
    assert "no Ray answers there (timed out); give" in err and len(err.splitlines()) == 1


def test_a_ray_of_our_own_listens_on_loopback_alone_and_ends(tmp_path):
    before = _rays()
    job = meshwise(tmp_path, "measure profile --launcher ray --nproc-per-node 2")
    at_work(job, tmp_path)
    listening = [address for pid in _rays() - before for address in listens_of(pid)]
    assert listening and {each.removeprefix("::ffff:") for each in listening} == {"127.0.0.1"}
    job.send_signal(signal.SIGINT)
    ended(job, 130)
    limit = time.monotonic() + paced(60)
    while _rays() - before:
        assert time.monotonic() < limit
        time.sleep(0.1)


def _rays() -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if b"gcs_server" in words or b"raylet" in words or words.startswith(b"ray::"):
            found.add(int(path.parent.name))
    return found


def test_a_lost_node_is_named(cluster, on, tmp_path):  # the last: the cluster is smaller then
    job = on("measure profile --nodes 2")
    at_work(job, tmp_path)
    node = cluster.list_all_nodes()[-1]
    cluster.remove_node(node, allow_graceful=False)
    _, err = ended(job, 4)
    assert "its node 127.0.0.1" in err and f"{node.node_id[:8]}) was lost" in err, err[-2000:]
    assert records(tmp_path)
    all_gone(tmp_path)
