"""Draw own.svg from the JSON of `meshwise calibrate --validate benchmarks`: figure.py FILE.json."""

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

FAMILIES = {"gpt": "GPT", "llama": "Llama", "moe": "experts", "wresnet": "Wide-ResNet"}

runs = [run for run in json.loads(Path(sys.argv[1]).read_text())["runs"] if run["own"]]
runs.sort(key=lambda run: run["time"]["measured"])
mpl.rcParams.update({"svg.hashsalt": "own", "font.size": 8})
figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
for family, name in FAMILIES.items():
    some = [(at, run["time"]) for at, run in enumerate(runs) if run["model"].startswith(family)]
    x, times = zip(*some, strict=True)
    error = [100 * (time["predicted"] / time["measured"] - 1) for time in times]
    low = [100 * (time["predicted"] - time["low"]) / time["measured"] for time in times]
    high = [100 * (time["high"] - time["predicted"]) / time["measured"] for time in times]
    axes.errorbar(x, error, (low, high), fmt="o", ms=4, elinewidth=0.8, label=name)
axes.axhline(0, color="black", lw=0.8)
axes.set(ylabel="predicted / measured - 1 (%)", ylim=(-60, 60), xticks=[])
axes.set_xlabel(f"{len(runs)} trainings on 2 and 4 H100 and H200, from 106 ms to 2.4 s a step")
axes.legend(ncols=4, frameon=False)
figure.savefig(Path(__file__).with_name("own.svg"), metadata={"Date": None})
