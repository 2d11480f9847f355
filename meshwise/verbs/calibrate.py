"""calibrate: samples of measure runs in, prices out (costs.json)."""

import logging
from pathlib import Path

from meshwise import store
from meshwise.spec import Costs
from meshwise.verbs import files

log = logging.getLogger("meshwise")


def calibrate(
    run: tuple[Path | str, ...] = (), *, runs: Path | str = "runs", out: Path | str = "costs.json"
) -> Costs:
    """Fit prices to the samples of ``run`` (run directories), by default the newest measure run."""
    from meshwise import fit

    chosen = [Path(path) for path in run]
    if not chosen:
        chosen = [store.newest(runs, "measure")]
        files.announce(chosen[0], "the newest run")
    costs = fit.calibrate([files.load(path) for path in chosen])
    store.write(out, costs)
    log.info("wrote %s", out)
    return costs
