"""Which option goes with which launcher; the others refuse it by name, and so does no launcher."""

import pytest

from meshwise.cli import app
from meshwise.options.allocation import Allocation

GIVEN = {
    "run_id": "mine",
    "container_image": "torch:2",
    "container_mounts": ("/a:/b",),
    "container_engine": "apptainer",
    "partition": "h100",
    "account": "me",
    "constraint": "nvl",
    "time": "2h",
    "sbatch": ("--qos=high",),
    "array": "seq-len=1,2",
    "wait": True,
    "address": "auto",
    "strategy": "spread",
    "namespace": "team",
    "nodes": 2,
    "gpus_per_node": 8,
    "nproc_per_node": 8,
    "python": "/bin/python3",
}
EVERYWHERE = {"nodes", "gpus_per_node", "nproc_per_node", "python"}
TAKEN = {  # as docs/clusters.md has it
    "slurm": EVERYWHERE | {
        "run_id", "container_image", "container_mounts", "container_engine", "partition", "account",
        "constraint", "time", "sbatch", "array", "wait",
    },
    "ray": EVERYWHERE | {"array", "wait", "address", "strategy"},
    "kubernetes": EVERYWHERE | {
        "run_id", "container_image", "container_mounts", "time", "namespace",
    },
}  # fmt: skip


@pytest.mark.parametrize("launcher", TAKEN)
def test_a_launcher_takes_its_own_options_and_refuses_others(launcher):
    assert {"launcher", *GIVEN} == {*Allocation.__dataclass_fields__}
    for name, value in GIVEN.items():
        if name in TAKEN[launcher]:
            Allocation(launcher=launcher, **{name: value})
            continue
        owners = " or ".join(each for each in TAKEN if name in TAKEN[each])
        with pytest.raises(ValueError) as refused:
            Allocation(launcher=launcher, **{name: value})
        assert str(refused.value) == (
            f"{name} = {value!r}: belongs to --launcher {owners}; give that, or leave it out"
        )


def _said(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        app.main([*words])
    assert end.value.code == 2
    return str(capsys.readouterr().err)


def test_the_command_line_names_option_value_and_launcher(capsys):
    assert _said(capsys, "measure", "--launcher", "slurm", "--address", "auto") == (
        "error: --address = 'auto': belongs to --launcher ray; give that, or leave it out\n"
    )
    assert _said(capsys, "measure", "--launcher=kubernetes", "--wait", "--dry-run") == (
        "error: --wait = True: belongs to --launcher slurm or ray; give that, or leave it out\n"
    )


@pytest.mark.parametrize("verb", [("measure",), ("measure", "gemm"), ("run",), ("detect",)])
@pytest.mark.parametrize(
    ("option", "owners"),
    [
        (("--address", "auto"), "ray"),
        (("--namespace=team",), "kubernetes"),
        (("--time", "1h"), "slurm or kubernetes"),
        (("--nodes", "2"), "slurm or ray or kubernetes"),
    ],
)
def test_without_a_launcher_an_option_says_whose_it_is(verb, option, owners, capsys):
    said = _said(capsys, *verb, *option)
    assert said.endswith(f": belongs to --launcher {owners}; give that, or leave it out\n")
    assert said.startswith(f"error: {option[0].partition('=')[0]}")
