"""Print how wrong steps are whose layers were all measured, and the others: layers.py FOLDER...

As `meshwise calibrate --validate FOLDER...`, of trainings by the measurements of their own plans.
Every layer was measured if no operation's error is in a layer's part of the prediction.
"""

import sys
from statistics import fmean, median

import meshwise
from meshwise import search
from meshwise.spec import Prediction

predict, told = search.predict, dict[float, Prediction]()


def kept(*about: object) -> Prediction:
    found = predict(*about)
    told[found.step_time_s] = found
    return found


def by_layers(prediction: Prediction) -> bool:
    groups = {
        group for group, parts in prediction.errors.items() for part in parts if "layer" in part
    }
    return groups <= {"layerforward", "layerbackward"}


search.predict = kept
own = [run for run in meshwise.validate(tuple(sys.argv[1:])).runs if run.own]
for measured in (True, False):
    runs = [run for run in own if by_layers(told[run.time.predicted]) is measured]
    usual = [
        run for run in runs if run.model.startswith(("gpt", "llama")) and "cp" not in run.layout
    ]
    several = [run for run in usual if "mb2x8" not in run.layout]
    for name, some in (("all", runs), ("GPT, Llama without cp", usual), ("not mb2x8", several)):
        off = [abs(run.time.error) for run in some]
        half = [(run.time.high - run.time.low) / 2 / run.time.predicted for run in some]
        memory = [abs(run.memory.error) for run in some if run.memory]
        print(
            f"layers {'' if measured else 'not '}measured, {name}: {len(some)} runs, mean "
            f"{fmean(off):.1%}, worst {max(off):.1%}, half-width {median(half):.1%}, memory "
            f"{fmean(memory):.1%}, {max(memory):.1%}"
        )
