"""Kubernetes' manifests: golden files, and what they must not do."""

import json

import pytest

from meshwise.launch import kubernetes
from meshwise.launch.errand import Errand
from meshwise.options.allocation import Allocation

WORDS = ("measure", "collectives", "--model", "$(HOME) $x; 'a'")
PLACE = Allocation(
    launcher="kubernetes", nodes=2, gpus_per_node=8, container_image="torch:2", time="2h",
    container_mounts=("data:/data", "/fast:/scratch"), namespace="team",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_set(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONTAINER_IMAGE", raising=False)


def test_manifests_are_as_before(golden, capsys):
    assert kubernetes.start(Errand(WORDS), PLACE) == 0
    golden("kubernetes.yaml", capsys.readouterr().out)


def test_one_host_has_no_workers_and_no_gpus_are_asked_for_on_cpus():
    place = Allocation(launcher="kubernetes", container_image="torch:2", nproc_per_node=2)
    made = kubernetes.pytorch_job(Errand(("measure",)), place)
    assert list(made["spec"]["pytorchReplicaSpecs"]) == ["Master"]
    assert "nvidia.com/gpu" not in json.dumps(made)
    assert "activeDeadlineSeconds" not in json.dumps(made)


def test_a_word_is_no_variable_of_kubernetes():
    made = kubernetes.job_set(Errand(WORDS), PLACE)
    (job,) = made["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert container["command"][-1] == "$$(HOME) $x; 'a'"


def test_what_a_manifest_lacks_is_named():
    with pytest.raises(ValueError, match="give --container-image"):
        kubernetes.job_set(Errand(WORDS), Allocation(launcher="kubernetes"))
    with pytest.raises(ValueError, match=r"^run_id = 'A b': names a JobSet"):
        kubernetes.job_set(Errand(WORDS), Allocation(run_id="A b", container_image="x"))
