"""Scenarios of four ranks on two GPUs, two ranks each: are the weights right at full size?

    torchrun --nproc-per-node 4 benchmarks/2026-11-21-refit-2xh200/shared.py OUT SCENARIO ...

Every element of every destination is compared, by `meshwise refit`'s own measurement over ipc (NCCL
takes one rank a GPU). Two ranks share a GPU's time, so the times are no rates and are not quoted.
"""

import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from meshwise import ranks
from meshwise.options.refit import Moving
from meshwise.probe import refit
from meshwise.probe.cases import refit as cases
from meshwise.spec import Case, Resharding

_join = dist.init_process_group


def _by_gloo(backend: str, **options: Any) -> None:
    _join("gloo", **{**options, "device_id": None})


def _device(place: ranks.Environment) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = place["local_rank"] % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def main(out: Path, *names: str) -> None:
    ranks.device_of, dist.init_process_group = _device, _by_gloo
    here = ranks.join(60.0)
    for name in names:
        (scenario,) = cases.find(name).scenarios
        source, destination = cases.layouts(scenario, scenario.mode, here.world_size)
        op = Resharding(model=scenario.model, source=source, destination=destination, scenario=name)
        method = "ipc" if here.device.type == "cuda" else "gloo"
        case = Case(op=op, regime="blocking", backend=method, world_size=here.world_size)
        often = Moving(warmup=1, iterations=2)
        request = refit.RefitRequest(case=case, run_dir=str(out), asked=often)
        refit.measure_ranks(here, msgspec.json.encode(request))
        torch.cuda.empty_cache()
    here.leave()


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    main(Path(sys.argv[1]), *sys.argv[2:])
