"""Which cases ``measure collectives`` times, and which sizes follow from a measured curve."""

import itertools
import math
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from meshwise.models import catalogue
from meshwise.options.measure import CollectivesOptions, GemmOptions
from meshwise.probe.cases import collectives, follow, gemm
from meshwise.probe.cases.scope import Scope
from meshwise.spec import (
    Case,
    Cluster,
    Collective,
    Device,
    Gemm,
    Layout,
    Sample,
    Tier,
    WideResNet,
    Workload,
    stages_of,
)
from tests import sample_records as known

MiB = 2**20
IN_PLACE_BY_TORCH = {"all_reduce", "reduce", "broadcast"}


def scope(world_size: int = 4, kind: str = "cpu", dtype: str = "fp32") -> Scope:
    cluster = Cluster(
        name="test",
        num_hosts=1,
        num_devices_per_host=world_size,
        device=Device(name="x", kind=kind, memory_bytes=2**36),
        tiers=(Tier(name="host", num_devices=world_size),),
    )
    return Scope(cluster, world_size, dtype)


def ops(*args: Scope, **options) -> list[Collective]:
    return [
        case.op for case in collectives.cases(*(args or (scope(),)), CollectivesOptions(**options))
    ]


class TestWays:
    def test_without_options_five_kinds_over_all_ranks_the_smallest_first(self):
        for kind, mode, largest in (("cpu", "warm", 16 * MiB), ("cuda", "graph", 2**30)):
            found = collectives.cases(scope(kind=kind), CollectivesOptions())
            assert {case.regime for case in found} == {mode}
            assert {case.world_size for case in found} == {4}
            sizes = [case.op.size_bytes for case in found]
            assert sizes == sorted(sizes) and sizes[-1] == largest
            kinds = [case.op.kind for case in found[:5]]
            assert kinds == list(collectives.KINDS) and len(set(sizes[:5])) == 1
            assert {case.op.group_size for case in found} == {4}

    def test_every_mode_of_every_kind_and_back_end(self):
        found = collectives.cases(
            scope(),
            CollectivesOptions(
                kinds=("all_gather", "send_recv"),
                sizes="64",
                backends=("", "nccl"),
                modes=("warm", "blocking", "pipelined"),
            ),
        )
        ways = {(case.op.kind, case.backend, case.regime) for case in found}
        assert ways == set(itertools.product(
            ("all_gather", "send_recv"), ("", "nccl"), ("warm", "blocking", "pipelined")
        ))  # fmt: skip
        assert len(found) == 12

    @pytest.mark.parametrize("place", ["out", "in", "both"])
    @pytest.mark.parametrize(
        "kind",
        ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce",
         "gather", "scatter", "send_recv"],
    )  # fmt: skip
    @pytest.mark.parametrize("backend", ["", "gloo", "nccl", "one_shot", "two_shot", "peer_copy"])
    def test_only_places_that_a_back_end_has(self, kind, place, backend):
        found = [
            case.op.in_place
            for case in collectives.cases(
                scope(),
                CollectivesOptions(kinds=(kind,), sizes="64", backends=(backend,), place=place),
            )
        ]
        asked = {"out": [False], "in": [True], "both": [False, True]}[place]
        if kind in IN_PLACE_BY_TORCH and backend in ("", "gloo"):
            # torch.distributed has no other form; who asks for both is told by a skipped case
            asked = asked if place == "both" else [True]
        elif backend == "two_shot" and kind in (*IN_PLACE_BY_TORCH, "all_gather", "reduce_scatter"):
            asked = [True]
        elif backend in ("one_shot", "two_shot", "peer_copy"):
            asked = [False]
        elif kind not in (*IN_PLACE_BY_TORCH, "all_gather", "reduce_scatter"):
            asked = [False]  # nobody does these in place
        assert found == asked

    def test_a_size_is_cut_to_what_divides_among_the_ranks(self):
        found = {op.kind: op.size_bytes for op in ops(scope(3), sizes="1000")}
        assert found == {
            "all_reduce": 992, "send_recv": 992,  # 62 x 16: NCCL's vectors
            "all_gather": 960, "reduce_scatter": 960, "all_to_all": 960,  # 3 x 20 x 16
        }  # fmt: skip
        few = {op.kind: op.size_bytes for op in ops(scope(3), sizes="40")}
        assert (few["all_reduce"], few["all_gather"]) == (32, 36)  # 36 = 3 x 3 x 4
        small = ops(scope(4), sizes="8")  # less than an element for each rank
        assert {op.kind for op in small} == {"all_reduce", "send_recv"}
        assert {op.size_bytes for op in ops(scope(2, dtype="bf16"), sizes="7")} == {6, 4}


class TestGroups:
    def test_several_groups_at_once_are_neighbours(self):
        found = ops(scope(8), groups=2, sizes="64")
        assert {(op.group_size, op.group_stride, op.ranks) for op in found} == {(4, 1, ())}

    def test_groups_may_be_of_ranks_some_apart(self):
        """The uneven exchange and that of a model's layers, too; messages to the next stage not."""
        several = {"groups": 4, "stride": 2}
        splits = ((4, 8), (0, 16))
        for options in ({"sizes": "64"}, {"splits": splits}, {"tables": "8,1-2,4"}):
            found = ops(scope(8), **several, **options)
            assert {(op.group_size, op.group_stride, op.ranks) for op in found} == {(2, 2, ())}
        found = ops(scope(8), model=(catalogue.get("gpt-125m"),), groups=2, stride=2)
        assert {(op.kind == "send_recv", op.group_size, op.group_stride) for op in found} == {
            (False, 4, 2), (True, 2, 1)
        }  # fmt: skip

    def test_one_group_of_named_ranks(self):
        found = ops(scope(8), ranks=(5, 2, 7), sizes="96")
        assert {(op.group_size, op.ranks) for op in found} == {(3, (2, 5, 7))}

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"groups": 3}, "groups = 3: must divide the 4 ranks"),
            ({"groups": 0}, "groups = 0: must divide the 4 ranks"),
            ({"groups": 4}, "groups = 4: would leave each rank alone; it is the number of groups"),
            ({"stride": 2}, "stride = 2: must divide groups = 1; use 1, or other groups"),
            ({"groups": 4, "stride": 3}, "stride = 3: must divide groups = 4; use 1 or 2 or 4,"),
            ({"stride": 0}, "stride = 0: must be >= 1"),
            ({"stride": 2, "ranks": (0, 2)}, "stride and ranks: only one .*leave the others out"),
            ({"stride": 2, "pairs": True}, "stride and pairs: only one of them can be"),
            ({"ranks": (0, 4)}, r"ranks = \(0, 4\): must be different numbers from 0 to 3"),
            ({"ranks": (1, 1)}, r"ranks = \(1, 1\): must be different"),
            ({"ranks": (-1, 1)}, r"ranks = \(-1, 1\): must be different"),
            ({"pairs": True, "ranks": (1,)}, "pairs: 1 rank has no peer; use at least 2"),
        ],
    )
    def test_groups_that_cannot_be(self, options, message):
        with pytest.raises(ValueError, match=message):
            ops(**options)

    def test_pairs_are_every_message_from_one_rank_to_another(self):
        found = ops(pairs=True)
        assert [op.ranks for op in found] == list(itertools.permutations(range(4), 2))
        assert {(op.kind, op.size_bytes, op.group_size) for op in found} == {("send", MiB, 2)}
        assert len(ops(pairs=True, sizes="64,128")) == 24
        some = ops(pairs=True, ranks=(3, 1))
        assert sorted(op.ranks for op in some) == [(1, 3), (3, 1)]


class TestUneven:
    def test_splits_are_taken_as_they_are(self):
        (op,) = ops(scope(3), splits=((4, 8, 12), (0, 16, 4), (20, 0, 8)))
        assert (op.kind, op.group_size) == ("all_to_all_v", 3)
        assert op.size_bytes == 28  # rank 2 sends it; ranks receive 24, 24, 24
        assert op.bytes == 20  # to or from others: 20, 4, 20 sent, 20, 8, 16 received
        (some,) = ops(scope(4), splits=((0, 4), (4, 0)), ranks=(1, 3))
        assert (some.ranks, some.size_bytes) == ((1, 3), 4)
        with pytest.raises(ValueError, match=r"splits = .*must be 3 rows of 3 byte counts"):
            ops(scope(3), splits=((4, 8), (0, 16)))
        with pytest.raises(ValueError, match=r"splits = .*must be 1 rows of 1 byte counts"):
            ops(scope(1), splits=((),))

    def test_tables_of_embeddings_by_hand(self):
        """Rank i sends each rank 2048 / 4 rows of its T_i tables, 64 numbers of 4 bytes each."""
        (op,) = ops(tables="2048,2-3-3-5,64")
        share = 2048 // 4 * 64 * 4
        assert op.splits == tuple((tables * share,) * 4 for tables in (2, 3, 3, 5))
        assert op.size_bytes == 4 * 5 * share == 2621440  # what rank 3 sends, itself included
        assert op.bytes == 3 * 5 * share == 1966080  # rank 0 receives less: 11 tables' rows

    def test_several_tables_are_as_many_exchanges(self):
        first, second = "2048,2-3-3-5,64", "256,1-1-1-2,32"
        assert ops(tables=f"{first}\n {second}") == [*ops(tables=first), *ops(tables=second)]

    @pytest.mark.parametrize(
        ("tables", "most_moved", "consistent"),
        # the largest message, and n/(n-1) of it: the size that an even exchange would have
        [
            ("2048,1-1-1-1,64", 393216, 524288),
            ("2048,2-3-3-5,64", 1966080, 2621440),
            ("256,1-1-1-2,32", 49152, 65536),
            ("4096,13-0-0-0,128", 20447232, 27262976),
        ],
    )
    def test_published_examples_of_tables(self, tables, most_moved, consistent):
        (op,) = ops(tables=tables)
        assert op.bytes == most_moved and op.bytes * 4 // 3 == consistent

    @pytest.mark.parametrize(
        ("tables", "message"),
        [
            ("2048,2-3,64", "tables: 2 ranks send, but the group has 4"),
            ("2048,2-3-3-x,64", r"tables = '2048,2-3-3-x,64': must be BATCH,T0-T1-...,DIM"),
            ("2048,2-3-3-5", "must be BATCH,T0-T1-...,DIM"),
            ("2047,2-3-3-5,64", "batch = 2047: is not divisible by 4 ranks"),
            ("2048,2-3-3-5,0", "must be BATCH,T0-T1-...,DIM"),
        ],
    )
    def test_tables_that_cannot_be(self, tables, message):
        with pytest.raises(ValueError, match=message):
            ops(tables=tables)


class TestModels:
    def test_known_bytes_of_the_models_that_primus_measures(self):
        """At microbatch 1, 16 bit: an all-reduce of seq x hidden, an all-to-all of the tokens'
        top-k rows (its benchmark's table)."""
        eight = scope(8, "cuda", "bf16")

        def sizes(name: str, seq_len: int) -> dict[str, int]:
            rows = collectives.derived(
                eight, CollectivesOptions(model=(catalogue.find(name),), seq_len=seq_len)
            )
            return {row.name: row.case.op.size_bytes for row in rows}

        assert sizes("llama-3-70b", 8192)["tp.all_reduce"] == 134_217_728
        assert sizes("llama-2-7b", 4096)["tp.all_reduce"] == 33_554_432
        for name, exchanged in (
            ("deepseek-v3", 469_762_048),
            ("deepseek-v2", 251_658_240),
            ("deepseek-v2-lite", 100_663_296),
            ("mixtral-8x22b", 100_663_296),
            ("mixtral-8x7b", 67_108_864),
        ):
            assert sizes(name, 4096)["ep.all_to_all"] == exchanged

    def test_the_lists_of_primus_at_its_lengths(self):
        """64 rows of each of four kinds, 72 of all-to-all, as its benchmark's tables have them."""
        rows = collectives.derived(
            scope(8, "cuda", "bf16"),
            CollectivesOptions(primus_lists=True, microbatch_sizes=tuple(range(1, 9))),
        )
        kinds = Counter(row.case.op.kind for row in rows)
        assert kinds == {
            "all_reduce": 64, "all_gather": 64, "reduce_scatter": 64, "send_recv": 64,
            "all_to_all": 72,
        }  # fmt: skip
        found = {(row.name, row.model, row.seq_len, row.hidden, row.top_k): row.case.op.size_bytes
                 for row in rows if row.microbatch_size == 1}  # fmt: skip
        sent = {key[1:3]: size for key, size in found.items() if key[0] == "tp.all_reduce"}
        assert sent == {
            (name, seq_len): 2 * seq_len * hidden
            for name, seq_len, hidden in (
                ("llama-2-7b", 4096, 4096), ("llama-2-70b", 4096, 8192),
                ("llama-3-8b", 8192, 4096), ("llama-3-70b", 8192, 8192),
                ("deepseek-v2-lite", 4096, 2048), ("deepseek-v2", 4096, 5120),
                ("deepseek-v3", 8192, 7168), ("mixtral-8x22b", 8192, 6144),
            )
        }  # fmt: skip
        to_experts = {key[1:] for key in found if key[0] == "ep.all_to_all"}
        assert to_experts == {
            ("deepseek-v2-lite", 4096, 2048, 6), ("deepseek-v2", 4096, 5120, 6),
            ("deepseek-v3", 4096, 7168, 8), ("mixtral-8x7b", 4096, 4096, 2),
            ("mixtral-8x22b", 4096, 6144, 2), ("gpt-oss-120b", 4096, 2880, 4),
            ("qwen3-235b-a22b", 4096, 4096, 8), ("qwen3-235b-a22b", 32768, 4096, 8),
            ("llama-4-maverick", 1048576, 5120, 1),
        }  # fmt: skip

    def test_an_all_to_all_alone_splits_no_heads(self):
        """Of which Qwen3 has 64, with 4 of keys: three ranks divide none, eight repeat the keys."""
        model = catalogue.find("qwen3-235b-a22b")
        found = collectives.cases(
            scope(8, "cuda"), CollectivesOptions(model=(model,), kinds=("all_to_all",))
        )
        assert [case.op.size_bytes for case in found] == [8192 * 8 * 4096 * 4]
        assert collectives.cases(scope(8, "cuda"), CollectivesOptions(model=(model,)))
        assert not collectives.cases(
            scope(3, "cuda"), CollectivesOptions(model=(model,), kinds=("all_to_all",))
        )
        with pytest.raises(ValueError, match="tp = 3: must divide heads = 64"):
            collectives.cases(scope(3, "cuda"), CollectivesOptions(model=(model,)))

    def test_rows_say_of_which_model_and_cases_come_once(self):
        model = catalogue.find("mixtral-8x7b")
        twin = replace(model, name="twin")
        rows = collectives.derived(
            scope(8, "cuda"),
            CollectivesOptions(model=(model, twin), microbatch_sizes=(1, 3), seq_len=64),
        )
        assert [row.name for row in rows[:5]] == [
            "tp.all_reduce", "sp.all_gather", "sp.reduce_scatter", "pp.send_recv", "ep.all_to_all",
        ]  # fmt: skip
        about = {(row.model, row.microbatch_size, row.seq_len, row.hidden, row.top_k)
                 for row in rows}  # fmt: skip
        assert about == {(name, rows, 64, 4096, 2) for name in ("mixtral-8x7b", "twin")
                         for rows in (1, 3)}  # fmt: skip
        found = collectives.cases(
            scope(8, "cuda"),
            CollectivesOptions(model=(model, twin), microbatch_sizes=(1, 3), seq_len=64),
        )
        assert len(rows) == 20 and found == [row.case for row in rows[:10]]

    def test_named_ranks_are_the_group_of_what_is_split_over_it(self):
        rows = collectives.derived(
            scope(4), CollectivesOptions(model=(catalogue.get("gpt-30m"),), ranks=(1, 3))
        )
        assert {row.case.op.ranks for row in rows} == {(1, 3)}
        groups = collectives.derived(
            scope(4), CollectivesOptions(model=(catalogue.get("gpt-30m"),), groups=2)
        )
        assert {(row.case.op.group_size, row.case.op.ranks) for row in groups} == {(2, ())}


class TestPlans:
    def test_the_collectives_of_a_plan_are_those_of_its_layout(self):
        """zero 2 of GPT: gradients scattered, weights gathered; tp with sequence parallelism
        the same of rows."""
        found = collectives.cases(scope(4), CollectivesOptions(plan=known.plan()))
        assert {(case.op.kind, case.op.group_size) for case in found} == {
            ("all_gather", 4), ("reduce_scatter", 4),
        }  # fmt: skip
        sizes = [case.op.size_bytes for case in found]
        assert sizes == sorted(sizes) and min(sizes) > 0
        layer = 12 * 1024**2 + 13 * 1024  # parameters of a layer
        gathered = [case.op.size_bytes for case in found if case.op.kind == "all_gather"]
        assert 2 * layer in gathered  # in bf16
        both = collectives.cases(scope(4), CollectivesOptions(plan=known.plan(known.RIVAL)))
        ways = {(case.op.kind, case.op.group_size, case.op.group_stride) for case in both}
        assert ("all_gather", 2, 2) in ways and ("reduce_scatter", 2, 1) in ways

    def test_stages_send_what_a_microbatch_gives_them(self):
        layout = Layout(pp=2, schedule="1f1b", dp=2, zero=1, microbatch_size=2, num_microbatches=2)
        plan = replace(
            known.plan(), layout=layout, stages=stages_of(layout, known.MODEL),
            workload=Workload(global_batch_size=8, seq_len=512),
        )  # fmt: skip
        sent = [op for op in ops(plan=plan) if op.kind == "send_recv"]
        # two sequences of 512 tokens, 1024 wide, in bf16, to the rank two further on
        assert [(op.size_bytes, op.group_size, op.group_stride) for op in sent] == [
            (2 * 512 * 1024 * 2, 2, 2)
        ]

    def test_stages_of_images_send_what_each_boundary_has(self):
        """Four stages of a layer each, on images of 64 x 64: the stem leaves a quarter of the
        side, the second group halves it and has twice the channels. Norms add up three numbers a
        channel."""
        model = WideResNet(blocks=(2, 2), channels=8, width_factor=2, image_size=64, num_classes=6)
        layout = Layout(
            pp=2, schedule="interleaved_1f1b", stages_per_rank=2, dp=2, zero=1,
            microbatch_size=2, num_microbatches=2,
        )  # fmt: skip
        plan = replace(
            known.plan(), model=model, layout=layout, stages=stages_of(layout, model),
            workload=Workload(global_batch_size=8, seq_len=1),
        )  # fmt: skip
        found = ops(plan=plan)
        sent = {(op.size_bytes, op.group_stride) for op in found if op.kind == "send_recv"}
        assert sent == {(2 * 32 * 16 * 16 * 2, 2), (2 * 64 * 8 * 8 * 2, 2)}  # bf16
        summed = {op.size_bytes for op in found if op.kind == "all_reduce"}
        widths = (8, 16, 32, 64)  # the stem, inside and behind layers of both groups
        assert summed == {3 * 4 * width for width in widths}

    def test_a_plan_of_another_number_of_ranks_is_refused(self):
        with pytest.raises(ValueError, match="plan: it is for 4 ranks, not 2; use --nproc 4"):
            ops(scope(2), plan=known.plan())


# --- sizes that follow from a measured curve ---


def measured(cases: list[Case], law: Callable[[int], float], spread: float = 0.01) -> list[Sample]:
    """Times whose median is the law's and whose interval is ``spread`` to either side."""
    return [
        Sample(
            case_id=case.id, case=case, status="ok",
            times_s=tuple(law(case.op.size_bytes) * (1 + side * spread) for side in (-1, 0, 1)),
        )
        for case in cases
    ]  # fmt: skip


def curve(sizes: str = "1K..64M:x4", **options) -> list[Case]:
    return collectives.cases(
        scope(), CollectivesOptions(kinds=("all_reduce",), sizes=sizes, **options)
    )


def followed(law: Callable[[int], float], cases: list[Case]) -> tuple[list[int], int]:
    """The sizes that were added in the end, and in how many rounds."""
    samples, rounds = measured(cases, law), 0
    while wanted := follow.next_cases("bends", samples):
        assert not {case.id for case in wanted} & {sample.case_id for sample in samples}
        samples += measured(wanted, law)
        rounds += 1
        assert rounds < 20
    return sorted(sample.case.op.size_bytes for sample in samples[len(cases) :]), rounds


SMOOTH = {
    "latency": lambda size: 20e-6,
    "bandwidth": lambda size: size / 1e9,
    "a power": lambda size: 1e-9 * size**0.7,
    "slow start": lambda size: 1e-3 + size / 1e11,  # its knee lies beyond the largest size
}


class TestBends:
    @pytest.mark.parametrize("law", SMOOTH.values(), ids=SMOOTH)
    def test_a_smooth_curve_adds_nothing(self, law):
        assert followed(law, curve()) == ([], 0)

    def test_a_switch_of_protocol_is_closed_in_on(self):
        def switching(size: int) -> float:
            return size / 1e9 if size <= 300_000 else size / 4e9 + 250e-6

        added, rounds = followed(switching, curve())
        assert added and 1 <= rounds <= 3
        # beside the switch and nowhere else, until no gap there is a factor of two
        assert min(added) >= 16_384 and max(added) <= 16 * MiB
        every = sorted([*added, *(case.op.size_bytes for case in curve())])
        below = max(size for size in every if size <= 300_000)
        above = min(size for size in every if size > 300_000)
        assert above / below < 2.01

    def test_a_larger_message_that_is_faster_is_a_bend(self):
        times = {64: 10e-6, 256: 10e-6, 1024: 10e-6, 4096: 9e-6, 16384: 9e-6}
        cases = curve("64..16K:x4")
        (more,) = collectives.between(measured(cases, lambda size: times[size]))
        assert more.op.size_bytes == 2048  # between 1024 and 4096
        assert replace(more, op=replace(more.op, size_bytes=1024)) == cases[2]

    def test_noise_within_a_points_own_interval_adds_nothing(self):
        def bumpy(size: int) -> float:
            return 20e-6 * (1.3 if size == 65536 else 1.0)

        assert collectives.between(measured(curve(), bumpy, spread=0.5)) == []
        assert len(collectives.between(measured(curve(), bumpy, spread=0.01))) == 2

    def test_curves_of_other_ways_are_not_mixed(self):
        warm, blocking = curve(modes=("warm",)), curve(modes=("blocking",))
        slower = measured(warm, lambda size: 20e-6) + measured(blocking, lambda size: 60e-6)
        assert collectives.between(slower) == []
        bent = measured(warm, lambda size: 20e-6 if size < 65536 else 90e-6)
        found = collectives.between(bent + measured(blocking, lambda size: 60e-6))
        assert found and {case.regime for case in found} == {"warm"}

    def test_what_failed_or_is_uneven_draws_no_curve(self):
        gone = [
            Sample(case_id=case.id, case=case, status="hung", reason="rank 1 had stopped")
            for case in curve()
        ]
        (uneven,) = collectives.cases(scope(), CollectivesOptions(tables="2048,2-3-3-5,64"))
        product = Case(op=Gemm(m=8, n=8, k=8))
        rest = [
            Sample(case_id=case.id, case=case, status="ok", times_s=(1e-3,))
            for case in (uneven, product)
        ]
        assert collectives.between(gone + rest) == []
        assert collectives.between(measured(curve("64,4K"), lambda size: size / 1e9)) == []

    @given(
        times=st.lists(st.floats(1e-6, 1.0), min_size=9, max_size=9),
        kind=st.sampled_from(collectives.KINDS),
        world=st.sampled_from([2, 3, 4]),
    )
    @settings(max_examples=30)
    def test_every_curve_comes_to_an_end(self, times, kind, world):
        """Whatever it looks like: times between the knots are drawn as straight lines."""
        knots = [math.log(64 * 4**i) for i in range(9)]

        def law(size: int) -> float:
            x = math.log(size)
            i = min(max(sum(x >= knot for knot in knots) - 1, 0), 7)
            share = (x - knots[i]) / (knots[i + 1] - knots[i])
            return math.exp((1 - share) * math.log(times[i]) + share * math.log(times[i + 1]))

        cases = collectives.cases(
            scope(world), CollectivesOptions(kinds=(kind,), sizes="64..4M:x4")
        )
        added, rounds = followed(law, cases)
        assert rounds <= 6
        assert all(64 < size < 4 * MiB for size in added)


def test_nothing_follows_unless_asked_and_known_cases_never_do():
    cases = curve("64..16K:x4")
    bent = measured(cases, lambda size: 10e-6 if size < 1024 else 90e-6)
    assert follow.next_cases("nothing", bent) == []
    first = follow.next_cases("bends", bent)
    assert first == collectives.between(bent) != []
    hung = [Sample(case_id=c.id, case=c, status="hung", reason="rank 1 had stopped") for c in first]
    assert follow.next_cases("bends", bent + hung) == []
    assert follow.next_cases("best_shape", bent) == []
    grid = gemm.cases(scope(1), GemmOptions(search=True))
    fast = [Sample(case_id=c.id, case=c, status="ok", times_s=(c.op.flops / 1e10,)) for c in grid]
    assert follow.next_cases("best_shape", fast) == gemm.next_shapes(fast) != []


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"pairs": True, "tables": "8,1-1-1-1,4"}, "tables and pairs: only one"),
        ({"pairs": True, "kinds": ("all_gather",)}, "kinds = all_gather: pairs says which coll"),
        (
            {"splits": ((4,) * 4,) * 4, "kinds": ("reduce", "all_to_all_v")},
            "kinds = reduce: splits",
        ),
        ({"tables": "8,1-1-1-1,4", "kinds": collectives.KINDS}, "kinds = all_reduce, all_gather"),
        ({"pairs": True, "groups": 2}, "groups and pairs: only one"),
        ({"seq_len": 8}, "seq_len: only the exchanges of a model depend on it"),
        ({"microbatch_sizes": 8, "pairs": True}, "microbatch_sizes: only the exchanges"),
        ({"groups": 2, "ranks": (0, 1)}, "groups and ranks: only one"),
        ({"tables": "8,1-1-1-1,4", "sizes": "4K"}, "sizes: splits, tables, models and plans have"),
        ({"backends": ("smoke",)}, "backend = 'smoke': must be one of torch, gloo, nccl"),
        ({"kinds": ("all_to_all_v",)}, "all_to_all_v: who sends how much"),
        ({"kinds": ("send",)}, "send: from whom to whom"),
    ],
)
def test_options_that_say_two_things_are_refused(asked, said):
    with pytest.raises(ValueError, match=said):
        collectives.cases(scope(4), CollectivesOptions(**asked))


def test_tf32_is_sent_as_something_else():
    with pytest.raises(ValueError, match="dtype = 'tf32': is sent as bf16"):
        collectives.cases(scope(4, dtype="tf32"), CollectivesOptions())


def test_a_plain_collective_keeps_the_id_that_it_had_before_redop_and_root():
    op = Collective(kind="all_reduce", size_bytes=8, group_size=4, in_place=True)
    assert Case(op=op, regime="graph", world_size=4).id == "031258eff88b"


def test_reductions_and_roots_belong_to_the_kinds_that_have_them():
    kinds = ("all_reduce", "all_gather", "reduce")
    asked = CollectivesOptions(kinds=kinds, sizes="4K", op="max", root=3)
    found = {case.op.kind: case.op for case in collectives.cases(scope(4, dtype="int8"), asked)}
    assert [(found[kind].redop, found[kind].root) for kind in kinds] == [
        ("max", 0), ("sum", 0), ("max", 3),
    ]  # fmt: skip
    assert {op.dtype for op in found.values()} == {"int8"}
    for options, message in (
        ({"kinds": ("all_gather",), "op": "max"}, "op = 'max': only all_reduce"),
        ({"pairs": True, "op": "max"}, "op = 'max': only all_reduce"),
        ({"root": 1}, "root = 1: only broadcast, reduce, gather, scatter have one"),
        ({"kinds": ("reduce",), "root": 4}, "root = 4: must be < 4 ranks"),
    ):
        with pytest.raises(ValueError, match=message):
            collectives.cases(scope(4), CollectivesOptions(**options))
