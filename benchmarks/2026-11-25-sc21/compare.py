"""Plans by data sheet against table 1 of Megatron SC'21.

    PYTHONPATH=. python benchmarks/2026-11-25-sc21/compare.py [ROW...]

For each of its ten models (``tests/data/megatron_sc21``) four layouts are priced, and appended to
records.jsonl beside this file, one model a line; the table is printed.

    theirs   their degrees (pp, dp, tp) with what they had: no ZeRO, all recomputed, 1F1B plain or
             interleaved; of the microbatches (16 at most) and stages a rank, which they do
             not name, the fastest that fit
    options  the fastest of any degrees with what they had
    degrees  the fastest of their degrees with all that we have
    best     the fastest of all

Megatron had neither ZeRO nor sequence parallelism nor selective recomputation then. So ``theirs``
beside ``options`` says whether we would rank their layouts as they did, ``theirs`` beside ``best``
what those bring, and ``degrees`` beside ``best`` whether their degrees would be ours.

``unfused_s`` is what attention took then beyond what it is priced at, counted, not fitted.
Products, softmax and dropout were kernels of their own, which wrote and read all pairs of query and
key, masked ones too. In 16 bits a pair moves, beside two products forward and four backward (2
bytes each), 4 bytes for softmax and 5 for dropout and its mask forward, 6 and 5 backward; forward
runs twice, as all is recomputed. Rates are those of the data-sheet tier.
"""

import sys
from pathlib import Path
from typing import Any

import msgspec

from meshwise.models import apply, graph
from meshwise.prices import Prices
from meshwise.prices.datasheet import Datasheet, attainable
from meshwise.search.find import _best_first, _ladders
from meshwise.search.space import legal_layouts
from meshwise.spec import Attention, Candidate, Layout
from tests.oracle.test_megatron_sc21 import HOST, ROWS, fastest, published

RECORDS = Path(__file__).parent / "records.jsonl"
PRODUCTS, OTHER_BYTES = 2 * 2 + 4, 2 * (4 + 5) + (6 + 5)  # of a pair
NAMES = ("theirs", "options", "degrees", "best")


def facts(candidate: Candidate) -> dict[str, Any]:
    predicted = candidate.prediction
    return {
        "name": candidate.layout.name,
        "layout": candidate.layout,
        "step_s": predicted.step_time_s,
        "interval_s": (predicted.low_s, predicted.high_s),
        "peak_bytes": predicted.peak_memory_bytes,
        "parts_s": {part.name: part.value for part in predicted.time_parts},
    }


def unfused_s(model: Any, layout: Layout) -> float:
    """Seconds of a step, without waiting, that attention took longer than it is priced at."""
    inside = msgspec.structs.replace(layout.of_rank(0), num_microbatches=1)
    whole = graph(msgspec.structs.replace(model, layers=1), layout.microbatch_size, 2048, "bf16",
                  recompute=("full",))  # fmt: skip
    sheet, known = Datasheet(HOST), attainable()
    ops = [task.op for task in apply(whole, inside, "bf16").tasks]
    priced = [op for op in ops if isinstance(op, Attention)]
    priced_s = sum(sheet.time_s(op)[0] for op in priced)
    pairs = layout.microbatch_size * model.heads // layout.tp * 2048**2
    memory = HOST.device.peak_memory_bytes_per_s * known.memory.on(HOST.device.name)
    rate = HOST.device.peak_flops["bf16"] * known.gemm.on(HOST.device.name)
    product_s = max(2 * model.head_dim / rate, 2 / memory)
    once_s = pairs * (PRODUCTS * product_s + OTHER_BYTES / memory) - priced_s
    return once_s * model.layers / layout.pp * layout.num_microbatches


def compared(row: dict[str, str]) -> dict[str, Any]:
    model, workload, costs, degrees = published(row)
    prices, limit = Prices(costs, datasheet=True), HOST.device.memory_bytes
    layouts, _ = legal_layouts(model, workload, costs, costs.cluster.num_devices)

    def free(some: list[Layout]) -> Candidate:
        ladders = [ladder for x in some for ladder in _ladders(x, model, 2048, prices)]
        ranked, _ = _best_first(model, workload, prices, ladders, limit, 1)
        return ranked[0]

    own = [x for x in layouts if (x.pp, x.dp, x.tp) == degrees]
    theirs = fastest(row)
    waits_s = sum(
        part.value for part in theirs.prediction.time_parts if part.name == "pipeline bubble"
    )
    step_s = theirs.prediction.step_time_s
    found = dict(
        zip(NAMES, (theirs, fastest(row, every=True), free(own), free(layouts)), strict=True)
    )
    return {
        "published": row,
        **{name: facts(candidate) for name, candidate in found.items()},
        "unfused_s": unfused_s(model, theirs.layout) * step_s / (step_s - waits_s),
    }


def line(found: dict[str, Any]) -> str:
    row, at = found["published"], {name: found[name]["step_s"] for name in NAMES}
    measured_s = float(row["iter_s_derived"])
    then_s = at["theirs"] + found["unfused_s"]
    cells = (
        f"{row['params_b']}B, {row['gpus']}", found["theirs"]["name"],
        f"{measured_s:.2f} s", f"{at['theirs']:.2f} s", f"{at['theirs'] / measured_s - 1:+.0%}",
        f"{then_s / measured_s - 1:+.0%}", f"{at['theirs'] / at['options']:.2f}",
        found["options"]["name"], f"{at['theirs'] / at['best']:.2f}",
        f"{at['degrees'] / at['best']:.2f}", found["degrees"]["name"], found["best"]["name"],
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main(wanted: list[int]) -> None:
    for row in [ROWS[number] for number in wanted]:
        found = compared(row)
        with RECORDS.open("ab") as records:
            records.write(msgspec.json.encode(found) + b"\n")
        print(line(found), flush=True)


if __name__ == "__main__":
    main([*map(int, sys.argv[1:])] or [*range(len(ROWS))])
