"""Bad samples in ``calibrate``: named, left out by a stated rule, or refused; and with
one outlier among a size's samples, which moves nothing."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwise
from meshwise import store
from meshwise.fit import calibrate, doubts
from meshwise.models import block_ops, block_tasks
from meshwise.prices import Prices
from meshwise.spec import Attention, Block, Case, Cluster, Collective, Elementwise, Gemm, Sample
from meshwise.verbs import files
from tests import sample_records as known

SIZES = [2**power for power in range(12, 32, 2)]
SHEET = files.take("h100-hgx", Cluster)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def gather(size: int, kind="all_gather") -> Collective:
    return Collective(kind=kind, size_bytes=size, group_size=4)  # type: ignore[arg-type]


def gather_s(size: float) -> float:
    return 20e-6 + size / 3e11


def sample(op, times_s) -> Sample:
    cold = not isinstance(op, Collective)
    case = Case(op=op, regime="cold" if cold else "warm", world_size=4)
    return Sample(case_id=case.id, case=case, status="ok", times_s=tuple(times_s))


def thrice(op, time_s: float) -> Sample:
    return sample(op, [0.99 * time_s, time_s, 1.01 * time_s])


PRODUCTS = [Gemm(m=2**power, n=4096, k=4096) for power in range(6, 14)]
GATHERS = [thrice(gather(size), gather_s(size)) for size in SIZES]


def fitted(samples, cluster=SHEET):
    return calibrate([(msgspec.structs.replace(known.info(), cluster=cluster), list(samples))])


def calibrated(lines: list[str]):
    """Write a run of these lines and calibrate it."""
    run_dir = Path(known.write_run(Path("runs"), known.info(), []))
    (run_dir / "samples.jsonl").write_text("\n".join(lines) + "\n")
    return meshwise.calibrate(run_dir)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"times_s": [float("nan"), 1e-5]}, "times_s[0]: NaN is not a finite number"),
        ({"times_s": [1e-5, 0.0]}, "every time must be > 0 and finite"),
        ({"times_s": [-1e-5]}, "every time must be > 0 and finite"),
        ({"times_s": [1e999]}, "times_s[0]: Infinity is not a finite number"),
        ({"rank_times_s": [[1e-5], [-1e-5]]}, "Sample.rank_times_s = ((1e-05,), (-1e-05,)): every"),
        ({"rank_times_s": [[0.0]]}, "Sample.rank_times_s = ((0.0,),): every time must be > 0"),
        ({"rank_times_s": [[1e-5], []]}, "every rank must hold at least one time"),
        ({"metrics": {"saved_bytes": -1.0}}, "saved_bytes must be >= 0"),
        ({"times_s": [1e-5, 1e-90]}, "1e-12 to 1e+12 s, and one is 1e-90"),
        ({"times_s": [1e90]}, "1e-12 to 1e+12 s, and one is 1e+90"),
        ({"times_s": [-1.0] * 99}, "-1. ...: every time must be > 0"),
    ],
)
def test_a_line_with_an_impossible_time_is_left_out_and_named(bad, said, caplog):
    lines = [msgspec.json.encode(one).decode() for one in GATHERS]
    lines[3] = json.dumps(json.loads(lines[3]) | bad)
    (curve,) = calibrated(lines).curves
    assert [int(x) for x in curve.x_bytes] == SIZES[:3] + SIZES[4:]
    (warning,) = [one.message for one in caplog.records if "samples.jsonl" in one.message]
    assert "samples.jsonl:4 " in warning and said in warning


@pytest.mark.usefixtures("folder")
def test_a_case_on_two_lines_counts_once_and_is_named(caplog):
    lines = [msgspec.json.encode(one).decode() for one in GATHERS]
    again = msgspec.json.encode(thrice(gather(SIZES[2]), 1.1 * gather_s(SIZES[2]))).decode()
    (curve,) = calibrated([*lines, again, lines[5]]).curves
    assert curve.time_s[2] == pytest.approx(1.1 * gather_s(SIZES[2]))
    assert "samples.jsonl:11 and 1 more: a case that an earlier line has" in caplog.text


@pytest.mark.usefixtures("folder")
def test_a_run_named_twice_counts_once(caplog):
    """Twice two timings would be enough for a knot."""
    few = sample(gather(2**15), [gather_s(2**15)] * 2)
    run = known.write_run(Path("runs"), known.info(), [*GATHERS, few])
    costs = meshwise.calibrate((run, run))
    assert "named twice" in caplog.text and costs.runs == (known.MEASURE_RUN,)
    assert [point.x_bytes for point in costs.curves[0].no_knots] == [2**15]


@given(st.permutations(GATHERS))
@settings(max_examples=10)
def test_the_order_of_samples_does_not_count(shuffled):
    (one,), (other,) = fitted(shuffled).curves, fitted(GATHERS).curves
    assert msgspec.structs.replace(one, like=other.like) == other


def test_constant_times_and_few_sizes_are_named():
    flat = [thrice(gather(size), 20e-6) for size in SIZES]
    assert any("constant, all 10 sizes took 20.0 us" in said for said in doubts(fitted(flat)))
    often = [sample(product, [1e-4] * n) for n, product in zip((3, 7, 11), PRODUCTS, strict=False)]
    often += [sample(gather(size), [1e-4] * n) for n, size in zip((3, 7, 11), SIZES, strict=False)]
    for name in ("gemm bf16 nt cold", "all_gather 4 by nvlink"):  # means differ in the last bit
        assert f"{name}: constant, all 3 sizes took 100 us" in doubts(fitted(often))
    for n in (1, 2):
        (said,) = doubts(fitted(GATHERS[:n]))
        assert said.startswith("too few sizes") and said.endswith(f"all_gather 4 by nvlink ({n})")


@pytest.mark.parametrize(
    ("time_s", "said"),
    [
        (lambda size: 20e-6, "constant, all 10 sizes took"),
        (lambda size: 1e3 * gather_s(size), "times what its data sheet says, are the units right?"),
    ],
)
def test_prices_that_look_wrong_as_a_whole_say_so_and_are_100_percent_unsure(time_s, said):
    """At a measured size, between and beyond, and of what they stand in for."""
    prices = Prices(fitted([thrice(gather(size), time_s(size)) for size in SIZES]))
    asked = [gather(size) for size in (SIZES[3], SIZES[3] + 64, 4 * SIZES[-1])]
    for op in [*asked, msgspec.structs.replace(asked[0], dtype="fp32")]:
        found = prices.estimate(op)
        assert said in found.note and found.error >= 1
    assert Prices(fitted(GATHERS)).estimate(asked[0]).error < 0.02


def test_good_samples_raise_no_doubt():
    assert not doubts(fitted(GATHERS))
    assert not doubts(fitted(GATHERS, known.CLUSTER))


@pytest.mark.parametrize("factor", [1e3, 1e-3])
def test_a_curve_in_other_units_is_named_beside_its_data_sheet(factor):
    off = [thrice(gather(size), factor * gather_s(size)) for size in SIZES]
    (said,) = doubts(fitted(off))
    assert said.startswith("all_gather 4 by nvlink: all 10 points: ") and "data sheet" in said


@pytest.mark.parametrize("factor", [1e3, 1e-3])
def test_without_a_data_sheet_it_is_named_beside_other_curves(factor):
    """CPUs have none."""
    device = msgspec.structs.replace(known.CLUSTER.device, peak_memory_bytes_per_s=None)
    tiers = tuple(msgspec.structs.replace(t, bytes_per_s=None) for t in known.CLUSTER.tiers)
    bare = msgspec.structs.replace(known.CLUSTER, device=device, tiers=tiers)
    others = [
        thrice(gather(size, kind), gather_s(size))
        for size in SIZES
        for kind in ("all_reduce", "send_recv", "all_to_all")
    ]
    off = [thrice(gather(size), factor * gather_s(size)) for size in SIZES]
    (said,) = doubts(fitted([*others, *off], bare))
    assert said.startswith("all_gather 4 by nvlink: all 10 points: ") and "of its kind" in said
    assert not doubts(fitted([*others, *GATHERS], bare))


@pytest.mark.parametrize("factor", [1e3, 1e-3])
def test_a_point_in_other_units_is_no_knot_or_named(factor):
    at = SIZES[4]
    one = thrice(gather(at), factor * gather_s(at))
    (curve,) = fitted([one if s.case.op.size_bytes == at else s for s in GATHERS]).curves
    assert [point.x_bytes for point in curve.no_knots] == [at]
    few = doubts(fitted([GATHERS[0], one, GATHERS[8]]))  # too few to tell by each other
    assert any("all_gather 1.0 MiB x4" in said and "units" in said for said in few)


def product_s(op: Gemm) -> float:
    return 4e-6 + max(op.flops / 6e14, op.bytes / 3e12)


@pytest.mark.parametrize("factor", [1e3, 1e-3])
@pytest.mark.parametrize("at", range(len(PRODUCTS)))
def test_a_shape_in_other_units_is_left_out_and_named(factor, at):
    times_s = [product_s(op) for op in PRODUCTS]
    (good,) = fitted([thrice(op, t) for op, t in zip(PRODUCTS, times_s, strict=True)]).surfaces
    times_s[at] *= factor
    off = fitted([thrice(op, t) for op, t in zip(PRODUCTS, times_s, strict=True)])
    (surface,) = off.surfaces
    (named,) = surface.no_shapes
    assert named.startswith(f"{PRODUCTS[at].m}x4096x4096 (") and len(surface.shapes) == 7
    assert not good.no_shapes and surface.held_out.median < 0.5
    price = Prices(off).estimate(PRODUCTS[at])
    assert price.time_s == pytest.approx(product_s(PRODUCTS[at]), rel=1.0)


LAYERS = [Block(part="layer", model=known.MODEL, microbatch_size=n, seq_len=64) for n in (1, 4, 16)]


def layers(factors) -> list[Sample]:
    """Layers that take so many times the sum of their operations, beside these."""
    ops = {op: 1e-5 + op.bytes / 3e12 for layer in LAYERS for op in block_ops(layer)}
    copies = [Elementwise(kind="copy", read_bytes=op.bytes, write_bytes=0) for op in ops]
    ops |= {copy: 1e-5 + copy.bytes / 3e12 for copy in copies}
    known_s = Prices(fitted(thrice(op, time_s) for op, time_s in ops.items()))
    blocks = []
    for layer, factor in zip(LAYERS, factors, strict=True):
        time_s = factor * known_s.composed_s(block_tasks(layer))
        case = Case(op=layer, world_size=4, lowering="compiled")
        blocks.append(Sample(case_id=case.id, case=case, status="ok", times_s=(time_s,) * 3))
    return [*(thrice(op, time_s) for op, time_s in ops.items()), *blocks]


@pytest.mark.parametrize("factor", [3e4, 1e-4])
def test_layers_in_other_units_are_named(factor):
    assert not [said for said in doubts(fitted(layers([2, 2, 2]))) if "layer" in said]
    (all_off,) = [one for one in doubts(fitted(layers([factor] * 3))) if one.startswith("layer")]
    assert "all 3 points" in all_off and "its operations say, are the units right?" in all_off
    (one_off,) = [one for one in doubts(fitted(layers([2, 2, factor]))) if one.startswith("layer")]
    assert f"{LAYERS[2].activation_elements:g} elements" in one_off


@pytest.mark.usefixtures("folder")
def test_whatever_is_half_off_at_points_left_out_is_said_to_be_too_noisy(caplog):
    """Products whose times say nothing of each other, and a layer of which one size does not."""
    halves = [msgspec.structs.replace(op, dtype="fp16") for op in PRODUCTS]
    products = [thrice(op, product_s(op) * (1, 7)[at % 2]) for at, op in enumerate(halves)]
    run = known.write_run(Path("runs"), known.info(), [*layers([2, 40, 2]), *products])
    costs = meshwise.calibrate(run)
    for name in ("gemm fp16 nt cold", "layer gpt"):
        assert [one for one in caplog.messages if name in one and "too noisy" in one], name
    prices = Prices(costs)
    assert (
        "too noisy to plan with" in prices.estimate(Gemm(m=700, n=4096, k=4096, dtype="fp16")).note
    )
    assert not prices.estimate(halves[0]).note  # measured itself
    prices.factor(LAYERS[0], block_tasks(LAYERS[0]))
    assert any(note.startswith("layer") and "too noisy" in note for note in prices.notes)


@pytest.mark.usefixtures("folder")
def test_runs_that_price_nothing_are_refused_with_what_to_do():
    run = known.write_run(Path("runs"), known.info(), [])
    with pytest.raises(ValueError, match="no sample that prices rest on; name runs of measure"):
        meshwise.calibrate(run)
    assert not Path("costs.json").exists()


def test_a_single_timing_has_the_scatter_of_its_curve_as_noise():
    """A row of a log: its price is measured, but nobody knows how well."""
    rng = np.random.default_rng(0)
    rows = [sample(gather(s), [gather_s(s) * np.exp(0.03 * rng.standard_normal())]) for s in SIZES]
    (curve,) = fitted(rows).curves
    assert curve.noise == curve.held_out.median > 0.005
    (alone,) = fitted(rows[:1]).curves
    assert alone.noise == 1.0
    (repeated,) = fitted(GATHERS).curves
    assert repeated.noise == pytest.approx(0.01)


def test_a_mean_that_a_few_long_times_pull_up_is_as_unsure_as_it_is_far_from_the_median():
    """Two programs share the cores: most calls take 1 ms, one in five takes 4. Of attention
    on a GPU it was the host that came late: the median counts."""
    times_s = [1e-3] * 80 + [4e-3] * 20
    found = Prices(fitted([sample(PRODUCTS[0], times_s)])).estimate(PRODUCTS[0])
    assert found.time_s == pytest.approx(1.6e-3)
    assert found.time_s / (1 + found.error) == pytest.approx(1e-3)
    attention = Attention(batch=1, q_len=512, kv_len=512, heads=8, kv_heads=8, head_dim=64)
    assert Prices(fitted([sample(attention, times_s)])).estimate(attention).time_s == 1e-3


def test_two_prices_of_one_category_are_refused_by_name():
    costs = fitted(GATHERS)
    (one,) = costs.curves
    other = msgspec.structs.replace(one, time_s=tuple(2 * t for t in one.time_s))
    with pytest.raises(ValueError, match=r"costs: two prices of all_gather 4 by nvlink; make them"):
        Prices(msgspec.structs.replace(costs, curves=(one, other)))
    Prices(msgspec.structs.replace(costs, curves=(one, one)))  # that say the same


COPIES = [Elementwise(kind="copy", read_bytes=size, write_bytes=size) for size in SIZES]
ASKED = [
    *(gather(int(size)) for size in np.geomspace(1000, 2**34, 25)),
    *(Elementwise(kind="copy", read_bytes=int(x), write_bytes=0) for x in (1e3, 3e5, 1e7, 3e10)),
    *(Gemm(m=m, n=n, k=2000) for m in (100, 1500, 10000) for n in (700, 9000)),
]  # fmt: skip


@given(
    st.integers(3, 30), st.integers(0, 2**32), st.integers(0, 2**16), st.sampled_from([5.0, 0.2])
)
@settings(max_examples=30)
def test_one_five_fold_outlier_moves_no_price_by_more_than_a_twentieth(n, seed, at, factor):
    """Any of ``n`` timings of any case, which scatter by 1 %; and it is no other law's victory."""
    rng = np.random.default_rng(seed)
    times = {
        op: time_s * np.exp(0.01 * rng.standard_normal(n))
        for op, time_s in [
            *((gather(size), gather_s(size)) for size in SIZES),
            *((op, 3e-6 + op.bytes / 3e12) for op in COPIES),
            *((op, product_s(op)) for op in PRODUCTS),
        ]
    }
    before = Prices(fitted(sample(op, each) for op, each in times.items()))
    victim = list(times)[at % len(times)]
    times[victim][at % n] *= factor
    after = Prices(fitted(sample(op, each) for op, each in times.items()))
    for op in (*ASKED, *times):
        assert after.estimate(op).time_s == pytest.approx(before.estimate(op).time_s, rel=0.05)


@pytest.mark.parametrize("factor", [5.0, 0.2])
@pytest.mark.parametrize(
    "times_us", [(16.33, 17.3, 16.36), (16.3, 16.4, 17.3, 17.4), (16.2, 16.3, 16.4, 17.3, 17.4)]
)
def test_one_outlier_of_a_few_unequal_timings_moves_no_price_by_more_than_a_twentieth(
    times_us, factor
):
    """Two runs of one host's launches: 2 H100 took 16.3 us or 17.3."""
    usual_s = fitted([sample(PRODUCTS[0], [1e-6 * t for t in times_us])]).surfaces[0].time_s
    for at in range(len(times_us)):
        times_s = [1e-6 * t * (factor if i == at else 1) for i, t in enumerate(times_us)]
        (surface,) = fitted([sample(PRODUCTS[0], times_s)]).surfaces
        assert surface.time_s == pytest.approx(usual_s, rel=0.05)


def test_a_file_of_damaged_lines_alone_is_refused(folder):
    run_dir = Path(known.write_run(Path("runs"), known.info(), []))
    (run_dir / "samples.jsonl").write_text("{}\n" * (store.MOST_DAMAGED + 1))
    with pytest.raises(ValueError, match="more than 1000 lines are damaged"):
        meshwise.calibrate(run_dir)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("factor", "is_said"), [(0.5, False), (0.2, True), (2.0, False)])
def test_a_curve_that_falls_is_named_with_two_sizes_when_it_is_read(factor, is_said, caplog):
    """Four knots, 4 KiB to 1 GiB: 16 MiB takes ``factor`` of the time of 256 KiB."""
    first, *others = known.COSTS.curves
    assert first.x_bytes[1:3] == (2**18, 2**24) and first.time_s[2] > 3 * first.time_s[1]
    times_s = (*first.time_s[:2], factor * first.time_s[1], first.time_s[3])
    bent = msgspec.structs.replace(first, time_s=times_s)
    store.write("costs.json", msgspec.structs.replace(known.COSTS, curves=(bent, *others)))
    files.prices("costs.json")
    said = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert len(said) == is_said
    for one in said:
        assert one.startswith("all_gather 2 by nvlink: 256.0 KiB took 20.9 us, but 16.0 MiB took ")
        assert "4.17 us; measure these sizes anew: meshwise measure profile" in one


def test_calibrate_doubts_a_curve_that_falls():
    times_s = [gather_s(size) for size in SIZES[:3]]
    times_s[2] = times_s[0] / 10
    samples = [thrice(gather(x), t) for x, t in zip(SIZES, times_s, strict=False)]
    assert [each for each in doubts(fitted(samples)) if "but 64.0 KiB took 2.00 us" in each]
