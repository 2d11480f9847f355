"""Regret of the planner: its first choice beside ten others, each run on the GPUs of one machine.

    python benchmarks/proof.py FOLDER SECONDS MODEL BATCH TOKENS PROFILE_SECONDS SEED

A profile, layers beside messages and costs, then a search: its first five; ZeRO-1, ZeRO-3, tp and
pp with the largest microbatch that fits, without recomputation if that fits at all; and three
layouts drawn from all legal ones. The first three run by turns. What would begin after SECONDS is
left to the next call, which goes on in the same folder; several may work in one folder, each on its
own GPUs.
"""

import json
import os
import random
import sys
import time
from pathlib import Path
from statistics import median

import meshwise
from meshwise.options.measure import OverlapOptions
from meshwise.search.space import legal_layouts
from meshwise.spec import Layout, Plan, Workload
from meshwise.verbs.files import prices, take

BY_HAND = {
    "zero1": {"dp": 2, "zero": 1},
    "zero3": {"dp": 2, "zero": 3},
    "tp": {"tp": 2, "sequence_parallel": True},
    "pp": {"pp": 2, "schedule": "1f1b"},
}
DRAWN, TURNS, STEPS = 3, 2, 10


def main(folder: Path, limit_s: float, model: str, work: Workload, budget: str, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    if _claimed("costs"):
        _measure(model, budget, work.seq_len)
        _plan(model, work, seed)
        Path("planned").touch()
    while not Path("planned").exists():  # another process measures
        if time.monotonic() - BEGUN > limit_s:
            return print("not run: nothing was planned in time")
        time.sleep(1)
    names = [path.stem.removeprefix("plan-") for path in Path().glob("plan-*.json")]
    names.sort(key=lambda name: (name.startswith("drawn"), name))
    firsts = [name for name in names if name in ("rank1", "rank2", "rank3")]
    for turn in range(TURNS):
        for name in [*firsts, *(name for name in names if name not in firsts)]:
            if time.monotonic() - BEGUN > limit_s:
                print(f"not run: {name}, turn {turn}", flush=True)
            elif _claimed(f"{name}-{turn}" if name in firsts else name):
                _run(name, STEPS if name in firsts else TURNS * STEPS)


def _claimed(what: str) -> bool:
    """Return whether this process is the one that does it."""
    try:
        Path(f"{what}.claimed").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _measure(model: str, budget: str, tokens: int) -> None:
    meshwise.measure("profile", model=(model,), budget=budget, seq_len=tokens, nproc=2)
    meshwise.measure(OverlapOptions(model=(model,), layers=True, nproc=2, seq_len=tokens))
    meshwise.calibrate(tuple(sorted(Path("runs").iterdir())))
    print(f"measured ({time.monotonic() - BEGUN:.0f} s)", flush=True)


def _plan(model: str, work: Workload, seed: int) -> None:
    about = {"global_batch_size": work.global_batch_size, "seq_len": work.seq_len}

    def priced(name: str, layout: Layout) -> bool:
        """Return whether the layout is predicted to fit; keep its plan if so."""
        plan = meshwise.plan(model, layout=layout, gpus=2, out=f"{name}.json", **about)
        fits = plan.prediction.peak_memory_bytes <= plan.cluster.usable_bytes
        if fits:
            known.add(layout)
            Path(f"{name}.json").rename(f"plan-{name}.json")
            print(f"{name}: {layout.name}, told {1e3 * plan.prediction.step_time_s:.1f} ms")
        return fits

    best = meshwise.plan(model, gpus=2, top=5, out="plan.json", **about)
    known = set[Layout]()
    firsts = [best.layout, *[each.layout for each in best.runners_up]][:5]
    for rank, layout in enumerate(firsts, 1):
        priced(f"rank{rank}", layout)
    for name, fields in BY_HAND.items():
        whole = work.global_batch_size // fields.get("dp", 1)
        tries = [
            Layout(**fields, recompute=word, microbatch_size=whole // count, num_microbatches=count)
            for word in ("none", "full")
            for count in (1, 2, 4, 8, 16, 32)
            if whole % count == 0 and (count > 1 or "pp" not in fields)
        ]
        if not any(layout in known or priced(name, layout) for layout in tries):
            print(f"{name}: does not fit")
    every = [*legal_layouts(best.model, work, prices("costs.json"), 2)[0]]
    random.Random(seed).shuffle(every)
    count = 0
    for layout in every:
        if layout not in known:
            count += priced(f"drawn{count + 1}", layout)
        if count == DRAWN:
            break
    for left in [path for path in Path().glob("*.json") if path.stem in (*BY_HAND, "plan")]:
        left.unlink()


def _run(name: str, steps: int) -> None:
    began, plan = time.monotonic(), take(f"plan-{name}.json", Plan)
    try:
        (run_dir,) = meshwise.run(f"plan-{name}.json", steps=steps, warmup=3)
    except Exception as error:  # the other plans go on
        print(f"failed: {name} {plan.layout.name}: {str(error)[:200]}", flush=True)
        return
    lines = map(json.loads, (run_dir / "steps.jsonl").read_text().splitlines())
    took = median(line["time_s"] for line in lines if "time_s" in line)
    told = plan.prediction.step_time_s
    print(
        f"{name} {plan.layout.name}: told {1e3 * told:.1f} ms, ran {1e3 * took:.1f} "
        f"({told / took - 1:+.1%}), in {time.monotonic() - began:.0f} s",
        flush=True,
    )


if __name__ == "__main__":
    BEGUN = time.monotonic()
    where, limit, name, batch, tokens, budget, seed = sys.argv[1:]
    work = Workload(global_batch_size=int(batch), seq_len=int(tokens))
    main(Path(where).resolve(), float(limit), name, work, f"{budget}s", int(seed))
