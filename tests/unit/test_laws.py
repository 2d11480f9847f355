"""Laws of time against bytes, against scipy, the source's own figures and logs of 8 A100."""

import csv
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.interpolate import PchipInterpolator

from meshwise import store
from meshwise.fit import calibrate, laws
from meshwise.fit.curves import fit_curve
from meshwise.prices import Prices, times_of, unmeasured
from meshwise.prices.evaluate import from_curve
from meshwise.prices.laws import KnotTimes, cubic, law_s, sigmoid_s, slopes
from meshwise.probe import importers
from meshwise.spec import Cluster, Collective, Elementwise
from meshwise.verbs import files

DATA = Path(__file__).resolve().parents[1] / "data"
SOURCE = DATA / "source_model"
ABOUT = {"like": Elementwise(kind="copy", read_bytes=1, write_bytes=1), "runs": ()}
PARTS = {"all_reduce": 14, "broadcast": 8, "reduce": 8}  # eighths of its size that a rank sends


def logs():
    """Yield kind, in place, bytes and seconds of the six logs of 8 A100."""
    for path in sorted((DATA / "nccl_tests_a100x8").glob("*.log")):
        curves = {}
        for sample in importers.read(path).samples:
            op = sample.case.op
            if sample.status == "ok" and op.size_bytes:
                points = curves.setdefault((op.kind, op.in_place), {})
                points[op.size_bytes] = sample.times_s[0]
        for (kind, in_place), points in curves.items():
            x, t = (
                np.asarray(column, float) for column in zip(*sorted(points.items()), strict=True)
            )
            yield kind, in_place, x, t


@given(
    st.lists(st.tuples(st.floats(0.01, 3), st.floats(-2, 2)), min_size=2, max_size=12),
    st.floats(0, 1),
)
def test_cubics_are_those_of_scipy(steps, share):
    x, y = np.cumsum(np.asarray(steps), axis=0).T
    at = x[0] + share * (x[-1] - x[0])
    ours = cubic(at, x, y, slopes(x, y))
    assert ours == pytest.approx(float(PchipInterpolator(x, y)(at)), abs=1e-7)


def test_the_sigmoid_with_the_published_parameters_gives_the_published_times():
    known = json.loads((SOURCE / "source_model_dram_params.json").read_text())
    rows = list(csv.DictReader((SOURCE / "source_model_dram_goldens.csv").open()))
    for row in rows:
        of = known[row["gpu"]]
        ends = of["ln_p"], of["sats_p"], 1e9 * of["max_bw_gbps"], 1e-6 * of["overhead_us"]
        parameters = (*ends, *of["sigmoid_L_x0_k_b"], 1.0)
        found = sigmoid_s(parameters, np.asarray([float(row["size_bytes"])]))
        assert 1e6 * found[0] == pytest.approx(float(row["time_us"]), rel=1e-6)
    assert len(rows) > 50


def test_the_sigmoid_refitted_to_the_logs_is_what_the_source_s_code_fits():
    """In time, to 1e-3; the source fits bandwidths that were rounded to 0.01 GB/s."""
    rows = {
        row["collective"]: row
        for row in csv.DictReader((SOURCE / "source_model_on_a100x8_goldens.csv").open())
    }
    for kind, in_place, x, t in logs():
        if in_place:
            continue
        row = rows.pop(kind)
        bus = float(row["mul_factor"])
        assert bus == PARTS.get(kind, 7) / 8
        found = laws.sigmoid(x, t, bus)
        ends = float(row["max_bw"]) * 1e9, float(row["overhead"]) * 1e-6
        shape = (float(row[name]) for name in ("L", "x0", "k", "b"))
        theirs = (float(row["ln_p"]), float(row["sats_p"]), *ends, *shape, bus)
        assert found[:2] == theirs[:2]
        assert sigmoid_s(found, x) == pytest.approx(sigmoid_s(theirs, x), rel=1e-3)
    assert not rows


X = 2.0 ** np.arange(3, 33)
TRUE = {
    "alpha_beta": (20e-6, 1 / 200e9),
    "root": (15e-6, 2e-8, 1 / 300e9),
    "smooth": (15e-6, 4e-8, 0.5, 1 / 200e9, 2.5),
    "pieces": (10e-6, 1 / 20e9, 0.0, 30e-6, 1 / 100e9, 3.0 * 2**16, 90e-6, 1 / 200e9, 3.0 * 2**22),
    "nccl": (13e-6, 2 / 200e9, 25e-6, 1 / 0.92 / 200e9, 40e-6, 1 / 200e9),
}
LINES = [(6.5, 0.5), (12.5, 0.92), (20.0, 1.0)]  # NCCL's, in units of 2 us


@pytest.mark.parametrize("name", TRUE)
def test_a_law_is_recovered_from_its_own_times(name):
    t = law_s(name, TRUE[name], X)
    found = laws.fits(1.0, LINES)[name](X, t)
    inside = np.sqrt(X[1:] * X[:-1]) if name != "pieces" else X
    fitted, true = law_s(name, found, inside), law_s(name, TRUE[name], inside)
    assert fitted == pytest.approx(true, rel=0.02 if name == "smooth" else 1e-3)


def test_every_law_is_exact_at_knots():
    for _, _, x, t in logs():
        for name, fit in laws.fits(1.0, LINES).items():
            if name != "sigmoid":  # it is kept as its authors wrote it
                assert KnotTimes(name, fit(x, t), x, t)(x) == pytest.approx(t, rel=1e-12)


def left_out(x, t):
    """Yield measured and predicted times of every second point, for both halves."""
    for phase in (0, 1):
        mine = np.arange(len(x)) % 2 == phase
        others = ~mine & (x > x[mine][0]) & (x < x[mine][-1])
        curve = fit_curve(dict(zip(x[mine], t[mine], strict=True)), ABOUT)
        yield from zip(
            t[others], times_of(curve)(x[others]), alpha_beta(x, t, mine, others), strict=True
        )


def alpha_beta(x, t, mine, others):
    """Return what a line says of other points."""
    alpha, beta = laws.alpha_beta(x[mine], t[mine])
    return alpha + beta * x[others]


def test_no_curve_of_the_logs_is_worse_than_a_line():
    """In the median and at 9 of 10 of the sizes left out, curve by curve."""
    for kind, in_place, x, t in (curves := list(logs())):
        measured, ours, line = np.asarray(list(left_out(x, t))).T
        for share in (0.5, 0.9):
            off, plain = (np.quantile(np.abs(told / measured - 1), share) for told in (ours, line))
            assert off < plain, (kind, in_place, share)
    assert len(curves) == 12


def test_sizes_left_out_of_the_logs_are_predicted():
    """Lines in log-log are 1.4 % off in the median and 7.8 % at 9 of 10."""
    rows = np.asarray([row for *_, x, t in logs() for row in left_out(x, t)])
    errors = np.abs(rows[:, 1] / rows[:, 0] - 1)
    plain = np.abs(rows[:, 2] / rows[:, 0] - 1)
    assert len(errors) > 300
    assert np.median(errors) <= 0.012 and np.quantile(errors, 0.9) <= 0.08
    assert np.median(errors) < np.median(plain) / 4


def test_sizes_16_times_beyond_the_logs_are_predicted_where_times_are_proportional():
    errors = []
    for *_, x, t in logs():
        for n in range(6, len(x) - 3):
            if np.log(t[n - 1] / t[n - 2]) / np.log(x[n - 1] / x[n - 2]) >= 0.95:
                curve = fit_curve(dict(zip(x[:n], t[:n], strict=True)), ABOUT)
                errors.append(abs(times_of(curve)(x[n + 3]) / t[n + 3] - 1))
    assert len(errors) >= 8 and np.median(errors) <= 0.07


@pytest.mark.parametrize("name", [None, "dgx-a100-80gb"])
def test_sizes_16_times_beyond_the_logs_lie_in_the_interval_where_times_are_not_proportional(name):
    """With a data sheet and without, and no worse than the best line through all that was known."""
    cluster, rows = name and files.take(name, Cluster), []
    for kind, in_place, x, t in logs():
        of = Collective(kind=kind, size_bytes=1, group_size=8, in_place=in_place, dtype="fp32")
        about = {"like": of, "runs": (), "regime": "pipelined", "backend": "nccl"}
        for n in range(6, len(x) - 3):
            known = x[:n], t[:n]
            curve = fit_curve(dict(zip(*known, strict=True)), about, cluster, law="lines")
            found = from_curve(curve, times_of(curve), "", x[n + 3])
            off = found.time_s / t[n + 3]
            steep = np.log(t[n - 1] / t[n - 2]) / np.log(x[n - 1] / x[n - 2]) >= 0.95
            alpha, beta = laws.alpha_beta(*known)
            inside = 1 / (1 + found.error) <= off <= 1 + found.error
            rows.append(
                (steep, inside, abs(off - 1), abs((alpha + beta * x[n + 3]) / t[n + 3] - 1))
            )
    steep, inside, ours, line = np.asarray(rows, float).T
    assert len(rows) > 200 and inside[steep == 0].mean() >= 0.9
    assert np.median(ours) < np.median(line) and np.quantile(ours, 0.9) < np.quantile(line, 0.9)


@given(
    st.dictionaries(st.integers(1, 2**45), st.floats(1e-9, 1e6), min_size=1, max_size=14),
    st.booleans(),
)
def test_no_ragged_curve_raises(points, few):
    """Constant, falling, with outliers, of one or two points: whatever was measured."""
    curve = fit_curve(points, ABOUT, few=list(points)[:2] if few else ())
    assert {*curve.x_bytes, *(point.x_bytes for point in curve.no_knots)} == set(points)
    x = np.geomspace(1, 2**47, 50)
    assert np.all(times_of(curve)(x) > 0) and np.all(np.isfinite(times_of(curve)(x)))


@given(st.lists(st.floats(1e-3, 3), min_size=3, max_size=20), st.integers(0, 2**32))
def test_times_rise_with_bytes_if_all_measured_ones_do(rises, seed):
    x = np.cumprod(1 + np.random.default_rng(seed).uniform(0.5, 3, len(rises)))
    t = 1e-6 * np.exp(np.cumsum(rises))
    for name in ("lines", "cubic"):
        fine = KnotTimes(name, (), x, t)(np.geomspace(x[0], x[-1], 300))
        assert np.all(np.diff(fine) >= -1e-12 * fine[1:])


@given(
    st.lists(st.tuples(st.floats(0.5, 4), st.floats(-1, 3)), min_size=6, max_size=16),
    st.sampled_from(["lines", "cubic", "alpha_beta", "root", "smooth", "pieces", "nccl"]),
)
def test_between_two_knots_every_law_stays_between_them_and_does_not_turn_back(steps, name):
    """So a smaller message costs no more than a larger one where measured times rise; falls that
    were measured are kept."""
    growth, rise = np.asarray(steps).T
    x, t = np.exp(np.cumsum(growth)) * 100, 1e-5 * np.exp(np.cumsum(rise))
    parameters = laws.fits(1.0, LINES)[name](x, t)
    try:
        times = KnotTimes(name, parameters, x, t)
    except (ValueError, TypeError):  # a law that cannot be fitted to such knots
        return
    assert times(x) == pytest.approx(t, rel=1e-12)
    for first, last, low, high in zip(x, x[1:], t, t[1:], strict=False):
        between = times(np.geomspace(first, last, 97))
        steps_s = np.diff(between) if high >= low else -np.diff(between)
        assert np.all(steps_s >= -1e-12 * high - 1e-12 * low)
        assert between.min() >= min(low, high) * (1 - 1e-9)
        assert between.max() <= max(low, high) * (1 + 1e-9)


def test_a_law_that_is_asked_for_is_fitted_alone_and_as_beside_the_others():
    _, _, x, t = next(logs())
    points = dict(zip(x, t, strict=True))
    asked, usual = fit_curve(points, ABOUT, law="alpha_beta"), fit_curve(points, ABOUT)
    assert asked.law == "alpha_beta" and {*asked.laws} == {"alpha_beta", "cubic"}
    assert asked.laws.items() <= usual.laws.items() and len(usual.laws) > 5
    assert fit_curve({8: 1e-5, 16: 2e-5}, ABOUT, law="smooth").law == "cubic"  # too few for it


@pytest.mark.parametrize("factor", [5.0, 0.2])
@pytest.mark.parametrize("at", range(0, 29, 4))
def test_an_odd_point_is_no_knot_and_is_named(factor, at):
    *_, x, t = next(logs())
    points = dict(zip(x, t, strict=True))
    points[x[at]] *= factor
    (named,) = (each for each in fit_curve(points, ABOUT).no_knots if each.x_bytes == x[at])
    assert named.time_s == points[x[at]] and "times what the sizes around it say" in named.reason


def test_points_of_fewer_than_three_timings_are_no_knots():
    points = {2**i: 1e-5 + 2**i / 1e11 for i in range(4, 20)}
    curve = fit_curve(points, ABOUT, few=[2**7])
    assert [(one.x_bytes, one.reason) for one in curve.no_knots] == [(128, "fewer than 3 timings")]
    assert not fit_curve(points, ABOUT, few=list(points)).no_knots  # better than no curve


@pytest.mark.parametrize("factor", [5.0, 0.2])
@pytest.mark.parametrize("at", [0, 1, 10, 11])
def test_an_odd_point_at_an_end_does_not_cast_out_its_neighbour(factor, at):
    x = 2.0 ** np.arange(10, 34, 2)
    points = dict(zip(x, 20e-6 + 4e-12 * x, strict=True))
    points[x[at]] *= factor
    assert [each.x_bytes for each in fit_curve(points, ABOUT).no_knots] == [x[at]]


def test_times_that_fall_throughout_are_no_outliers():
    x = 2.0 ** np.arange(10, 34, 2)
    points = dict(zip(x, (20e-6 + 4e-12 * x)[::-1], strict=True))
    assert not fit_curve(points, ABOUT).no_knots


def test_latency_alone_leaves_a_wide_interval_beyond():
    op = Collective(kind="all_gather", size_bytes=1, group_size=4)
    cluster = files.take("h100-hgx", Cluster)
    points = dict.fromkeys((2.0 ** np.arange(10, 34, 2)).tolist(), 20e-6)
    curve = fit_curve(points, {"like": op, "runs": ()}, cluster)
    least, most = curve.end_range_s_per_byte
    assert 0 < least < 0.8 * curve.end_s_per_byte < 1.3 * curve.end_s_per_byte < most


@pytest.mark.parametrize("points", [{3072.0: 1.95e-3, 393216.0: 1.86e-3}, {393216.0: 1.86e-3}])
def test_times_that_do_not_rise_and_no_data_sheet_leave_the_last_rate(points):
    """Two small messages whose times are noise say nothing of a large one's: it is not free."""
    curve = fit_curve(points, ABOUT)
    assert times_of(curve)(2**26) == pytest.approx(1.86e-3 * 2**26 / 393216)


def test_a_steep_sigmoid_far_below_its_middle_is_its_base():
    parameters = (5.0, 40.0, 1e12, 1e-6, 2.0, 30.0, 1e3, 1.0, 1.0)
    with np.errstate(over="raise"):
        assert sigmoid_s(parameters, np.asarray([1024.0])) == pytest.approx(1024 / 10e9)


def test_below_the_first_knot_the_interval_reaches_to_what_the_slope_allows():
    op = Elementwise(kind="copy", read_bytes=1, write_bytes=0)
    points = {2.0**i: 20e-6 + 4e-12 * 2.0**i for i in range(26, 33)}
    costs = unmeasured(files.take("h100-hgx", Cluster))
    curve = fit_curve(points, {"like": op, "regime": "cold", "runs": ()})
    found = Prices(msgspec.structs.replace(costs, curves=(curve,))).estimate(op)
    assert found.source == "extrapolated" and "below the smallest" in found.note
    assert found.time_s / (1 + found.error) < 20e-6 < found.time_s


def test_the_sigmoid_s_interval_holds_its_price_at_every_knot_and_far_below(recwarn):
    """It has no knots: at the first, too, it is between sizes."""
    op = Collective(kind="all_gather", size_bytes=1, group_size=4)
    points = {2.0**i: 20e-6 + 2.0**i / 3e11 for i in range(10, 33)}
    curve = fit_curve(points, {"like": op, "runs": ()}, law="sigmoid")
    assert curve.law == "sigmoid"
    for x in points:
        found = from_curve(curve, times_of(curve), "", x)
        assert found.error >= 0 and found.source == "interpolated"
    steep = (2.0, 50.0, 3e11, 2e-5, 2.0, 30.0, 40.0, 0.0, 1.0)
    assert np.isfinite(sigmoid_s(steep, np.array([8.0]))).all() and not recwarn.list


@pytest.mark.parametrize("profile", ["h100-gpt-1.3b", "h100-llama-3-8b", "h200-gpt-2.6b"])
def test_the_optimizer_beyond_its_curve_takes_as_long_a_byte(profile):
    """The first sizes of stored curves, to 1 GiB, predict 4 GiB; hosts set the smallest times."""
    runs = Path(__file__).parents[2] / "benchmarks/2026-11-28-fresh" / profile / "runs"
    info, samples, *_ = store.load(next(runs.glob("*-measure-profile-*")))
    sized = [each for each in samples if isinstance(each.case.op, Elementwise)]
    short = [each for each in sized if each.case.op.bytes <= 1.1 * 2**30]
    (whole,) = (each for each in calibrate([(info, sized)]).curves if each.like.kind == "adamw")
    assert whole.x_bytes[-1] > 3.9 * 2**30
    last = int(whole.x_bytes[-1])
    op = msgspec.structs.replace(whole.like, read_bytes=last // 2, write_bytes=last - last // 2)
    found = Prices(calibrate([(info, short)])).estimate(op)
    assert found.source == "extrapolated" and found.error < 0.25
    assert found.time_s == pytest.approx(whole.time_s[-1], rel=0.05)
