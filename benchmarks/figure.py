"""Predicted against measured step times of run directories, as one SVG for a README.

python benchmarks/figure.py benchmarks/2026-11-21-gpt-2.6b-4xh200
"""

import sys
from pathlib import Path

from meshwise import store
from meshwise.pages import figures, steps, svg

folder = Path(sys.argv[1])
results = steps.results(store.runs_of(folder / "runs", "run"))
figure = figures.against([r for r in results if r.time is not None], "time")
assert figure is not None
(folder / "predicted-measured.svg").write_text(svg.standalone(figure))
