"""Small programs are equal to the whole ones that they stand for in searches."""

import pytest
from msgspec.structs import replace

from meshwise.models import block_tasks, blocks_of, catalogue, graph, program_of, saved_block_bytes
from meshwise.search import charges, stage
from meshwise.spec import Layout, forms_of, layer_kinds

MODELS = [("gpt-125m", 1024), ("mixtral-8x7b", 4096), ("deepseek-v2-lite", 4096), ("wresnet-1b", 1)]


@pytest.mark.parametrize(("name", "seq_len"), MODELS)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_an_idle_program_sends_what_the_whole_one_does(name, seq_len, zero):
    model, way = catalogue.find_any(name), Layout(dp=4, tp=2, zero=zero, num_microbatches=3)
    for kind in {*layer_kinds(model, seq_len)}:
        of = graph(model, 1, seq_len, "bf16", layers=(kind,))
        whole, idle = (program_of(of, way, "bf16", idle=only) for only in (False, True))
        sent, alone = (
            [
                [(task.name, task.op) for task in program.tasks[start:stop] if task.part == "dp"]
                for _, _, start, stop in program.actions
            ]
            for program in (whole, idle)
        )
        assert alone == sent
        assert any(sent)
        assert len(idle.tasks) < len(whole.tasks)


@pytest.mark.parametrize(("name", "seq_len"), MODELS)
@pytest.mark.parametrize("size", [3, 7, 60])
def test_blocks_of_large_microbatches_follow_from_small_ones(name, seq_len, size):
    model = catalogue.find_any(name)
    blocks = blocks_of(model, seq_len, Layout(tp=2, microbatch_size=size), "bf16")
    assert len(blocks) >= 2 * len(forms_of(model, seq_len))
    for block in blocks.values():
        assert charges.small(block)[0] == replace(block, microbatch_size=1)
        assert [*charges._tasks(block, "cuda")] == [*block_tasks(block, "cuda")]
        saved = saved_block_bytes(block, compiled=True)
        assert stage._saved_bytes(block, True) == saved


def test_a_percentile_of_experts_loads_follows_from_nothing():
    model = catalogue.find_any("mixtral-8x7b")
    block = next(iter(blocks_of(model, 4096, Layout(microbatch_size=8), "bf16").values()))
    uneven = replace(model, experts=replace(model.experts, load="p95"))
    assert charges.small(block)
    assert not charges.small(replace(block, model=uneven))
