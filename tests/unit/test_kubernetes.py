"""Kubernetes' manifests: golden files, and what they must not do."""

import json
import os
from dataclasses import replace

import pytest

from meshwise.launch import kubernetes
from meshwise.launch.errand import Errand
from meshwise.options.allocation import Allocation

WORDS = ("measure", "collectives", "--model", "$(HOME) $x; 'a'")
PLACE = Allocation(
    launcher="kubernetes", nodes=2, gpus_per_node=8, container_image="torch:2", time="2h",
    container_mounts=("data:/data", "/fast:/scratch"), namespace="team",
)  # fmt: skip


def _holding(place: Allocation = PLACE) -> Allocation:
    """Add a mount that holds the working directory."""
    return replace(place, container_mounts=(*place.container_mounts, f"home:{os.getcwd()}"))


@pytest.fixture(autouse=True)
def _nothing_set(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONTAINER_IMAGE", raising=False)


def test_manifests_are_as_before(golden, capsys):
    assert kubernetes.start(Errand(WORDS), _holding()) == 0
    golden("kubernetes.yaml", capsys.readouterr().out.replace(os.getcwd(), "/home/me"))


def test_results_outlive_the_pods():
    """They are written below the working directory, which a mount has to hold."""
    here, above = os.getcwd(), os.path.dirname(os.getcwd())
    for mount in (f"home:{here}", f"home:{above}/", f"/nfs:{above}"):
        made = kubernetes.job_set(Errand(WORDS), replace(PLACE, container_mounts=("a:/a", mount)))
        (job,) = made["spec"]["replicatedJobs"]
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        assert container["workingDir"] == here
    for mounts in ((), ("a:/a",), (f"home:{here}/runs",), (f"home:{here}2",)):
        with pytest.raises(ValueError) as refused:
            kubernetes.job_set(Errand(WORDS), replace(PLACE, container_mounts=mounts))
        assert str(refused.value) == (
            f"container_mounts: none holds the working directory {here}, where results are "
            f"written; add CLAIM:{here}"
        )


@pytest.mark.parametrize("mount", ["data", "data:", ":/data", "data:x", "data:/data:ro"])
def test_a_mount_is_a_source_and_an_absolute_target(mount):
    with pytest.raises(ValueError) as refused:
        kubernetes.job_set(Errand(WORDS), _holding(replace(PLACE, container_mounts=(mount,))))
    assert str(refused.value) == (
        f"container_mounts = {mount!r}: write SOURCE:TARGET, as data:/data"
    )


@pytest.mark.parametrize("name", ["a b", "A_b!", "-a", "a..b", "a.", "x" * 64])
def test_names_are_those_that_kubernetes_takes(name):
    """RFC 1123: a label for a namespace, labels with points between them for a claim."""
    with pytest.raises(ValueError, match=r"^namespace = '.*': use up to 63 of a-z, 0-9 and -"):
        kubernetes.job_set(Errand(WORDS), _holding(replace(PLACE, namespace=name)))
    with pytest.raises(ValueError, match=r"^container_mounts = '.*': is no claim's name; use a-z"):
        kubernetes.job_set(
            Errand(WORDS), _holding(replace(PLACE, container_mounts=(f"{name}:/data",)))
        )
    good = replace(PLACE, namespace="x" * 63, container_mounts=("team-1.data:/data",))
    kubernetes.job_set(Errand(WORDS), _holding(good))


def test_one_host_has_no_workers_and_no_gpus_are_asked_for_on_cpus():
    place = _holding(Allocation(launcher="kubernetes", container_image="torch:2", nproc_per_node=2))
    made = kubernetes.pytorch_job(Errand(("measure",)), place)
    assert list(made["spec"]["pytorchReplicaSpecs"]) == ["Master"]
    assert "nvidia.com/gpu" not in json.dumps(made)
    assert "activeDeadlineSeconds" not in json.dumps(made)


def test_a_word_is_no_variable_of_kubernetes():
    made = kubernetes.job_set(Errand(WORDS), _holding())
    (job,) = made["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert container["command"][-1] == "$$(HOME) $x; 'a'"


def test_what_a_manifest_lacks_is_named():
    with pytest.raises(ValueError, match="give --container-image"):
        kubernetes.job_set(Errand(WORDS), Allocation(launcher="kubernetes"))
    with pytest.raises(ValueError, match=r"^run_id = 'A b': names a JobSet"):
        kubernetes.job_set(Errand(WORDS), _holding(replace(PLACE, run_id="A b")))
