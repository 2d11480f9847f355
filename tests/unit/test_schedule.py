"""Schedules against their closed forms and a brute-force check of dependencies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise import schedule
from meshwise.schedule import Action

TABLES = {"gpipe": schedule.gpipe, "1f1b": schedule.one_f_one_b}
STAGES, MICROBATCHES = st.integers(1, 6), st.integers(1, 12)


@pytest.mark.parametrize("name", TABLES)
def test_golden_four_stages_eight_microbatches(name):
    assert schedule.end_time(schedule.simulate(TABLES[name](4, 8))) == 33


@given(stages=STAGES, microbatches=MICROBATCHES, name=st.sampled_from(sorted(TABLES)))
def test_equal_stages_follow_the_closed_form(stages, microbatches, name):
    spans = schedule.simulate(TABLES[name](stages, microbatches), 1, 2)
    assert schedule.end_time(spans) == (microbatches + stages - 1) * 3


@given(stages=STAGES, microbatches=MICROBATCHES, name=st.sampled_from(sorted(TABLES)))
def test_each_action_once_and_after_what_it_needs(stages, microbatches, name):
    spans = [span for row in schedule.simulate(TABLES[name](stages, microbatches)) for span in row]
    ends = {span.action: span.end_s for span in spans}
    assert len(spans) == len(ends) == 2 * stages * microbatches
    for span in spans:
        kind, stage, m = span.action
        if kind == "F" and stage > 0:
            assert span.start_s >= ends[Action("F", stage - 1, m)]
        if kind == "B":
            assert span.start_s >= ends[Action("F", stage, m)]
            if stage + 1 < stages:
                assert span.start_s >= ends[Action("B", stage + 1, m)]


@given(stages=STAGES, microbatches=MICROBATCHES)
def test_memory_is_the_point_of_1f1b(stages, microbatches):
    assert schedule.peak_in_flight(schedule.gpipe(stages, microbatches)) == [microbatches] * stages
    expected = [min(stages - p, microbatches) for p in range(stages)]
    assert schedule.peak_in_flight(schedule.one_f_one_b(stages, microbatches)) == expected


def test_a_deadlock_is_named():
    table = ((Action("B", 0, 0), Action("F", 0, 0)),)
    with pytest.raises(ValueError, match=r"deadlocks.*kind='B'"):
        schedule.simulate(table)


def test_no_stages_is_refused():
    with pytest.raises(ValueError, match="0 and 4"):
        schedule.gpipe(0, 4)
