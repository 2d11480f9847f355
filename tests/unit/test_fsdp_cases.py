"""Which messages ``measure fsdp`` times, and which units each stands for."""

import pytest

from meshwise.models import catalogue
from meshwise.options.measure import FsdpOptions
from meshwise.probe.cases import fsdp
from meshwise.probe.cases.scope import Scope
from meshwise.spec import Decoder, Experts
from tests import sample_records as known

EIGHT = Scope(known.CLUSTER, 8, "bf16")


def named(*models, **options):
    rows = fsdp.derived(EIGHT, FsdpOptions(model=models, **options))
    return [(row.name, row.case.op.kind, row.case.op.size_bytes) for row in rows]


def test_equal_units_are_one_row_that_names_them_all():
    # 106,956,800 and 262,669,312 elements on each of 8 ranks, 2 bytes each
    layer, root = 1_711_308_800, 4_202_708_992
    assert named(catalogue.find("llama-3-70b")) == [
        ("root", "all_gather", root),
        ("layers 0-79", "all_gather", layer),
        ("layers 0-79", "reduce_scatter", layer),
        ("root", "reduce_scatter", root),
    ]


def test_units_of_several_sizes_are_named_apart():
    """Experts in layers 2 and 4 of 6: the dense layers are not neighbours."""
    model = Decoder(
        name="mixed", hidden=64, layers=6, heads=4, kv_heads=4, head_dim=16, ffn=128, vocab=96,
        max_seq_len=32, experts=Experts(num_experts=4, top_k=2, ffn=64, first_dense=1, every=2),
    )  # fmt: skip
    names = [name for name, kind, _ in named(model) if kind == "all_gather"]
    assert names == ["root", "layers 0-1, 3, 5", "layers 2, 4"]


def test_replicas_add_the_all_reduce_of_each_part():
    found = named(catalogue.find("llama-3-70b"), replicas=2, reduce_dtype="fp32")
    # 4 ranks a replica: 213,913,600 elements, 4 bytes each
    assert ("layers 0-79", "all_reduce", 855_654_400) in found
    assert len(found) == 6


def test_replicas_that_do_not_divide_the_ranks_are_refused():
    with pytest.raises(ValueError, match="replicas = 3: must divide the 8 ranks"):
        fsdp.cases(EIGHT, FsdpOptions(replicas=3))
