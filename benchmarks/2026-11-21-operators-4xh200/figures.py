"""Write the figures and print the figures of speed that README.md quotes: python figures.py

Everything comes from the run directories beside this file and the logs of nccl-tests in tests/data.
"""

from pathlib import Path
from statistics import mean, median

from meshwise import store
from meshwise.fit.calibrate import calibrate, expected_s
from meshwise.pages import operators, svg
from meshwise.prices import Prices
from meshwise.probe import importers
from meshwise.spec import Block, Collective, Costs, RunInfo, Sample
from meshwise.stats import geometric_mean

HERE = Path(__file__).parent
NCCL_TESTS = HERE.parent.parent / "tests" / "data" / "nccl_tests_h200x4"
Key = tuple[str, int]


def profile(time: str) -> tuple[RunInfo, list[Sample]]:
    """The run that started then."""
    (folder,) = (HERE / "runs").glob(f"20261121T{time}-*")
    return store.load(folder)[:2]


def run(time: str) -> list[Sample]:
    """Its samples."""
    return profile(time)[1]


def nccl_tests() -> dict[Key, Sample]:
    """Out of place, but where nccl-tests only has one."""
    found = [s for path in sorted(NCCL_TESTS.glob("*.txt")) for s in importers.read(path).samples]
    return {key(sample): sample for sample in found if not sample.case.op.in_place}


def key(sample: Sample) -> Key:
    op = sample.case.op
    assert isinstance(op, Collective)
    return op.kind, op.size_bytes


def against_nccl_tests(samples: list[Sample], reference: dict[Key, Sample]) -> None:
    """Mean time over nccl-tests' mean time, by how the calls were made."""
    ways: dict[tuple[str, str], dict[Key, float]] = {}
    for sample in samples:
        if sample.status == "ok" and key(sample) in reference:
            assert sample.metrics["wrong"] == 0
            ratio = mean(sample.times_s) / mean(reference[key(sample)].times_s)
            way = (sample.case.backend or "torch", sample.case.regime)
            ways.setdefault(way, {}).setdefault(key(sample), ratio)
    for (backend, regime), ratios in ways.items():
        large = sorted((r, k) for k, r in ratios.items() if k[1] >= 2**24)
        worst = [f"{k[0]} {k[1] >> 20} MiB {r:.3f}" for r, k in large[::-1] if r > 1.03]
        middle = geometric_mean(list(ratios.values()))
        print(f"{backend:9} {regime:9} {len(ratios)} points, geometric mean {middle:.3f}; "
              f"from 16 MiB at most {large[-1][0]:.3f}",
              "; ".join(worst[:5]))  # fmt: skip


def repeated(first: list[Sample], second: list[Sample]) -> None:
    """Difference of medians of the cases that two runs share, from 50 us on."""
    before = {s.case_id: median(s.times_s) for s in first if s.status == "ok"}
    both = [(before[s.case_id], median(s.times_s)) for s in second if s.case_id in before]
    off = sorted(abs(b / a - 1) for a, b in both if a > 50e-6)
    middle, most = median(off), off[-1]
    print(f"{len(off)} cases measured twice: median difference {middle:.2%}, most {most:.2%}")


def bought(quick: list[Sample], full: list[Sample], costs: Costs) -> None:
    """How wrong the quick profile's prices are about what only the full one measured."""
    prices, known = Prices(costs), {s.case_id for s in quick}
    off: dict[str, list[float]] = {}
    for sample in full:
        op = sample.case.op
        if sample.status == "ok" and sample.case_id not in known and not isinstance(op, Block):
            try:
                error = abs(prices.estimate(op).time_s / expected_s(sample) - 1)
            except ValueError:
                off.setdefault(f"{type(op).__name__} without a price", []).append(0.0)
                continue
            off.setdefault(type(op).__name__, []).append(error)
    for name, errors in off.items():
        errors.sort()
        print(f"{name}: {len(errors)}, median error {median(errors):.1%}, "
              f"p90 {errors[int(0.9 * len(errors))]:.1%}")  # fmt: skip


def draw(times: tuple[str, ...], reference: list[Sample]) -> None:
    folders = [next((HERE / "runs").glob(f"20261121T{time}-*")) for time in times]
    info, samples = store.load(folders[0])[0], [s for time in times for s in run(time)]
    for part, figure in operators.figures(
        info, samples, reference=reference, reference_name="nccl-tests"
    ):
        path = HERE / f"{part.removesuffix('-cold').replace('-4_ranks', '')}.svg"
        path.write_text(svg.standalone(figure))
        print("wrote", path.name)


def main() -> None:
    reference = nccl_tests()
    graphs = [s for t in ("192915", "192950", "193029", "193047") for s in run(t)]
    against_nccl_tests(graphs, reference)
    repeated(run("192915"), run("193425"))
    repeated(run("193448"), run("193502"))
    bought(run("193528"), run("193703"), calibrate([profile("193528")]))
    draw(("192915", "193029", "193047"), list(reference.values()))
    for time in ("193126", "193217", "194726", "194954"):
        draw((time,), [])


if __name__ == "__main__":
    main()
