"""compare: take two runs, return the ratio of every case they share and a verdict."""

from pathlib import Path

from meshwise.pages import compare as pages
from meshwise.pages.compare import Comparison
from meshwise.verbs import files


def compare(
    a: Path | str, b: Path | str, *, fail_if: str | None = None, force: bool = False
) -> Comparison:
    """Tell whether run ``b`` is faster than run ``a``. Both are run directories or samples.jsonl.

    ``fail_if``: ``slower>5%`` or ``faster>5%``; ``failed`` then has the cases that match. Samples
    of different timing methods or regimes are refused unless ``force``. Two layouts of one model,
    workload, dtype and cluster are compared by their steps.
    """
    (info_a, samples_a), (info_b, samples_b) = files.load(a), files.load(b)
    return pages.compare(
        (str(a), samples_a),
        (str(b), samples_b),
        fail_if=fail_if,
        force=force,
        layouts=info_a.cluster == info_b.cluster,
    )
