"""How often verdicts are right: launches of unchanged code drawn onto two sides, and one slowed.

python study.py 'RUNS/*'... prints a table for the launches of each pattern: of 200 comparisons of
every case, how many are called different (A/A), and how many slower after b's times were multiplied
by 1.03. at_random: launches drawn onto both sides; in_a_row: a's n launches in a row, then b's n.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np

from meshwise import stats, store
from meshwise.spec.label import label
from meshwise.verbs.compare import launches

COMPARISONS, SLOWDOWN = 200, 1.03
Times = list[tuple[float, ...]]


def pool(pattern: str) -> dict[str, Times]:
    """Return the times of each launch, oldest first, by case."""
    found = defaultdict(list)
    for run_dir in launches(pattern):
        for sample in store.load(run_dir)[1]:
            if sample.status == "ok":
                found[label(sample.case)].append(sample.times_s)
    return {case: times for case, times in found.items() if len(times) >= 12}


def at_random(of: Times, n: int) -> Iterator[tuple[Times, Times]]:
    rng = np.random.default_rng(1)
    for _ in range(COMPARISONS):
        order = rng.permutation(len(of))
        yield [of[i] for i in order[:n]], [of[i] for i in order[n : 2 * n]]


def in_a_row(of: Times, n: int) -> Iterator[tuple[Times, Times]]:
    for begin in range(len(of) - 2 * n + 1):
        yield of[begin : begin + n], of[begin + n : begin + 2 * n]


def judged(pairs: list[tuple[Times, Times]]) -> tuple[float, float, int]:
    """Return the shares called different, and slower once b is slowed; and how many pairs."""
    verdicts = Counter(stats.compare(a, b).verdict for a, b in pairs)
    slowed = ([[SLOWDOWN * time for time in times] for times in b] for _, b in pairs)
    found = [stats.compare(a, b).verdict for (a, _), b in zip(pairs, slowed, strict=True)]
    different = verdicts["faster"] + verdicts["slower"]
    return different / len(pairs), found.count("slower") / len(pairs), len(pairs)


def main() -> None:
    for pattern in sys.argv[1:]:
        cases = pool(pattern)
        print(f"\n{pattern}: launches apart, then different | slower by 3 % found")
        for way in (at_random, in_a_row):
            for n in (1, 3, 6, 12):
                totals = []
                for case, every in cases.items():
                    if len(every) < 2 * n:
                        continue
                    apart = float(np.log([np.median(times) for times in every]).std(ddof=1))
                    different, found, pairs = judged(list(way(every, n)))
                    totals.append((different * pairs, found * pairs, pairs))
                    told = f"{different:6.1%} | {found:6.1%}"
                    print(f"{way.__name__:9} {n:2} a side  {case:38} {apart:6.2%}  {told}")
                if totals:
                    a, b, pairs = (sum(column) for column in zip(*totals, strict=True))
                    told = f"{a / pairs:6.2%} | {b / pairs:6.2%}  of {pairs}"
                    print(f"{way.__name__:9} {n:2} a side  {'all':38} {'':6}  {told}")


if __name__ == "__main__":
    main()
