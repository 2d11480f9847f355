"""A step waits for the slowest rank: quantiles, and the spread they rest on. No torch.

Oracles draw times with numpy: of every call of every rank, and of their slowest.
"""

import json
from statistics import NormalDist

import msgspec
import numpy as np
import pytest

import meshwise
from meshwise.fit import calibrate
from meshwise.fit.spread import fit_spread
from meshwise.prices import Prices
from meshwise.search import predict
from meshwise.search.tail import tail
from meshwise.spec import Layout, Prediction, Spread
from tests import sample_records as known

RNG = np.random.default_rng(7)
FEW = 0.002  # of a step: how far drawn quantiles are off


def costs(spread: Spread, measured: int):
    return Prices(msgspec.structs.replace(known.COSTS, spread=spread, world_size=measured))


def drawn(spread: Spread, num_ranks: int, calls: int, trials: int) -> np.ndarray:
    """The seconds of computation of the slowest rank, 1 for a rank without a spread."""
    found = []
    for _ in range(trials):
        noise = np.exp(spread.passing * RNG.standard_normal((num_ranks, calls))).mean(axis=1)
        found.append((np.exp(spread.lasting * RNG.standard_normal(num_ranks)) * noise).max())
    return np.asarray(found)


@pytest.mark.parametrize(
    ("lasting", "passing", "ranks", "measured"),
    [(0.02, 0.0, 512, 1), (0.01, 0.1, 64, 8), (0.03, 0.05, 8, 8), (0.0, 0.1, 128, 2)],
)
def test_quantiles_are_those_of_drawn_ranks(lasting, passing, ranks, measured):
    """Two layers, forward and backward, in eight microbatches: 32 calls."""
    spread = Spread(lasting=lasting, passing=passing)
    model = msgspec.structs.replace(known.MODEL, layers=2)
    layout = Layout(dp=ranks, num_microbatches=8)
    unit_s = np.median(drawn(spread, measured, 32, 4000))  # prices are this rank's
    due = 0.25 + 0.75 * np.quantile(drawn(spread, ranks, 32, 4000) / unit_s, [0.5, 0.95])
    assert tail(1.0, 0.25, model, layout, costs(spread, measured)) == pytest.approx(due, abs=FEW)


def test_as_many_ranks_as_measured_take_the_predicted_time():
    four = msgspec.structs.replace(known.COSTS, world_size=4)
    told = predict(known.MODEL, known.WORKLOAD, known.LAYOUT, Prices(four, datasheet=True))
    assert told.p50_s == pytest.approx(told.step_time_s, rel=1e-12)
    assert told.usual_s == told.p50_s < told.p95_s


def test_more_ranks_wait_longer_and_messages_are_as_they_were(tmp_path, monkeypatch):
    """By data sheets, the median rank is below half of two: log2 of 1/2 is -1."""
    monkeypatch.chdir(tmp_path)
    found = []
    for dp in (1, 2, 8):
        layout = Layout(dp=dp, zero=2 if dp > 1 else 0, microbatch_size=8)
        told = meshwise.plan("gpt-125m", cluster="h100-hgx", layout=layout, seq_len=256).prediction
        sent = sum(p.value for p in told.time_parts if "communication (exposed)" in p.name)
        found.append((told.p50_s - told.step_time_s) / (told.step_time_s - sent))
    assert found[0] == pytest.approx(0.0, abs=1e-12)
    spread = np.hypot(0.01, 0.02 / np.sqrt(2 * 12))  # as data/attainable.toml says, of 24 calls
    due = [spread * NormalDist().inv_cdf(0.5 ** (1 / n)) for n in (2, 8)]
    assert np.log1p(found[1:]) == pytest.approx(due)


def test_the_plan_says_both_and_older_files_say_neither(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    from meshwise.cli import app

    with pytest.raises(SystemExit):
        app.main(["plan", "gpt-125m", "--cluster", "h100-hgx", "--global-batch-size", "32"])
    assert "Row 1, with the slowest of 8 rank(s): p50 " in capsys.readouterr().out
    told = json.loads((tmp_path / "plan.json").read_text())["prediction"]
    assert told["step_time_s"] < told.pop("p50_s") < told.pop("p95_s")
    old = msgspec.convert(told, Prediction)
    assert old.p50_s is None and old.usual_s == old.step_time_s


def profile(ranks, lasting, passing, calls=40, samples=30):
    """Samples of layers that ranks compute alone, and how much slower each rank is."""
    slower = np.exp(lasting * RNG.standard_normal(ranks))
    for _ in range(samples):
        noise = np.exp(passing * RNG.standard_normal((ranks, calls)))
        times = RNG.uniform(1e-3, 1e-2) * slower[:, None] * noise
        sample = known.sample(known.BLOCK, times.max(axis=0), ranks=ranks)
        yield msgspec.structs.replace(sample, rank_times_s=tuple(map(tuple, times.tolist())))
    return slower


def test_the_spread_is_the_one_of_the_ranks():
    found = fit_spread(list(profile(256, 0.03, 0.08)), 256)
    assert found.lasting == pytest.approx(0.03, rel=0.15)
    assert found.passing == pytest.approx(0.08, rel=0.05)


def test_few_ranks_move_the_usual_spread_a_little():
    """Two ranks that agree: four of 1 % and one of 0 make a root of 4/5."""
    found = fit_spread(list(profile(2, 0.0, 1e-6)), 2)
    assert found.lasting == pytest.approx(0.01 * np.sqrt(4 / 5), rel=1e-3)


def test_one_odd_sample_does_not_count():
    samples = list(profile(8, 0.02, 0.05))
    times = samples[3].rank_times_s
    odd = (tuple(50 * time_s for time_s in times[0]), *times[1:])
    spoiled = [*samples[:3], msgspec.structs.replace(samples[3], rank_times_s=odd), *samples[4:]]
    before, after = fit_spread(samples, 8), fit_spread(spoiled, 8)
    assert after.lasting == pytest.approx(before.lasting, rel=0.15)
    assert after.passing == pytest.approx(before.passing, rel=0.15)


def test_one_rank_and_work_that_ranks_share_say_nothing():
    assert fit_spread(list(profile(1, 0.0, 0.1)), 1) is None
    shared = msgspec.structs.replace(known.BLOCK, tp=2)
    alone = known.sample(shared, (1e-3,) * 9, ranks=4)
    assert fit_spread([alone], 4) is None
    few = [msgspec.structs.replace(s, rank_times_s=()) for s in profile(4, 0.1, 0.1)]
    assert fit_spread(few, 4) is None


def test_calibrate_keeps_the_spread():
    samples = [*known.SAMPLES, *profile(4, 0.02, 0.05)]
    found = calibrate([(known.info(), samples)]).spread
    assert found is not None and found == fit_spread(samples, 4)
