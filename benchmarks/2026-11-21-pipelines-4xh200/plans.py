"""Pipeline plans of GPT-2.6B by hand, each priced from the costs of one machine.

    python plans.py COSTS OUT

A plan holds its layout and what ``meshwise.search.given`` says of it; ``meshwise run`` takes it.
"""

import sys
from pathlib import Path

from meshwise import store
from meshwise.models import catalogue
from meshwise.search import given
from meshwise.spec import Costs, Layout, Workload

MODEL, WORKLOAD = catalogue.get("gpt-2.6b"), Workload(global_batch_size=32, seq_len=1024)
TWO = {"schedule": "1f1b", "pp": 2, "dp": 2, "zero": 1, "microbatch_size": 4, "num_microbatches": 4}
FOUR = {"schedule": "1f1b", "pp": 4, "microbatch_size": 2, "num_microbatches": 16}
EIGHT = {"schedule": "1f1b", "microbatch_size": 4, "num_microbatches": 8}
LAYOUTS = {
    "a-pp2dp2": Layout(**TWO),
    "b-pp4": Layout(**FOUR),
    "c-int": Layout(**FOUR | {"schedule": "interleaved_1f1b", "stages_per_rank": 2}),
    "d-full": Layout(**TWO, recompute="full"),
    "e-sel": Layout(**FOUR, recompute="selective"),
    "f-uneven": Layout(**EIGHT, pp=3, layers=(10, 11, 11), meshes=((1, 1), (1, 1), (1, 2))),
    "g-tp": Layout(**EIGHT, pp=2, tp=2, sequence_parallel=True),
}

costs, out = store.read(Path(sys.argv[1]), Costs), Path(sys.argv[2])
out.mkdir(exist_ok=True)
for name, layout in LAYOUTS.items():
    plan = given(MODEL, WORKLOAD, costs, layout)
    store.write(out / f"{name}.json", plan)
    print(f"{name:9} {layout.name:50} {1e3 * plan.prediction.step_time_s:.1f} ms")
