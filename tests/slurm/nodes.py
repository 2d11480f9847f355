"""A Slurm cluster of Debian's packages on this machine: a controller and a slurmd for each node.

Nothing of the system's is used: munge, keys, ports, state and logs are in a folder of its own, and
``SLURM_CONF`` names it.
"""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
PATIENCE_S = 120.0

_CONF = """\
ClusterName=meshwise
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
EnforcePartLimits=ALL
MpiDefault=none
KillWait=20
SlurmdTimeout=20
TCPTimeout=20
MessageTimeout=60
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """Return the programs that are not installed."""
    found = {name: shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") for name in PROGRAMS}
    return [name for name, path in found.items() if path is None]


@contextlib.contextmanager
def cluster(folder: Path, names: tuple[str, ...]) -> Iterator[Path]:
    """Run a cluster of these nodes; yield the path of its slurm.conf."""
    import getpass

    ports = [_free_port() for _ in range(len(names) + 1)]
    (folder / "state").mkdir()
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs=8"
        for name, port in zip(names, ports[1:], strict=True)
    )
    conf = folder / "slurm.conf"
    conf.write_text(
        _CONF.format(
            host=socket.gethostname(), user=getpass.getuser(), ports=ports, folder=folder,
            nodes=nodes,
        )
    )  # fmt: skip
    environment = os.environ | {
        "SLURM_CONF": str(conf),
        "PATH": f"{os.environ['PATH']}:/usr/sbin",
    }
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o600)
    own = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    started = [["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *own]]
    started += [["slurmctld", "-D", "-c"]]
    started += [["slurmd", "-D", "-N", name] for name in names]
    processes = []
    try:
        for command in started:
            log = (folder / f"{command[0]}-{len(processes)}.start").open("w")
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            if command[0] == "munged":
                _until(lambda: (folder / "munge.socket").exists(), "munged")
        _until(lambda: _idle(environment) == len(names), "idle nodes")
        yield conf
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_S)
            process.kill()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _idle(environment: dict[str, str]) -> int:
    asked = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
    done = subprocess.run(asked, env=environment, capture_output=True, text=True, check=False)
    return len(done.stdout.split())


def _until(holds, what: str) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < limit, f"no {what} after {PATIENCE_S} s"
        time.sleep(0.2)
