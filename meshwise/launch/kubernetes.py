"""Kubernetes: the manifests of a command, printed and not submitted.

A JobSet and a PyTorchJob (Kubeflow's training operator), either of which runs the command: one pod
a host, in it one torchrun that starts the host's ranks. A mount's source is a claim's name, or an
absolute path of the host. One mount holds the working directory, which is that of this process.
"""

import json
import re
from pathlib import PurePosixPath
from typing import Any

from meshwise.launch.errand import Errand, here, image
from meshwise.options.allocation import Allocation

_PORT = 29500
_LABEL = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"  # RFC 1123, as Kubernetes names things


def start(errand: Errand, place: Allocation) -> int:
    """Print both manifests, as JSON documents of one YAML stream; return exit code 0."""
    for manifest in (job_set(errand, place), pytorch_job(errand, place)):
        print("---")
        print(json.dumps(manifest, indent=2))
    return 0


def job_set(errand: Errand, place: Allocation) -> dict[str, Any]:
    """Return a JobSet: an indexed Job, whose pods meet at the first one's host name."""
    name = _name(errand, place)
    template = _pod(
        errand,
        place,
        node_rank="$(JOB_COMPLETION_INDEX)",
        master=f"--master-addr={name}-hosts-0-0.{name}",
    )
    limit = {} if (s := place.limit_s) is None else {"activeDeadlineSeconds": s}
    job = {
        "parallelism": place.nodes,
        "completions": place.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        **limit,
        "template": template,
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "namespace": place.namespace},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "replicatedJobs": [{"name": "hosts", "replicas": 1, "template": {"spec": job}}],
        },
    }


def pytorch_job(errand: Errand, place: Allocation) -> dict[str, Any]:
    """Return a PyTorchJob: a master and workers, for which the operator sets RANK as the number of
    the pod, MASTER_ADDR and MASTER_PORT."""
    template = _pod(errand, place, node_rank="$(RANK)", master="--master-addr=$(MASTER_ADDR)")
    replicas = {"Master": 1, "Worker": place.nodes - 1}
    limit = {} if (s := place.limit_s) is None else {"activeDeadlineSeconds": s}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": _name(errand, place), "namespace": place.namespace},
        "spec": {
            "runPolicy": {"backoffLimit": 0, **limit},
            "pytorchReplicaSpecs": {
                kind: {"replicas": count, "restartPolicy": "Never", "template": template}
                for kind, count in replicas.items()
                if count
            },
        },
    }


def _pod(errand: Errand, place: Allocation, *, node_rank: str, master: str) -> dict[str, Any]:
    """Return the template of a pod. Kubernetes puts variables for $(NAME), and no shell is run."""
    found = image(place)
    if found is None:
        raise ValueError("container_image: pods run an image; give --container-image")
    python, *program = (word.replace("$(", "$$(") for word in errand.program(place))
    torchrun = ["-m", "torch.distributed.run", f"--nnodes={place.nodes}"]
    torchrun += [f"--nproc-per-node={place.ranks_per_node}", f"--node-rank={node_rank}"]
    torchrun += [master, f"--master-port={_PORT}"]
    mounts = {"shm": ({"emptyDir": {"medium": "Memory"}}, "/dev/shm")}
    for number, (source, target) in enumerate(_mounts(place)):
        on_host = {"hostPath": {"path": source}}
        volume = on_host if source.startswith("/") else _claim(source)
        mounts[f"mount-{number}"] = volume, target
    gpus = {"nvidia.com/gpu": place.gpus_per_node} if place.gpus_per_node else {}
    container = {
        "name": "pytorch",
        "image": found,
        "command": [python, *torchrun, *program],
        "workingDir": here(),
        "resources": {"limits": gpus},
        "volumeMounts": [{"name": n, "mountPath": path} for n, (_, path) in mounts.items()],
    }
    return {
        "spec": {
            "restartPolicy": "Never",
            "containers": [container],
            "volumes": [{"name": n, **volume} for n, (volume, _) in mounts.items()],
        }
    }


def _mounts(place: Allocation) -> list[tuple[str, str]]:
    """Return source and target of each mount. ValueError if none holds the working directory: what
    is written there would be gone with the pod."""
    folder = here()
    found = []
    for mount in place.container_mounts:
        source, _, target = mount.partition(":")
        if not source or not target.startswith("/") or ":" in target:
            raise ValueError(f"container_mounts = {mount!r}: write SOURCE:TARGET, as data:/data")
        found.append((source, target))
    if not any(PurePosixPath(folder).is_relative_to(target) for _, target in found):
        raise ValueError(
            f"container_mounts: none holds the working directory {folder}, where results are "
            f"written; add CLAIM:{folder}"
        )
    return found


def _claim(name: str) -> dict[str, Any]:
    if not re.fullmatch(rf"{_LABEL}(\.{_LABEL})*", name, re.ASCII) or len(name) > 253:
        raise ValueError(
            f"container_mounts = {name!r}: is no claim's name; use a-z, 0-9, - and ., or an "
            "absolute path of the host"
        )
    return {"persistentVolumeClaim": {"claimName": name}}


def _name(errand: Errand, place: Allocation) -> str:
    if not re.fullmatch(_LABEL, place.namespace):
        raise ValueError(
            f"namespace = {place.namespace!r}: use up to 63 of a-z, 0-9 and -, no - at either end"
        )
    name = place.run_id or f"meshwise-{errand.verb}"
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
        raise ValueError(
            f"run_id = {name!r}: names a JobSet; use up to 40 of a-z, 0-9 and -, a letter first"
        )
    return name
