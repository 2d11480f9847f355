"""Uneven all-to-alls: sizes by rule, errors, predictions from even ones, the notebook's pictures.

Rules are checked against the source's own formula on tables, laws against planted times.
"""

import csv
import json
from itertools import permutations
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.cli import app
from meshwise.fit.uneven import judge
from meshwise.pages import bandwidth as pages
from meshwise.prices import Prices
from meshwise.prices.laws import sigmoid_s
from meshwise.prices.uneven import RULES, as_even, even_bytes, is_uneven
from meshwise.probe.cases.sizes import embedding_splits, uneven
from meshwise.spec import Collective
from meshwise.stats import gmae, histogram
from meshwise.verbs import files
from meshwise.verbs.imports import import_files
from meshwise.verbs.report import bandwidth

DATA = Path(__file__).resolve().parents[1] / "data"
HEAD = DATA / "param_h200x4" / "general_all_to_allv_v100x4_head.csv"
RATE = 200e9  # bytes a second of the planted law


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def of_tables(text):
    sent = embedding_splits(text, "tables")
    return uneven(sent, len(sent), "fp32")


def of(splits):
    return uneven(tuple(map(tuple, splits)), len(splits), "fp32")


@pytest.mark.parametrize(
    ("tables", "busiest", "total", "max_of_max", "max_of_sum"),
    [  # worked out by hand in the reference, for four ranks
        ("2048,1-1-1-1,64", 524288, 524288, 393216, 786432),
        ("2048,2-3-3-5,64", 2621440, 1703936, 1966080, 3014656),
        ("256,1-1-1-2,32", 65536, 40960, 49152, 73728),
        ("4096,13-0-0-0,128", 27262976, 6815744, 20447232, 20447232),
    ],
)
def test_published_examples_of_each_rule(tables, busiest, total, max_of_max, max_of_sum):
    op = of_tables(tables)
    assert [even_bytes(op, rule) for rule in RULES] == [busiest, total, max_of_max, max_of_sum]


def adjusted_size(batch, tables, dim, kind):
    """The source's get_adjusted_size, on tables."""
    n, total = len(tables), sum(tables)
    if kind == "sum":
        count = total
    elif kind == "max_of_max":
        count = max(max(total - t, t * (n - 1)) for t in tables)
    else:
        count = max(total - t + t * (n - 1) for t in tables)
    return batch // n * count * dim * 4


TABLES = st.lists(st.integers(0, 20), min_size=2, max_size=8)


@given(st.integers(1, 64), TABLES, st.integers(1, 256))
def test_rules_on_splits_are_the_source_s_on_tables(rows, tables, dim):
    batch = rows * len(tables)
    op = of_tables(f"{batch},{'-'.join(map(str, tables))},{dim}")
    for rule in ("sum", "max_of_max", "max_of_sum"):
        assert even_bytes(op, rule) == adjusted_size(batch, tables, dim, rule)


SPLITS = st.integers(2, 4).flatmap(
    lambda n: st.lists(
        st.lists(st.integers(0, 2**40), min_size=n, max_size=n), min_size=n, max_size=n
    )
)


@given(SPLITS)
def test_sizes_do_not_depend_on_the_order_of_ranks_or_the_direction(splits):
    n = len(splits)
    sizes = [even_bytes(of(splits), rule) for rule in RULES]
    assert [even_bytes(of(np.transpose(splits).tolist()), rule) for rule in RULES] == sizes
    for order in permutations(range(n)):
        moved = [[splits[i][j] for j in order] for i in order]
        assert [even_bytes(of(moved), rule) for rule in RULES] == sizes


@given(st.integers(2, 9), st.integers(0, 2**40), st.integers(0, 2**40))
def test_what_a_rank_keeps_costs_nothing_and_even_exchanges_keep_their_size(n, part, kept):
    op = of([[kept if i == j else part for j in range(n)] for i in range(n)])
    assert even_bytes(op) == n * part and not is_uneven(op)
    assert even_bytes(op, "max_of_max") == (n - 1) * part
    assert even_bytes(op, "max_of_sum") == 2 * (n - 1) * part
    even = as_even(op)
    assert even.size_bytes == n * part and even.splits == ((part,) * n,) * n


def test_a_collective_without_splits_keeps_its_size_and_unknown_rules_are_named():
    op = Collective(kind="all_to_all", size_bytes=100, group_size=4)
    assert even_bytes(op) == 100
    with pytest.raises(ValueError, match="rule = 'most': must be one of busiest, sum, max_of_max"):
        even_bytes(op, "most")


def test_errors_are_averaged_and_counted_as_the_source_does():
    errors = [0, 0.05, 0.0499, 0.1, 4, 5, 0.3]
    assert gmae(errors) == pytest.approx(0.12953, abs=5e-6)
    assert gmae([-0.3]) == pytest.approx(0.3004)
    bins = histogram(errors)
    assert len(bins) == 15
    assert bins[0, 0.05] == pytest.approx(2 / 7)  # 0.05 is in the next
    assert bins[0.05, 0.1] == bins[0.1, 0.15] == bins[0.3, 0.4] == pytest.approx(1 / 7)
    assert sum(bins.values()) == pytest.approx(5 / 7)  # from 4 on, errors are in none
    with pytest.raises(ValueError, match="GMAE of no errors"):
        gmae([])


def table(path, exchanges, time_us):
    """Write a CSV of batch, tables and dimension. ``time_us`` of the busiest rank's even size."""
    with open(path, "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["btd", "size_bytes", "latency_us"])
        for batch, tables, dim in exchanges:
            n, total, share = len(tables), sum(tables), batch // len(tables) * dim * 4
            most = max((n - 1) * max(tables), total - min(tables)) * share
            row = f"{batch},{'-'.join(map(str, tables))},{dim}", share * total
            out.writerow([*row, time_us(n / (n - 1) * most)])
    return path


EVEN = [(256, (1, 1, 1, 1), 2**i) for i in range(2, 18)]
UNEVEN = [(2048, (2, 3, 3, 5), 64), (256, (1, 1, 1, 2), 32), (4096, (13, 0, 0, 0), 128)]


def stored(*paths, cluster="p3.16xlarge"):
    run_dirs = import_files(paths, cluster=cluster, runs="runs")
    return run_dirs, [files.load(path) for path in run_dirs]


def test_each_rule_is_off_by_its_scale_where_times_are_planted():
    """Times in proportion to the busiest rank's bytes: a rule is off as its size is."""
    path = table("a.csv", EVEN + UNEVEN, lambda size: 1e6 * size / RATE)
    costs, judged = judge(stored(path)[1])
    (curve,) = costs.curves
    assert len(curve.x_bytes) == len(EVEN)  # no uneven exchange is a knot
    assert [one.rule for one in judged] == list(RULES)
    for one in judged:
        expected = [
            even_bytes(of_tables(f"{b},{'-'.join(map(str, t))},{d}"), one.rule)
            for b, t, d in UNEVEN
        ]
        assert one.size_bytes.tolist() == expected
        assert one.predicted_s == pytest.approx(np.asarray(expected) / RATE, rel=1e-6)
    busiest, total, *_ = judged
    assert busiest.gmae == pytest.approx(4e-4, rel=0.01) and busiest.mean < 1e-6
    off = np.asarray([1 - 1703936 / 2621440, 1 - 40960 / 65536, 0.75])
    assert total.errors == pytest.approx(off, abs=1e-6)
    assert total.mean == pytest.approx(off.mean()) and total.std == pytest.approx(off.std(ddof=1))
    assert total.gmae == pytest.approx(np.exp(np.log(off + 4e-4).mean()))


def test_the_published_rows_are_predicted_from_the_even_ones_among_them():
    """Five rows of 4 V100, all of them at the floor of 91 us: four even, one uneven."""
    _, judged = judge(stored(HEAD)[1])
    assert [len(one.errors) for one in judged] == [1] * 4
    assert all(one.mean < 0.01 and one.std == 0 for one in judged)


def test_a_log_of_even_all_to_alls_prices_uneven_ones_and_says_so():
    """Logs of nccl-tests have no splits: all_to_all stands in, as of another way of calling."""
    log = DATA / "nccl_tests_a100x8" / "nccl_alltoall.log"
    _, runs = stored(log, cluster="dgx-a100-80gb")
    costs, judged = judge(runs)
    prices = Prices(costs)
    even = Collective(kind="all_to_all", size_bytes=2**26, group_size=8, dtype="fp32")
    parts = tuple(tuple(2**23 * (i != j) for j in range(8)) for i in range(8))
    op = uneven(parts, 8, "fp32")
    assert not judged and op.size_bytes == 7 * 2**23 and not is_uneven(op)
    found, plain = prices.estimate(op), prices.estimate(even)
    assert found.time_s == plain.time_s and found.source == "transferred"
    assert found.error > plain.error and "all_to_all 8 by" in found.note


def test_exchanges_of_nothing_cost_nothing():
    costs, _ = judge(stored(HEAD)[1])
    parts = tuple(tuple(100 * (i == j) for j in range(4)) for i in range(4))
    assert Prices(costs).estimate(uneven(parts, 4, "fp32")).time_s == 0


def test_turning_points_and_errors_are_those_of_the_source_s_code():
    rows = csv.DictReader((DATA / "source_model" / "source_model_on_a100x8_goldens.csv").open())
    known = {row["collective"]: row for row in rows}
    logs = sorted((DATA / "nccl_tests_a100x8").glob("*.log"))
    found = bandwidth(*stored(*logs, cluster="dgx-a100-80gb")[0], law="sigmoid")
    for curve in found.costs.curves:
        if not curve.like.in_place:
            row = known.pop(curve.like.kind)
            assert np.log2(pages.turning(curve)).tolist() == [
                float(row["ln_p"]), float(row["sats_p"])
            ]  # fmt: skip
            x, t = np.asarray(curve.x_bytes), np.asarray(curve.time_s)
            errors = sigmoid_s(curve.laws["sigmoid"].parameters, x) / t - 1
            mean, geometric, _ = map(float, list(row.values())[-3:])
            assert np.abs(errors).mean() == pytest.approx(mean, rel=0.02)
            assert gmae(errors) == pytest.approx(geometric, rel=0.02)
    assert not known and [path.name for path in found.paths] == ["latency_bw.png", "fits.png"]


def test_pictures_have_the_notebook_s_names_and_rows_that_ranks_do_not_divide_are_flagged(capsys):
    path = table("a.csv", EVEN + UNEVEN, lambda size: 20 + 1e6 * size / RATE)
    with open(path, "a") as file:
        file.write('"2050,1-2-3-4,64",1310720,100.0\n')
    (run_dir,), _ = stored(path)
    with pytest.raises(SystemExit) as ended:
        app.main(["report", str(run_dir), "--bandwidth", "figures"])
    said = capsys.readouterr()
    assert ended.value.code == 0
    assert "batch = 2050: is not divisible by 4 ranks" in said.err
    (busiest,) = (line for line in said.out.splitlines() if " busiest " in line)
    assert " 3 " in busiest and busiest.endswith("100.0 %")  # three exchanges, all within 10 %
    contents = {path.name: path.read_bytes() for path in Path("figures").iterdir()}
    assert contents.keys() == {"latency_bw.png", "fits.png", "a2a.png", "a2a.pdf"}
    assert contents["a2a.pdf"].startswith(b"%PDF")
    assert all(contents[n].startswith(b"\x89PNG") for n in contents if n.endswith("png"))
    again = bandwidth(run_dir, output_dir="again")
    assert {path.name: path.read_bytes() for path in again.paths} == contents  # no clock in them


def test_green_lines_are_at_the_turning_points_of_each_panel():
    from matplotlib.figure import Figure

    path = table("a.csv", EVEN + UNEVEN, lambda size: 20 + 1e6 * size / RATE)
    costs, judged = judge(stored(path)[1])
    (one,) = pages.measured(costs)
    panels = [*pages.fits([one]), *pages.a2a(judged)]
    marked = []
    for paint in panels:
        axes = Figure().subplots()
        paint(axes)
        green = [line.get_xdata()[0] for line in axes.lines if line.get_color() == "green"]
        marked.append(tuple(green))
    assert marked == [pages.turning(one.curve)] * 5 + [()] * 4  # fits, four rules, histograms
    assert len(pages.turning(one.curve)) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--bandwidth .", "error: run: no run is named; give runs of collectives"),
        ("--law sigmoid", "error: --law = 'sigmoid': only --bandwidth fits anything"),
        ("--bandwidth . --scaling .", "error: scaling and bandwidth: only one of them"),
        ("--bandwidth . nowhere", "error: nowhere is not a run directory"),
    ],
)
def test_what_bandwidth_lacks_is_named(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        app.main(["report", *words.split()])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_uneven_exchanges_alone_cannot_be_predicted_and_one_even_size_can():
    _, runs = stored(table("a.csv", UNEVEN, lambda size: size))
    with pytest.raises(
        ValueError, match="3 uneven exchanges and no even ones to predict them from"
    ):
        judge(runs)
    _, even = stored(table("b.csv", EVEN[:1], lambda size: size))
    costs, (busiest, *_) = judge([*runs, *even])
    assert len(busiest.errors) == 3 and pages.pictures(costs, [busiest])
    fitted, _ = pages.tables(costs, [busiest])
    assert fitted.rows[0][2:4] == ("–", "–")  # neither an error nor turning points of one point


def test_runs_without_collectives_are_refused():
    copies = msgspec.structs.replace(judge(stored(HEAD)[1])[0], curves=())
    with pytest.raises(ValueError, match="no collective was measured in these runs"):
        pages.pictures(copies, [])


def test_show_price_takes_tables_and_a_rule(capsys):
    from meshwise import store

    store.write("costs.json", judge(stored(table("a.csv", EVEN, lambda x: x))[1])[0])
    asked = "all_to_all_v --tables 2048,2-3-3-5,64 --dtype fp32 --regime blocking"
    for rule, size in (("", 2621440), ("--rule sum", 1703936), ("--rule max_of_sum", 3014656)):
        with pytest.raises(SystemExit):
            app.main(["show", "price", *asked.split(), *rule.split(), "--json"])
        (found,) = json.loads(capsys.readouterr().out)
        assert found["time_s"] == pytest.approx(1e-6 * size, rel=1e-6)
