"""What ``measure ring`` is asked and what it says, without ranks: settings, rows, JSON, tables."""

import json
import re

import pytest

from meshwise import store
from meshwise.attention.shards import contiguous
from meshwise.cli import app
from meshwise.pages import ring as page
from meshwise.pages import scaling
from meshwise.probe.cases import ring as cases
from meshwise.spec import Case, Cluster, Device, Dilation, LongAttention, RunInfo, Sample, Tier
from meshwise.spec.label import label

SOURCE_FIELDS = (
    "seq_length", "ring_size", "world_size", "rank", "forward_time_ms", "backward_time_ms",
    "total_time_ms", "memory_allocated_gb", "memory_reserved_gb", "throughput_tokens_per_sec",
    "effective_batch_size", "distributed_overhead_ms", "communication_time_ms",
)  # fmt: skip
OWN_FIELDS = (
    "status", "reason", "layout", "strategy", "peak_memory_gb", "time_min_ms", "time_median_ms",
    "time_p95_ms", "time_max_ms", "forward_min_ms", "forward_median_ms", "forward_p95_ms",
    "forward_max_ms", "bytes_sent", "bytes_received", "comm_lower_bound_bytes", "comm_lower_bound",
    "comm_efficiency", "exposed_comm_ms", "overlap_fraction", "achieved_tflops",
    "flop_convention", "strong_efficiency", "weak_efficiency", "load_imbalance", "collectives",
    "baseline_id", "owner_bound_bytes",
)  # fmt: skip
CLUSTER = Cluster(
    name="here", num_hosts=1, num_devices_per_host=4,
    device=Device(name="some cpu", kind="cpu", memory_bytes=2**30),
    tiers=(Tier(name="host", num_devices=4),),
)  # fmt: skip


def settings(mode="", variables=None, kind="cuda", **given) -> cases.RingSettings:
    return cases.settings(given, variables or {}, mode, kind)


def test_a_way_that_a_ring_cannot_go_is_a_skipped_row():
    chosen = settings(dense=True, way="ring_heads", ring_sizes=(1, 2, 4), num_heads=4, embed_dim=64)
    reasons = {row.case.world_size: row.reason for row in cases.rows(chosen, 4, "cuda")}
    assert reasons[1] == reasons[4] == "" and "ring_heads" in reasons[2]


def test_the_usual_settings_are_the_sources():
    usual = settings()
    assert (usual.batch_size, usual.seq_lengths) == (2, (16384, 32768, 65536))
    assert (usual.embed_dim, usual.num_heads, usual.dtype) == (768, 12, "fp16")
    assert (usual.segment_lengths, usual.dilation_rates) == ((2048, 4096, 8192), (1, 2, 4))
    assert (usual.ring_sizes, usual.warmup_runs, usual.benchmark_runs) == ((1, 2, 4, 8), 3, 10)
    assert settings(kind="cpu").dtype == "fp32"


def test_flags_win_over_modes_and_modes_over_the_environment():
    told = {"SEQ_LENGTHS": "64 128", "BATCH_SIZE": "7", "WARMUP_RUNS": "9", "NUM_HEADS": ""}
    assert settings(variables=told).seq_lengths == (64, 128)
    quick = settings("quick", told, warmup_runs=5)
    assert (quick.seq_lengths, quick.benchmark_runs) == ((8192, 16384), 3)
    assert (quick.warmup_runs, quick.batch_size, quick.num_heads) == (5, 7, 12)
    large = settings("large")
    assert (large.seq_lengths, large.batch_size) == ((131072, 262144), 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_heads": 5}, "embed_dim = 768: must be a multiple of num_heads = 5"),
        ({"segment_lengths": (4,)}, "dilation_rates = (1, 2, 4): must be as many"),
        ({"seq_lengths": (0,)}, "seq_lengths = (0,): give whole numbers of 1 to"),
        ({"seq_lengths": (2**40,)}, f"seq_lengths = ({2**40},): give whole numbers of 1 to"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"num_kv_heads": 5}, "kv_heads = 5: must divide heads = 12"),
        ({"way": "ring_heads"}, "way = 'ring_heads': a dilated branch"),
        ({"order": "zigzag"}, "order = 'zigzag': dilated attention is for contiguous"),
        ({"dense": True, "segment_lengths": (4,)}, "segment_lengths = (4,): dense attention has"),
        ({"dtype": "fp8"}, "dtype = 'fp8': must be one of float16"),
    ],
)
def test_settings_that_do_not_fit_are_one_line(given, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        settings(**given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [("BATCH_SIZE", "two", "must be whole numbers"), ("NUM_HEADS", "1 2", "must be one number")],
)
def test_an_environment_variable_that_is_no_number_is_named(variable, text, message):
    with pytest.raises(ValueError, match=f"{variable} = '{text}': {message}"):
        settings(variables={variable: text})


def test_rings_that_the_ranks_cannot_form_say_why():
    rows = cases.rows(settings(seq_lengths=(64,), ring_sizes=(8, 3, 2, 1, 2)), 4, "cuda")
    assert [row.case.world_size for row in rows] == [1, 2, 3, 8]
    assert [row.reason for row in rows] == [
        "", "", "a ring of 3 does not divide 4 ranks",
        "a ring of 8 needs 8 ranks, and here are 4",
    ]  # fmt: skip
    assert {row.world_size for row in rows} == {4}


def test_mode_all_gives_each_ring_size_a_world_of_its_own():
    rows = cases.rows(settings("all", seq_lengths=(64,)), 4, "cuda")
    assert [(row.world_size, bool(row.reason)) for row in rows] == [
        (1, False), (2, False), (4, False), (8, True),
    ]  # fmt: skip


def test_a_graph_on_cpus_is_skipped_and_no_flash_names_another_kernel():
    chosen = settings(kind="cpu", seq_lengths=(64,), graph=True, use_flash_attention=False)
    row = cases.rows(chosen, 1, "cpu")[0]
    assert row.reason == "a CUDA graph needs GPUs"
    assert (row.case.regime, row.case.backend) == ("graph", "plain")
    assert cases.rows(chosen, 1, "cuda")[0].case.backend == "efficient"


def test_a_forward_alone_is_another_case():
    backward, forward = (
        cases.rows(settings(forward_only=alone), 1, "cuda")[0].case for alone in (False, True)
    )
    assert backward.op.flops == 7 * forward.op.flops // 2 and backward.id != forward.id


def test_settings_are_scaled_down_alike():
    small, factor = cases.scaled(settings(batch_size=8), 1024)
    assert (factor, small.seq_lengths, small.batch_size) == (16, (1024,), 2)
    assert (small.segment_lengths, small.dilation_rates) == ((128, 256, 512), (1, 2, 4))
    tiny, factor = cases.scaled(settings(seq_lengths=(4096,), segment_lengths=(2, 3, 8)), 1024)
    assert (factor, tiny.segment_lengths) == (4, (1, 2, 4))
    assert cases.scaled(settings(seq_lengths=(100,)), 1024)[1] == 1


def test_what_is_known_before_is_as_published():
    """The source's default, fp16, at 16384 tokens: on 4 ranks 6.29 MB must reach the rank that
    needs most if queries stay, on 2 ranks nothing; all branches are local."""
    op = settings(forward_only=True).op(16384)
    figures, _ = cases.known(op, 4, None)
    assert max(figures["owner_bound_bytes"]) == pytest.approx(6.29e6, rel=1e-3)
    assert sum(figures["rank_pairs"]) == op.pairs
    figures, strategy = cases.known(op, 2, None)
    assert figures["planned_bytes"] == (0, 0) and strategy == "local local local"


# ---- the JSON


def sample(ring: int, seq_len: int, total: tuple[float, ...], **rest) -> Sample:
    """Two ranks; ``total``: of rank 0, rank 1 takes half as long again."""
    op = LongAttention(
        batch=2, seq_len=seq_len, heads=4, kv_heads=4, head_dim=8, direction="backward",
        dilation=Dilation(segment_lengths=(16,), dilation_rates=(1,)),
    )  # fmt: skip
    case = Case(op=op, world_size=ring)
    if not total:
        return Sample(case_id=case.id, case=case, **rest)
    slow = tuple(1.5 * time_s for time_s in total)
    metrics = {
        "forward_rank_times_s": (*(t / 4 for t in total), *(t / 3 for t in total)),
        "sent_bytes": (0.0, 0.0), "received_bytes": (0.0, 0.0), "collectives": (0.0, 0.0),
        "planned_bytes": (0.0,) * ring, "owner_bound_bytes": (0.0,) * ring,
        "rank_pairs": (100.0, 300.0)[:ring], "world_size": 2.0, **rest.pop("metrics", {}),
    }  # fmt: skip
    return Sample(
        case_id=case.id, case=case, status="ok", reason="local", times_s=slow,
        rank_times_s=(total, slow), metrics=metrics,
    )  # fmt: skip


def document(*samples: Sample) -> dict:
    config = cases.settings({"dtype": "bfloat16", "num_heads": 4}, {}, "", "cuda")
    info = RunInfo(
        run_id="r", verb="measure", command=("meshwise",), started="2026-02-03T04:05:06Z",
        world_size=2, cluster=CLUSTER, provenance={"ring": store.msgspec.to_builtins(config)},
    )  # fmt: skip
    return page.document("runs/r", info, samples)


MOVED = {
    "sent_bytes": (700.0, 900.0), "received_bytes": (800.0, 1000.0), "collectives": (3.0, 3.0),
    "planned_bytes": (600.0, 800.0), "owner_bound_bytes": (500.0, 400.0),
    "muted_times_s": (5e-3, 6e-3, 5.5e-3), "transfer_times_s": (2e-3,) * 3,
    "peak_bytes": (3e9, 4e9), "reserved_bytes": (5e9, 4e9),
}  # fmt: skip


def test_every_field_of_the_source_and_ours_is_in_every_row():
    failed = sample(2, 64, (), status="oom", reason="rank 0: out of memory")
    found = document(sample(1, 64, (1e-2,) * 3), sample(2, 32, (1e-2,) * 3, metrics=MOVED), failed)
    assert found["schema_version"] == 1 and found["device"] == "some cpu"
    assert found["config"]["dtype"] == "bfloat16" and found["config"]["num_kv_heads"] == 4
    for row in found["results"]:
        assert row.keys() == {*SOURCE_FIELDS, *OWN_FIELDS}
    kept = {"seq_length": 64, "ring_size": 2, "world_size": 2, "rank": 0, "status": "oom",
            "reason": "rank 0: out of memory"}  # fmt: skip
    assert {name: value for name, value in found["results"][2].items() if value is not None} == kept
    json.dumps(found, allow_nan=False)
    assert page.file_name(found) == "ring_v2_collective_benchmark_20260203_040506_world2.json"


def test_figures_of_a_row_are_those_of_their_formulas():
    baseline = sample(1, 64, (8e-3, 9e-3, 10e-3))  # its slowest rank: 13.5 ms
    half = sample(1, 32, (2e-3,) * 3)  # 3 ms
    row = document(half, baseline, sample(2, 64, (5e-3, 6e-3, 4e-3), metrics=MOVED))["results"][2]
    expected = {
        "total_time_ms": 7.5, "forward_time_ms": 5 / 3, "backward_time_ms": 7.5 - 5 / 3,
        "throughput_tokens_per_sec": 2 * 64 / 7.5e-3, "effective_batch_size": 2,
        "distributed_overhead_ms": 7.5 - 13.5 / 2, "strong_efficiency": 13.5 / 2 / 7.5,
        "weak_efficiency": 3 / 7.5, "time_min_ms": 4, "time_max_ms": 9, "time_median_ms": 6,
        "forward_min_ms": 1, "forward_max_ms": 2, "communication_time_ms": 2,
        "exposed_comm_ms": 2, "overlap_fraction": 0, "bytes_sent": 900, "bytes_received": 1000,
        "comm_lower_bound_bytes": 800, "comm_efficiency": 0.8, "owner_bound_bytes": 500,
        "load_imbalance": 1.5, "collectives": 3, "peak_memory_gb": 4, "memory_reserved_gb": 5,
        # 4 segments of 16 rows, 4 heads, batch 2: 4 * 2 * 4096 * 8 FLOPs, 3.5 times, on 2 ranks
        "achieved_tflops": 3.5 * 4 * 2 * (4 * 4 * 16 * 16) * 8 / 7.5e-3 / 2 / 1e12,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert row["baseline_id"] == baseline.case_id
    assert (row["comm_lower_bound"], row["strategy"]) == ("planned", "local")


def test_a_forward_as_long_as_its_total_is_noisy_and_leaves_no_backward():
    """Once the backward was 0 ms."""
    slow = {"forward_rank_times_s": (8e-3,) * 6}  # of 7.5 ms in all
    found = document(sample(1, 64, (5e-3,) * 3, metrics=slow), sample(2, 64, (5e-3,) * 3))
    noisy, quiet = found["results"]
    assert (noisy["status"], noisy["backward_time_ms"]) == ("ok", None)
    assert noisy["reason"].startswith("noisy: the forward alone took as long as")
    assert (quiet["reason"], quiet["backward_time_ms"]) == ("", pytest.approx(7.5 - 5 / 3))
    table, *_ = scaling.of_run(found)
    assert [row[3:5] for row in table.rows] == [("8.00 ms", "noisy"), ("1.67 ms", "5.83 ms")]
    assert "noisy" not in str(scaling.of_run(document(sample(2, 64, (5e-3,) * 3)))[0].rows)


def test_without_a_baseline_or_anything_to_move_figures_are_null():
    (row,) = document(sample(2, 64, (5e-3,) * 3))["results"]
    absent = ("distributed_overhead_ms", "strong_efficiency", "weak_efficiency", "baseline_id",
              "comm_efficiency", "overlap_fraction", "peak_memory_gb")  # fmt: skip
    assert all(row[name] is None for name in absent)
    assert row["communication_time_ms"] == row["exposed_comm_ms"] == 0


def test_a_hung_case_is_an_error_row():
    (row,) = document(sample(2, 64, (), status="hung", reason="rank 1 had stopped"))["results"]
    assert (row["status"], row["reason"]) == ("error", "rank 1 had stopped")


def test_the_table_shows_speedup_and_what_failed():
    failed = sample(4, 64, (), status="skipped", reason="here are 2")
    found = document(sample(1, 64, (8e-3,)), sample(2, 64, (5e-3,), metrics=MOVED), failed)
    time, _, moved, memory, rest = scaling.of_run(found)
    assert "dilated attention" in time.title and "2 ranks" in time.title
    alone, both, _ = (dict(zip(time.columns, row, strict=True)) for row in time.rows)
    assert (alone["speedup"], both["speedup"], both["strong"]) == ("1.00x", "1.60x", "80.0 %")
    (received,) = (dict(zip(moved.columns, row, strict=True)) for row in moved.rows)
    assert received["received"] == "1.00 kB"
    assert [row[:3] for row in memory.rows] == [("64", "2", "4.00 GB")]
    assert rest.rows == (("64", "4", "skipped", "here are 2"),)


# ---- the command


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", *cases.VARIABLES, "OUTPUT_DIR"):
        monkeypatch.delenv(name, raising=False)
    store.write("cluster.toml", CLUSTER)


def call(command: str) -> int:
    with pytest.raises(SystemExit) as ended:
        app.main(["measure", "ring", *command.split()])
    return ended.value.code


@pytest.mark.parametrize("dash", ["-", "_"])
def test_flags_are_the_sources_with_dashes_or_underscores(machine, capsys, dash):
    flags = (
        "--batch_size 1 --seq_lengths 64 96 --embed_dim 32 --num_heads 4 --segment_lengths 16 32 "
        "--dilation_rates 1 2 --ring_sizes 1 2 --warmup_runs 1 --benchmark_runs 2 "
        "--no_flash_attention --dtype bfloat16 --output_dir out --no_save --profile"
    )
    assert call(f"2 --dry-run --json {flags.replace('_', dash)}") == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["seq_length"], row["ring_size"]) for row in found] == [
        (64, 1), (64, 2), (96, 1), (96, 2),
    ]  # fmt: skip
    op = found[0]["case"]["op"]
    assert (op["batch"], op["heads"], op["head_dim"], op["dtype"]) == (1, 4, 8, "bf16")
    assert op["dilation"]["segment_lengths"] == [16, 32]
    assert found[0]["case"]["backend"] == "plain"
    assert found[0]["world_size"] == 2


@pytest.mark.parametrize("lengths", ["=64,96", " 64,96", " 64 96", " 64,96 32"])
def test_lists_are_separated_by_spaces_or_commas(machine, capsys, lengths):
    assert call(f"1 --dry-run --json --ring_sizes=1 --seq_lengths{lengths}") == 0
    found = [row["seq_length"] for row in json.loads(capsys.readouterr().out)]
    assert found == [64, 96, 32][: len(found)] and len(found) == 2 + lengths.endswith("32")


def test_a_dry_run_says_by_which_way_and_what_is_skipped(machine, capsys):
    assert call("2 --quick --ring-sizes 1 2 3 --dry-run") == 0
    out = capsys.readouterr().out
    assert "local x3" in out and "skipped: a ring of 3 needs 3 ranks" in out
    assert "8192" in out and "32768" not in out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--quick --large", "--quick and --large: give one of them"),
        ("2 --nproc 3", "set the same number"),
        ("--num_heads 5 --dry-run", "must be a multiple of num_heads"),
        ("--seq_lengths 0 --dry-run", "error: --seq-lengths = (0,): give whole numbers"),
        ("--kv-heads 5 --dry-run", "error: --kv-heads = 5: must divide heads = 12"),
        ("--ring_sizes --dry-run", "error: --ring-sizes: no value is given"),
        ("2 --verify --ring_sizes 3 4", "error: --ring-sizes = (3, 4): nothing to check, a ring"),
        ("--seq_lengths many", "many"),
        ("--seq_lengths=64,,96", "a place in the list is empty"),
        ("--seq_lengths=64,9.6", "'9.6': must be a whole number"),
    ],
)
def test_bad_options_are_one_line_and_exit_2(machine, capsys, command, message):
    assert call(command) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error


def test_a_case_in_words_tells_rings_apart():
    case = cases.rows(settings(seq_lengths=(64,), ring_sizes=(2,)), 2, "cuda")[0].case
    assert label(case) == "ring attention b2 n64 h12x64 fp16 w2048/4096/8192 r1/2/4 backward x2"
    dense = settings(dense=True, way="ring", order="zigzag", causal=True, num_kv_heads=4)
    assert label(Case(op=dense.op(64))) == (
        "ring attention b2 n64 h12/4x64 fp16 ring zigzag causal backward x1"
    )


def test_shards_are_as_the_order_says():
    dense = settings(dense=True, order="zigzag").op(8)
    assert cases.shards_of(dense, 2).intervals == (((0, 2), (6, 8)), ((2, 4), (4, 6)))
    assert cases.shards_of(settings().op(7), 2) == contiguous(7, 2)
