"""Intervals against counting moments one by one, timelines against a schedule drawn by hand."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise import timeline
from meshwise.spec import Layout
from meshwise.spec.phases import Phases, PhaseSpan, RankPhases, union, within_s, without
from meshwise.spec.plan import Part, StageTimes
from tests import sample_records as known

MOMENTS = range(20)
INTERVALS = st.lists(st.tuples(st.sampled_from(MOMENTS), st.sampled_from(MOMENTS)), max_size=6)


def cells(intervals):
    """The unit cells that intervals cover."""
    return {cell for start, end in intervals for cell in range(start, end)}


@given(INTERVALS, INTERVALS)
def test_intervals_cover_what_they_say(some, others):
    both = union(some), union(others)
    left = without(*both)
    assert cells(both[0]) == cells(some)
    assert cells(left) == cells(some) - cells(others)
    for found in (*both, left):
        assert all(a < b for a, b in found)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(found))
    assert within_s(left, 3, 11) == len(cells(left) & set(range(3, 11)))


def plan_of(layout, step_time_s, **changes):
    priced = msgspec.structs.replace(known.prediction(step_time_s, 2**30), **changes)
    return msgspec.structs.replace(known.plan(layout), prediction=priced)


PIPED = Layout(pp=2, dp=2, schedule="1f1b", num_microbatches=2)


def test_the_predicted_timeline_is_the_schedule_drawn_by_hand():
    times = StageTimes(forward_s=1.0, backward_s=2.0, weights_s=0.0)
    spans = timeline.predicted(plan_of(PIPED, step_time_s=10.0, stage_times=(times, times)))
    found = {(s.rank, s.name): (s.start_s, s.end_s) for s in spans}
    assert found == {
        (0, "F 0.0"): (0, 1),
        (0, "F 0.1"): (1, 2),
        (0, "B 0.0"): (4, 6),
        (0, "B 0.1"): (7, 9),
        (0, timeline.REST): (9, 10),
        (2, "F 1.0"): (1, 2),
        (2, "B 1.0"): (2, 4),
        (2, "F 1.1"): (4, 5),
        (2, "B 1.1"): (5, 7),
        (2, timeline.REST): (7, 10),
    }


def test_without_a_pipeline_the_parts_follow_each_other():
    parts = tuple(Part(name=n, value=v, low=v, high=v) for n, v in (("a", 1.0), ("b", 2.0)))
    plan = plan_of(Layout(dp=2), step_time_s=3.0, time_parts=parts)
    found = [(s.name, s.start_s, s.end_s) for s in timeline.predicted(plan)]
    assert found == [("a", 0, 1), ("b", 1, 3)]


def test_a_plan_without_a_prediction_has_no_predicted_timeline():
    plan = msgspec.structs.replace(plan_of(PIPED, step_time_s=1.0), prediction=None)
    with pytest.raises(ValueError, match="not priced"):
        timeline.predicted(plan)


def test_measured_and_predicted_have_one_form(tmp_path):
    """Processes are pipeline ranks; what overlaps on a stream gets threads of its own."""
    spans = [
        PhaseSpan(rank=3, stream="compute", name="B 1.0", start_s=2.0, end_s=4.0),
        PhaseSpan(rank=3, stream="communication", name="all_gather", start_s=0.5, end_s=2.5),
        PhaseSpan(rank=3, stream="communication", name="all_reduce", start_s=1.0, end_s=2.0),
        PhaseSpan(rank=0, stream="compute", name="clip", start_s=1.0, end_s=1.5),
    ]
    path = timeline.write(tmp_path / "timeline.json", PIPED, spans)
    events = msgspec.json.decode(path.read_bytes())["traceEvents"]
    slices = {event["name"]: event for event in events if event["ph"] == "X"}
    labels = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "pipeline rank 0",
        "pipeline rank 1",
    }
    found = {name: labels[event["pid"], event["tid"]] for name, event in slices.items()}
    assert found == {
        "B 1.0": "rank 3 compute",
        "all_gather": "rank 3 communication",
        "all_reduce": "rank 3 communication 2",
        "clip": "rank 0 compute",
    }
    assert slices["B 1.0"] | {"tid": 0} == {
        "name": "B 1.0",
        "cat": "backward",
        "ph": "X",
        "pid": 1,
        "tid": 0,
        "ts": 2e6,
        "dur": 2e6,
        "args": {"rank": 3, "stage": 1, "microbatch": 0},
    }
    assert slices["clip"]["pid"] == 0 and slices["clip"]["args"] == {"rank": 0}


def test_metrics_are_means_that_add_up_and_the_largest():
    zeros = dict.fromkeys(
        ["backward_s", "optimizer_s", "exposed_communication_s", "other_s", "communication_s"], 0.0
    )
    ranks = tuple(
        RankPhases(rank=rank, forward_s=forward_s, bubble_s=4.0 - forward_s, **zeros)
        for rank, forward_s in enumerate((1.0, 3.0))
    )
    metrics = Phases(step_s=4.0, profiled_step_s=5.0, ranks=ranks).metrics
    assert metrics["forward_s"] == 2.0 and metrics["largest_forward_s"] == 3.0
    assert metrics["forward_s"] + metrics["bubble_s"] == metrics["phases_step_s"] == 4.0
