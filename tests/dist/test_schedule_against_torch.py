"""Our action tables equal the orders of torch.distributed.pipelining; one process, no ranks."""

from itertools import product
from unittest import mock

import pytest
from torch.distributed import pipelining
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from meshwise import schedule

pytestmark = pytest.mark.dist

SINGLE = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
MULTIPLE = {
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


def torch_class(name):
    """A schedule of torch's, exported or not."""
    for module in (pipelining, pipelining.schedules):
        if hasattr(module, name):
            return getattr(module, name)
    pytest.skip(f"this torch has no {name}")


def computations(row):
    """A row of torch's as ours: no idle steps, no communication, overlapped pairs in turn."""
    parts = (part for action in row if action for part in action.sub_actions or (action,))
    actions = ((p.computation_type.value, p.stage_index, p.microbatch_index) for p in parts)
    return [action for action in actions if action[0] in ("F", "B", "I", "W")]


@pytest.mark.parametrize("name", MULTIPLE)
def test_tables_and_refusals_equal_torch(name):
    torch_schedule = torch_class(MULTIPLE[name])
    cases = [*product((1, 2, 4), (1, 2, 3), (1, 3, 4, 7, 8, 12)), (3, 2, 7), (5, 2, 13), (6, 3, 18)]
    equal = 0
    for pp, stages_per_rank, m in cases:
        ours = (name, pp, stages_per_rank, m)
        try:
            theirs = get_schedule_ops(torch_schedule, pp, m, stages_per_rank)
        except (AssertionError, ValueError):
            assert schedule.check(*ours), ours
        else:
            assert [[*row] for row in schedule.table(*ours)] == [*map(computations, theirs)], ours
            equal += 1
    assert equal > 10


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize(("pp", "m"), [(1, 1), (1, 4), (2, 2), (3, 8), (4, 4), (4, 8), (6, 13)])
def test_single_stage_tables_equal_what_torch_executes(name, pp, m):
    """As executed: torch's own table of 1F1B lacks the last rank's first forward."""
    executed = [executed_row(torch_class(SINGLE[name]), pp, rank, m) for rank in range(pp)]
    assert [list(row) for row in schedule.table(name, pp, 1, m)] == executed


def executed_row(torch_schedule, pp, rank, m):
    """The calls that a schedule makes of a stage that computes and sends nothing."""
    stage = mock.create_autospec(pipelining.PipelineStage, instance=True)
    stage.configure_mock(stage_index=rank, num_stages=pp, group_rank=rank, group_size=pp)
    for method in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, method).return_value = []
    runner = torch_schedule(stage, m)
    runner._initialize_stage = lambda *arguments: None  # would need tensors
    runner._step_microbatches([()] * m, [{}] * m)
    kinds = {"forward_one_chunk": "F", "backward_one_chunk": "B"}
    return [(kinds[n], rank, args[0]) for n, args, _ in stage.method_calls if n in kinds]
