"""Turn measurements into prices, and ask them: what does an operation cost, how sure is that?

    python examples/ask_a_price.py                    # of stored runs of two H200
    python examples/ask_a_price.py runs/RUN...        # of your own

A size that was measured costs what was measured. Between such sizes a law holds, with its error.
Then ask: ``meshwise show price all_to_all 3MiB --group 2 --costs prices.json``.
"""

import sys
from pathlib import Path

import meshwise

STORED = Path(__file__).parents[1] / "benchmarks" / "2026-11-28-uneven"


def main() -> None:
    runs = sys.argv[1:] or sorted(str(path.parent) for path in STORED.rglob("run.json"))
    costs = meshwise.calibrate(tuple(runs), out="prices.json")
    print(f"{costs.cluster.name}: {len(costs.curves)} curves, {len(costs.surfaces)} surfaces")
    for curve in costs.curves:
        held_out, knots = curve.held_out, len(curve.x_bytes)
        print(
            f"{curve.like.kind}: {knots} knots, the law {curve.law} between them, "
            f"{held_out.median:.1%} off at {held_out.num_points} points that it had not seen"
        )


if __name__ == "__main__":
    main()
