"""The batch script of a command: what sbatch gets, and what runs in an allocation there is.

Text of the user's reaches the shell quoted, and sbatch's own lines quoted by its rules; there a
control character is refused.
"""

import shlex
from collections.abc import Iterator
from pathlib import Path

from meshwise.launch.errand import Errand, here, image
from meshwise.options.allocation import Allocation
from meshwise.text import plain

NOTICE_S = 120  # between Slurm's signal and the time limit
ENDING_S = 300  # for the other ranks to end after the first

_OWN = {  # options of sbatch that --sbatch must not give, and what does
    **dict.fromkeys(("--nodes", "-N"), "give --nodes"),
    **dict.fromkeys(("--ntasks", "-n", "--ntasks-per-node"), "give --nproc-per-node"),
    **dict.fromkeys(("--array", "-a"), "give --array"),
    **dict.fromkeys(("--wait", "-W"), "give --wait"),
    "--test-only": "give --dry-run",
    **dict.fromkeys(("--output", "-o", "--error", "-e"), "give --run-id or OUTPUT_DIR"),
    **dict.fromkeys(("--wrap", "--parsable", "--help", "-h", "--usage"), "leave it out"),
    **dict.fromkeys(("--version", "-V"), "leave it out"),
}

_PRESENT = """\
command -v "$0" > /dev/null || {
    [ "${SLURM_LOCALID:-0}" != 0 ] ||
        echo "error: $0: not found on $(hostname); load it, or give --container-engine pyxis" >&2
    exit 2
}
exec "$0" "$@"
"""

_BODY = """\
set -euo pipefail
cd -- {here}

# Ranks meet at the first host, at the address by which Slurm reaches it.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol --oneliner show node "$first" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')
export MASTER_ADDR="${{address:-$first}}"{alone}
echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, start ${{SLURM_RESTART_COUNT:-0}}, ranks meet at \
$MASTER_ADDR" >&2

program=({program})
{changes}
# At USR1 ranks keep what they have and end. Slurm sends it before the time limit.
is_late=0
trap 'kill -USR1 "$step"' TERM INT
trap 'is_late=1; kill -USR1 "$step"' USR1
srun {options} ${{SLURM_STEP_ID:+--overlap}} {inside}"${{program[@]}}" &
step=$!
code=0
while kill -0 "$step" 2>/dev/null; do
    code=0
    wait "$step" || code=$?
done
if [ "$is_late" = 1 ]; then {at_limit}; fi
exit "$code"
"""


def script(errand: Errand, place: Allocation, folder: Path) -> str:
    """Return the script. Its logs are JOB.out (results) and JOB.err (the rest) in ``folder``."""
    head = [f"#SBATCH {line}" for line in _head(errand, place, folder)]
    said = plain(shlex.join(["meshwise", *errand.words]))
    return "\n".join(["#!/bin/bash", f"# {said}", *head, "", body(errand, place)])


def body(errand: Errand, place: Allocation) -> str:
    """Return what a job does: a step of all ranks, ended and started again as Slurm tells."""
    changes = [f"if [ \"${{SLURM_RESTART_COUNT:-0}}\" -gt 0 ]; then program+=({going_on}); fi"
               for going_on in filter(None, [shlex.join(errand.going_on)])]  # fmt: skip
    if place.array is not None:
        flag, values = swept(place.array)
        changes += [
            f"values=({shlex.join(values)})",
            f'program+=({shlex.quote(f"--{flag}=")}"${{values[$SLURM_ARRAY_TASK_ID]}}")',
        ]
    options, inside = _container(place)
    # in an allocation srun would start as many as that has tasks
    step = [f"--nodes={place.nodes}", f"--ntasks={place.num_ranks}"]
    step += [f"--ntasks-per-node={place.ranks_per_node}"]
    # each rank sees all GPUs of its host, as CUDA IPC between ranks needs
    step += ["--gpu-bind=none"] * (place.gpus_per_node > 0)
    # the others say which rank failed and end, if they can: then srun has that rank's exit code
    step += ["--kill-on-bad-exit=0", f"--wait={ENDING_S}"]
    return _BODY.format(
        here=shlex.quote(here()),
        # a step of one task is a launcher only where this says so
        alone="\nexport WORLD_SIZE=1" * (place.num_ranks == 1),
        program=shlex.join(errand.program(place)),
        changes="".join(f"{line}\n" for line in changes),
        options=shlex.join([*step, *options]),
        inside=f"{shlex.join(inside)} " if inside else "",
        at_limit=_at_limit(errand),
    )


def _at_limit(errand: Errand) -> str:
    """Return what the script does at the time limit: queue the job again if it can go on, for
    otherwise it would start over at every limit."""
    if errand.can_go_on:
        return 'scontrol requeue "$SLURM_JOB_ID"'
    save = "add --save FOLDER, with which it goes on, or " if errand.verb == "run" else ""
    said = f"error: time limit: this command cannot go on; {save}give a longer --time"
    return f"echo {shlex.quote(said)} >&2"


def swept(array: str) -> tuple[str, list[str]]:
    """Return the flag and the values of ``seq-len=1024,2048``. Commas inside JSON part nothing."""
    flag, _, values = array.partition("=")
    found, depth = [""], 0
    for letter in values:
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    found = [value.strip() for value in found]
    if not flag or not all(found):
        raise ValueError(f"array = {array!r}: write FLAG=VALUE,VALUE as in seq-len=1024,2048")
    return flag.lstrip("-").replace("_", "-"), found


def _head(errand: Errand, place: Allocation, folder: Path) -> Iterator[str]:
    """Yield the options of sbatch."""
    log = str(folder).replace("%", "%%") + ("/%A_%a" if place.array else "/%j")
    given = {
        "job-name": f"meshwise-{errand.verb}",
        "nodes": place.nodes,
        "ntasks-per-node": place.ranks_per_node,
        "gpus-per-node": place.gpus_per_node or None,
        "partition": place.partition,
        "account": place.account,
        "constraint": place.constraint,
        "time": place.limit_s and -(-place.limit_s // 60),
        "array": None if place.array is None else f"0-{len(swept(place.array)[1]) - 1}",
        "output": f"{log}.out",
        "error": f"{log}.err",
        "open-mode": "append",
        "signal": f"B:USR1@{NOTICE_S}",
    }
    for name, value in given.items():
        if value is not None:
            yield f"--{name}={quoted(name, str(value))}"
    yield "--requeue" if errand.can_go_on else "--no-requeue"
    for line in place.sbatch:
        name, equals, value = line.partition("=")
        if not line.startswith("-") or name in ("-", "--"):
            raise ValueError(f"sbatch = {line!r}: must be an option of sbatch, as --qos=high")
        short = name if line.startswith("--") else line[:2]  # sbatch takes a long one's beginning
        if fixes := [fix for own, fix in _OWN.items() if own.startswith(short)]:
            raise ValueError(f"sbatch = {line!r}: is the launcher's own; {fixes[0]}")
        yield f"{quoted('sbatch', name)}{equals}{quoted('sbatch', value) if equals else ''}"


def quoted(name: str, text: str) -> str:
    """Quote a value for a line of #SBATCH, which is split as a shell splits words."""
    if text != plain(text):
        raise ValueError(f"{name} = {text!r}: a control character is in it; leave it out")
    return shlex.quote(text)


def _container(place: Allocation) -> tuple[list[str], list[str]]:
    """Return options of srun, and words before each rank's command."""
    found = image(place)
    if found is None:
        if place.container_mounts:
            raise ValueError("container_mounts: there is no container; give --container-image")
        return [], []
    if odd := {*(folder := here())} & {*",:"}:
        raise ValueError(f"{folder}: a {odd.pop()!r} in it ends a mount; work in another folder")
    mounts = [*place.container_mounts, f"{folder}:{folder}"]
    if place.container_engine == "pyxis":
        return [
            f"--container-image={found}",
            f"--container-mounts={','.join(mounts)}",
            f"--container-workdir={folder}",
        ], []
    binds = [word for mount in mounts for word in ("--bind", mount)]
    return [], ["bash", "-c", _PRESENT, "apptainer", "exec", "--nv", *binds, "--pwd", folder, found]
