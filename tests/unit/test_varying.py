"""Steps whose sequences or experts' loads differ: p50 and p95. No torch."""

from pathlib import Path

import pytest
from scipy.stats import binom

import meshwise
from meshwise.pages import show
from meshwise.spec import Layout

SMALL = {"cluster": "h100-hgx", "seq_len": 1024}
LOADS = ("mean", "p95", "1.4")
LAYOUT = Layout(dp=8, zero=2, microbatch_size=2, num_microbatches=4)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def seconds(**options):
    return meshwise.plan("gpt-125m", layout=LAYOUT, **{**SMALL, **options}).prediction.p50_s


@pytest.mark.parametrize("long_of_100", [3, 10, 40])
def test_steps_are_those_of_the_rank_with_most_long_microbatches(long_of_100):
    """Sequences of two lengths. A rank's long microbatches are binomial, and P(max <= k) = F^8."""
    Path("lengths").write_text("512, " * (100 - long_of_100) + "1024\n" * long_of_100)
    (found,) = meshwise.plan("gpt-125m", layout=LAYOUT, seq_lens="lengths", **SMALL).answers.varying
    short_s, long_s = seconds(seq_len=512), seconds()
    is_long = 1 - (1 - long_of_100 / 100) ** 2  # one of two sequences is
    most = [binom.cdf(k, 4, is_long) ** 8 for k in range(5)]
    for share, quantile_s in ((0.5, found.p50_s), (0.95, found.p95_s)):
        assert min(abs(share - each) for each in most) > 0.02  # 1,000 draws tell
        count = next(k for k, below in enumerate(most) if below >= share)
        due_s = short_s + (long_s - short_s) * count / 4
        assert quantile_s == pytest.approx(due_s, rel=1e-9)


def test_full_sequences_take_the_plans_step_and_short_ones_an_eighth():
    for length, due in ((1024, seconds()), (1, seconds(seq_len=128))):
        Path("lengths").write_text(f"{length}\n{length}")
        plan = meshwise.plan("gpt-125m", layout=LAYOUT, seq_lens="lengths", **SMALL)
        assert plan.answers.varying[0].p50_s == plan.answers.varying[0].p95_s
        assert plan.answers.varying[0].p50_s == pytest.approx(due)


def test_the_load_of_experts_is_said_for_both():
    layout = Layout(dp=8, ep=8, zero=3)
    asked = {"layout": layout, "cluster": "h100-hgx", "seq_len": 512}
    mean, p95, given = (meshwise.plan("mixtral-8x7b", expert_load=load, **asked) for load in LOADS)
    (found,) = p95.answers.varying
    assert mean.answers.varying == ()
    assert (found.p50_s, found.p95_s) == (mean.prediction.p50_s, p95.prediction.p50_s)
    assert found.p50_s < found.p95_s
    shown = {
        load: " ".join(" ".join(t.legend) for t in show.of(p))
        for load, p in zip(LOADS, (mean, p95, given), strict=True)
    }
    assert "Expert load" not in shown["mean"]
    assert "Expert load p95: " in shown["p95"] and "p95 the plan's." in shown["p95"]
    assert "Expert load 1.4: the fullest rank's experts get 1.4 times" in shown["1.4"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("512 long 3", "lengths: 'long' must be a number of tokens, as 512"),
        ("-4", "lengths: '-4' must be a number"),
        ("", "seq_lens: must be lengths of 1 to 1024 tokens"),
        ("0 5", "seq_lens: must be lengths of 1 to 1024 tokens"),
        ("512 1025", "seq_lens: lengths has 1025, beyond --seq-len 1024"),
    ],
)
def test_lengths_that_cannot_be_are_refused(text, message):
    Path("lengths").write_text(text)
    with pytest.raises(ValueError, match=message):
        meshwise.plan("gpt-125m", layout=LAYOUT, seq_lens="lengths", **SMALL)
    with pytest.raises(ValueError, match=message if "number" in message else "of a language mod"):
        meshwise.plan("wresnet-250m", cluster="h100-hgx", seq_lens="lengths")


def test_a_length_that_cannot_be_padded_to_names_the_field():
    Path("lengths").write_text("512")
    layout = Layout(cp=2, zero=3)
    with pytest.raises(ValueError, match="seq_lens: no step of 127 tokens: "):
        meshwise.plan(
            "gpt-125m", cluster="h100-hgx", seq_len=1020, layout=layout, seq_lens="lengths"
        )
