"""plan --refit-to: what moving a plan's weights to another plan costs."""

import pytest

import meshwise
from meshwise.pages import answers
from meshwise.spec import Plan
from meshwise.verbs import files


def planned(path, layout, **asked):
    return meshwise.plan("gpt-125m", cluster="h200-hgx", hosts=1, layout=layout, out=path, **asked)


@pytest.fixture
def to_tp4(tmp_path):
    planned(tmp_path / "to.json", '{"tp": 4}')
    return tmp_path / "to.json"


def test_it_is_what_refit_predicts(tmp_path, to_tp4):
    """Between layouts without shards, which ``refit`` knows, too. It fills four ranks by dp."""
    found = planned(tmp_path / "from.json", '{"dp": 2, "tp": 2}', refit_to=to_tp4).answers.refit
    (told,) = meshwise.refit(
        model="gpt-125m", train={"tp": 2}, infer={"tp": 4}, orders=("plain", "plain"), dtype="fp32",
        dry_run=True, cluster="h200-hgx", mode="collocated",
    )  # fmt: skip
    for name in ("wire_bytes", "local_bytes", "max_in_bytes", "predicted_s", "bound_s", "binding"):
        assert getattr(found, name) == getattr(told, name), name
    assert found.wire_bytes > 0 and found.layout.tp == 4
    (page,) = answers.of(files.take(tmp_path / "from.json", Plan))
    assert "Moving the weights to tp4" in page.legend[0]


def test_shards_count(tmp_path, to_tp4):
    """Ranks that hold shards alone receive more; with the own layout nothing moves."""
    whole = planned(tmp_path / "a.json", '{"dp": 4}', refit_to=to_tp4).answers.refit
    cut = planned(tmp_path / "b.json", '{"dp": 4, "zero": 3}', refit_to=to_tp4).answers.refit
    same = planned(tmp_path / "c.json", '{"tp": 4}', refit_to=to_tp4).answers.refit
    assert same.wire_bytes == 0 and same.binding == "memory"  # copied where it is
    assert whole.wire_bytes == 0 < cut.wire_bytes and cut.predicted_s >= cut.bound_s > 0


def test_other_models_are_refused(tmp_path, to_tp4):
    with pytest.raises(ValueError, match="refit_to: is a plan of gpt-125m, and this one is of"):
        meshwise.plan("gpt-350m", cluster="h200-hgx", hosts=1, refit_to=to_tp4,
                      layout='{"tp": 2}', out=tmp_path / "x.json")  # fmt: skip
