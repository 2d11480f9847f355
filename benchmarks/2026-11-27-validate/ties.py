"""Compare differences between trainings with their predictions: python ties.py, no device.

Pairs are trainings of one model and batch on one machine, predicted by the measurements of their
own plans. A pair ties if prices that the two do not share may be off by more than the predicted
difference (`Prediction.ties`).
"""

import itertools
from pathlib import Path

from msgspec.structs import replace

from meshwise import search
from meshwise.pages import steps
from meshwise.verbs import validate as verb

HERE = Path(__file__).parent.parent
loaded = list(verb._loaded(dict.fromkeys(sorted(f.parent for f in HERE.rglob("run.json"))), []))
pool, groups = verb._Pool(loaded, None), {}
for one in loaded:
    plan = one.info.plan
    try:
        if plan is None or not verb._trained(one, plan, pool).own:
            continue
    except ValueError:
        continue
    costs, _ = pool.costs(one)
    prices = pool.prices(costs, cluster=costs.cluster, dtype=plan.dtype, lowering=plan.lowering)
    told = search.predict(plan.model, plan.workload, plan.layout, prices)
    info = replace(one.info, plan=replace(plan, prediction=told))
    measured = steps.result(info, one.samples).time.measured
    key = costs.runs, plan.model.name, plan.workload, plan.lowering, plan.dtype
    groups.setdefault(key, {})[plan.layout.name] = told, measured

rows = []
for (_, name, *_), of in groups.items():
    for (a, (first, a_s)), (b, (other, b_s)) in itertools.combinations(of.items(), 2):
        due, real = other.step_time_s - first.step_time_s, b_s - a_s
        within = abs(real - due) <= first.difference_error_s(other)
        overlap = first.low_s <= other.high_s and other.low_s <= first.high_s
        rows.append((first.ties(other), overlap, due * real > 0, within))
        print(f"{name:12} {a:44} {b:44} {due:+.4f} s predicted, {real:+.4f} measured", end="")
        print(f", +-{first.difference_error_s(other):.4f}", "tie" if first.ties(other) else "")
for name, some in (
    ("all", rows),
    ("ties", [row for row in rows if row[0]]),
    ("no ties", [row for row in rows if not row[0]]),
    ("no ties, intervals overlap", [row for row in rows if row[1] and not row[0]]),
):
    ordered, within = (sum(row[at] for row in some) for at in (2, 3))
    print(f"{name}: {len(some)} pairs, {ordered} in the predicted order, {within} within the error")
