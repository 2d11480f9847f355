"""Provenance tells enough to explain a number and nothing about who or where."""

import builtins
import getpass
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from meshwise import provenance


def test_settings_hold_what_changes_speed_and_no_names_or_paths() -> None:
    variables = {
        "NCCL_ALGO": "Ring",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "TORCH_EXTENSIONS_DIR": "/home/someone/.cache",
        "NCCL_HOSTID": "node17",
        "NCCL_COMM_ID": "10.0.0.7:99",
        "HOME": "/home/someone",
        "TORCHELASTIC_RUN_ID": "1",
        "AWS_SECRET": "x",
        "NCCL_NET_PLUGIN": "/opt/someone/plugin.so",
        "NCCL_SOCKET_IFNAME": "eth0,someone:hush@node17",
        "NCCL_OF_TOMORROW": "someone",
    }
    assert provenance.settings(variables) == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_ALGO": "Ring",
        "NCCL_COMM_ID": "(not stored)",
        "NCCL_HOSTID": "(not stored)",
        "NCCL_NET_PLUGIN": "(a path)",
        "NCCL_OF_TOMORROW": "(not stored)",
        "NCCL_SOCKET_IFNAME": "eth0,***@node17",
        "TORCH_EXTENSIONS_DIR": "(not stored)",
    }


def test_collect_is_plain_data_and_names_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = provenance.collect(nproc=4)
    text = json.dumps(found)
    assert found["threads_per_rank"] == 3
    assert found["time_utc"].endswith("Z")
    assert str(Path.home()) not in text
    for private in (socket.gethostname(), getpass.getuser()):
        assert f'"{private}"' not in text


def test_collect_works_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_torch(name: str, *rest: Any) -> Any:
        if name == "torch":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    assert provenance.collect()["torch"] is None


def test_a_rank_gets_an_equal_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(provenance.os, "sched_getaffinity", lambda _: set(range(10)))
    assert [provenance.threads_per_rank(n) for n in (1, 4, 16)] == [10, 2, 1]


def test_the_processor_by_its_name(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel\t\t: 1\nmodel name\t: Some CPU @ 2 GHz\n")
    assert provenance.cpu_name(cpuinfo) == "Some CPU @ 2 GHz"
    assert provenance.cpu_name(tmp_path / "absent")


def test_settings_hold_no_secret():
    doors = (
        "NCCL_AUTH_TOKEN",
        "NCCL_KEY",
        "CUDA_CREDENTIALS",
        "TORCH_FOO_PASSWORD",
        "CUDA_TOKEN",
        "OMP_SECRET",
        "GLOO_API_KEY",
    )
    assert provenance.settings({**dict.fromkeys(doors, "hush"), "NCCL_ALGO": "Ring"}) == {
        "NCCL_ALGO": "Ring"
    }
