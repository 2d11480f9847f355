"""Schedules against closed forms, and their simulation against a brute-force one."""

import random
from collections import Counter
from itertools import accumulate, pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise import schedule
from meshwise.schedule import Action
from meshwise.spec.layout import SPLIT, rank_of

MULTIPLE = ["interleaved_1f1b", "looped_bfs", *sorted(SPLIT)]
NAMES = ["none", "gpipe", "1f1b", *MULTIPLE]
ADMITTED = [
    numbers
    for name in NAMES
    for pp in range(1, 7)
    for stages_per_rank in range(1, 4)
    for num_microbatches in (*range(1, 13), 18)
    if not schedule.check(*(numbers := (name, pp, stages_per_rank, num_microbatches)))
]


def some_admitted(test):
    return settings(deadline=None)(given(numbers=st.sampled_from(ADMITTED))(test))


def unit(stages_per_rank=1):
    """Durations to compare schedules by: a rank's share of the model takes F = 1, B = 2, I = W = 1,
    and a stage its part of that."""
    times = {"F": 1 / stages_per_rank, "B": 2 / stages_per_rank}
    return lambda action: times.get(action.kind, times["F"])


def unit_time(name, pp, stages_per_rank, num_microbatches):
    table = schedule.table(name, pp, stages_per_rank, num_microbatches)
    return schedule.end_time(schedule.simulate(table, unit(stages_per_rank)))


@pytest.mark.parametrize(
    ("name", "stages_per_rank", "expected"),
    [
        ("gpipe", 1, 33),
        ("1f1b", 1, 33),
        ("interleaved_1f1b", 2, 28.5),
        ("looped_bfs", 2, 28.5),
        ("interleaved_zero_bubble", 2, 25.5),
        ("zbv", 2, 25.5),
        ("dualpipev", 2, 25.5),
    ],
)
def test_golden_four_ranks_eight_microbatches(name, stages_per_rank, expected):
    assert unit_time(name, 4, stages_per_rank, 8) == expected


def test_names_are_all_tried():
    assert {name for name, *_ in ADMITTED} == set(NAMES) == set(schedule.get_args(schedule.Name))


@some_admitted
def test_equal_stages_follow_the_closed_form(numbers):
    name, pp, stages_per_rank, num_microbatches = numbers
    closed_form = 3 * num_microbatches
    closed_form += (pp - 1) * (1 if name in SPLIT else 3) / stages_per_rank
    if num_microbatches >= (2 * pp - 1 if name == "zbv" else pp) or stages_per_rank == 1:
        assert unit_time(*numbers) == pytest.approx(closed_form)
    else:  # the pipeline never fills
        assert unit_time(*numbers) >= closed_form - 1e-9


@some_admitted
def test_every_action_once_on_the_rank_of_its_stage(numbers):
    name, pp, stages_per_rank, num_microbatches = numbers
    table = schedule.table(*numbers)
    assert len(table) == pp
    for rank, row in enumerate(table):
        kinds = Counter()
        for action in row:
            assert rank_of(name, action.stage, pp) == rank
            kinds[action.stage, action.microbatch] += {"F": 1, "B": 20, "I": 300, "W": 4000}[
                action.kind
            ]
        stages = schedule.stages_of(name, rank, pp, stages_per_rank)
        assert set(kinds) == {(s, m) for s in stages for m in range(num_microbatches)}
        assert set(kinds.values()) <= ({21, 4301} if name in SPLIT else {21})


def brute_force(table, duration, transfer):
    """Starts of actions: every pair that the rules order, all raised until nothing changes."""
    rank = {action.stage: r for r, row in enumerate(table) for action in row}
    orders = [(*pair, 0.0) for row in table for pair in pairwise(row)]
    for a in (action for row in table for action in row):
        for b in (action for row in table for action in row if action.microbatch == a.microbatch):
            away = 0.0 if rank[a.stage] == rank[b.stage] else transfer((a.stage, b.stage))
            match a.kind + b.kind, b.stage - a.stage:
                case ("FB" | "FI" | "IW", 0) | ("FF", 1) | ("BB" | "BI" | "IB" | "II", -1):
                    orders.append((a, b, away))
    start = {action: 0.0 for row in table for action in row}
    changed = True
    while changed:
        changed = False
        for a, b, away in orders:
            if start[b] < (at := start[a] + duration(a) + away):
                start[b] = at
                changed = True
    return start


@settings(deadline=None, max_examples=60)
@given(
    numbers=st.sampled_from([n for n in ADMITTED if n[1] <= 4 and n[3] <= 8]), seed=st.integers()
)
def test_spans_are_the_earliest_that_the_rules_allow(numbers, seed):
    table = schedule.table(*numbers)
    chance = random.Random(seed)
    durations = {action: chance.choice([0.0, 1.0, 2.5]) for row in table for action in row}
    stages = permutations(range(numbers[1] * numbers[2]), 2)
    transfers = {hop: chance.choice([0.0, 0.75, 4.0]) for hop in stages}
    spans = schedule.simulate(table, durations.__getitem__, lambda *hop: transfers[hop])
    assert [[span.action for span in row] for row in spans] == [list(row) for row in table]
    starts = brute_force(table, durations.__getitem__, transfers.__getitem__)
    for span in (span for row in spans for span in row):
        assert span.start_s == starts[span.action]
        assert span.end_s == span.start_s + durations[span.action]


@some_admitted
def test_no_step_is_shorter_than_a_ranks_work(numbers):
    table = schedule.table(*numbers)
    spans = schedule.simulate(table, lambda action: 1.0 + action.stage, lambda *hop: 0.5)
    work = max(sum(1.0 + action.stage for action in row) for row in table)
    assert schedule.end_time(spans) >= work


def test_a_transfer_delays_the_receiver_and_only_between_ranks():
    spans = schedule.simulate(
        schedule.table("1f1b", 2, 1, 1), unit(), lambda here, there: 10 if here else 3
    )
    assert [(s.start_s, s.end_s) for row in spans for s in row] == [
        *[(0, 1), (17, 19)],  # F and B of stage 0
        *[(4, 5), (5, 7)],
    ]
    table = schedule.table("zbv", 1, 2, 3)
    assert schedule.end_time(schedule.simulate(table, unit(2), lambda *hop: 10)) == 9


def test_the_stage_before_goes_on_after_the_input_backward():
    table = (
        (Action("F", 0, 0), Action("B", 0, 0)),
        (Action("F", 1, 0), Action("I", 1, 0), Action("W", 1, 0)),
    )
    spans = schedule.simulate(table, unit())
    assert [span.start_s for span in spans[0]] == [0, 3]
    assert [span.start_s for span in spans[1]] == [1, 2, 3]


def test_each_action_is_timed_once():
    asked = Counter()
    table = schedule.table("zbv", 4, 2, 20)
    schedule.simulate(table, lambda action: asked.update([action]) or 1.0)
    assert asked == Counter(action for row in table for action in row)


def peak_in_flight(table):
    """For each rank, the most microbatches alive, counted once on each of its stages: from F until
    B, or until W where the backward is split, as W still needs what the forward saved."""
    change = {"F": 1, "I": 0, "B": -1, "W": -1}
    return [max(accumulate(change[action.kind] for action in row)) for row in table]


@some_admitted
def test_memory_is_the_point_of_a_schedule(numbers):
    name, pp, stages_per_rank, m = numbers
    ranks = range(pp)
    peaks = peak_in_flight(schedule.table(*numbers))
    if name == "none":
        assert peaks == [1]
    if name in ("gpipe", "looped_bfs"):
        assert peaks == [m * stages_per_rank] * pp
    if name == "1f1b":
        assert peaks == [min(pp - p, m) for p in ranks]
    if name == "interleaved_1f1b":
        ahead = (stages_per_rank - 1) * (m // max(1, m // pp))
        capped = [min(ahead + 2 * (pp - 1 - p) + 1, m * stages_per_rank) for p in ranks]
        assert peaks == capped
    if name == "zbv" and m >= 2 * pp - 1:  # as 1f1b's first rank: 2 pp halves, on every rank
        assert peaks == [2 * pp] * pp
    if name == "dualpipev":
        assert max(peaks) <= 2 * pp + 1


def test_only_the_weights_backward_frees_what_a_split_backward_saved():
    split = tuple(Action(kind, 0, m) for kind, m in zip("FIFIWW", (0, 0, 1, 1, 0, 1), strict=True))
    whole = tuple(Action(kind, 0, m) for m in range(2) for kind in "FB")
    assert peak_in_flight((split, whole)) == [2, 1]


def test_stages_go_round_or_there_and_back():
    assert [rank_of("interleaved_1f1b", s, 3) for s in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [rank_of("dualpipev", s, 3) for s in range(6)] == [0, 1, 2, 2, 1, 0]
    assert schedule.stages_of("looped_bfs", 1, 3, 3) == (1, 4, 7)
    assert schedule.stages_of("zbv", 1, 3, 2) == (1, 4)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("B F", "rank 0 at B of microbatch 0 on stage 0, which waits for F of microbatch 0"),
        ("F B W", "rank 0 at W of .* waits for I of microbatch 0 on stage 0"),
    ],
)
def test_a_deadlock_is_named(row, message):
    table = (tuple(Action(kind, 0, 0) for kind in row.split()),)
    with pytest.raises(ValueError, match=f"deadlocks: {message}"):
        schedule.simulate(table, unit())


def test_ranks_that_wait_for_each_other_are_all_named():
    table = (
        (Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)),
        (Action("F", 1, 0), Action("F", 1, 1), Action("B", 1, 0), Action("B", 1, 1)),
    )
    with pytest.raises(ValueError, match=r"deadlocks: rank \d at .*; rank \d at "):
        schedule.simulate(table, unit())


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (("gpipe", 0, 1, 4), "at least 1 of all, not 0, 1 and 4"),
        (("1f1b", 2, 1, 0), "at least 1 of all, not 2, 1 and 0"),
        (("2f2b", 2, 1, 4), "one of none, gpipe, .* not 2f2b"),
        (("none", 2, 1, 4), "one pipeline rank, not 2: choose 1f1b"),
        (("1f1b", 2, 2, 4), "1 stage on a rank, not 2: choose interleaved_1f1b"),
        (("interleaved_1f1b", 2, 1, 4), "2 or more stages on a rank, not 1: choose 1f1b"),
        (("looped_bfs", 2, 1, 4), "2 or more stages on a rank, not 1: choose 1f1b"),
        (("zbv", 2, 3, 4), "2 stages on a rank, not 3: set stages_per_rank to 2"),
        (("dualpipev", 2, 1, 4), "2 stages on a rank, not 1: set stages_per_rank to 2"),
        (("dualpipev", 4, 2, 7), "not 7 for 8: choose 8 microbatches or more, or zbv"),
        (("interleaved_1f1b", 4, 2, 11), "2 rounds of equal size.* choose 8 or 12"),
        (("interleaved_zero_bubble", 3, 2, 10), "3 rounds of equal size.* choose 9 or 12"),
    ],
)
def test_what_a_schedule_cannot_take_is_refused_with_the_fix(numbers, message):
    with pytest.raises(ValueError, match=message):
        schedule.table(*numbers)
