"""What refit prints: the list, the dry run, the log of Megatron's suite, the one table."""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

import msgspec
import pytest

import meshwise
from meshwise import store
from meshwise.cli import app
from meshwise.pages import refit as page
from meshwise.pages import samples, show, svg
from meshwise.probe.cases import refit as cases
from meshwise.reshard import bounds
from meshwise.spec import Case, Resharding, RunInfo, Sample
from meshwise.verbs import forecast
from tests import sample_records as known

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OUTPUT_DIR", "RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def case(method: str, mode: str = "collocated", name: str = "tp2-tp4") -> Case:
    scenario = cases.scenarios()[name]
    world_size = cases.num_ranks(scenario, mode)
    source, destination = cases.layouts(scenario, mode, world_size)
    op = Resharding(
        model=scenario.model, source=source, destination=destination, scenario=name
    )  # fmt: skip
    return Case(op=op, regime="blocking", backend=method, world_size=world_size)


def sample(method: str, time_s: float, extra_bytes: float = 0.0, **rest) -> Sample:
    one = case(method, rest.pop("mode", "collocated"))
    metrics = {"extra_bytes": (extra_bytes, 0.0), **rest.pop("metrics", {})}
    times_s = (time_s * 0.9, time_s, time_s * 1.1)
    return Sample(
        case_id=one.id, case=one, status="ok", times_s=times_s, metrics=metrics, **rest
    )  # fmt: skip


def failed(method: str) -> Sample:
    one = case(method)
    return Sample(case_id=one.id, case=one, status="oom", reason="rank 0: out of memory")


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        app.main(list(arguments))
    return ended.value.code


def column(table, name: str) -> list[str]:
    return [row[table.columns.index(name)] for row in table.rows]


def test_the_log_has_both_wordings_of_megatrons_suite():
    one = sample(
        "nccl",
        0.010,
        metrics={"source_bytes": (2.0**21, 0.0), "destination_bytes": (0, 3 * 2.0**20)},
    )
    text = "\n".join(page.log_lines(one))
    for line in (
        "MB are 2^20 bytes, as in Megatron's benchmark",
        "Source model size on rank 0: 2.00 MB",
        "Destination model size on rank 0: 0.00 MB",
        "Destination model size on rank 1: 3.00 MB",
        "Iteration 1/3: 9.000 ms",
        "Iteration 3/3: 11.000 ms",
        "Mean refit time: 10.000 ms",
        "Min refit time: 9.000 ms",
        "Max refit time: 11.000 ms",
        "Mean: 10.000 ms",
        "Min: 9.000 ms",
        "Max: 11.000 ms",
    ):
        assert f"\n{line}\n" in f"\n{text}\n"


def test_the_log_of_a_failure_has_no_time():
    text = "\n".join(page.log_lines(failed("nccl")))
    assert "Not measured: oom: rank 0: out of memory" in text
    assert "Mean" not in text


def test_the_fastest_is_recommended_unless_one_as_fast_takes_less_memory():
    fast, close, slow = sample("nccl", 1.0, 900.0), sample("ipc", 1.04, 100.0), sample("gloo", 2.0)
    assert page.recommended([slow, fast, close]) is close
    assert page.recommended([slow, fast]) is fast
    assert page.recommended([failed("nccl")]) is None


def test_one_table_has_every_method_and_mode_with_share_and_mark():
    found = [
        sample("nccl", 0.1, 2.0**20),
        sample("ipc", 0.02, 2.0**20),
        failed("gloo"),
        sample("nccl", 0.2, mode="non-collocated"),
    ]
    table = page.tables(found, step_s=2.0)[0]
    assert column(table, "mode") == ["collocated"] * 3 + ["non-collocated"]
    assert column(table, "method") == ["nccl", "ipc", "gloo", "nccl"]
    assert column(table, "time") == ["100 ms", "20.0 ms", "oom", "200 ms"]
    assert column(table, "extra memory") == ["1.0 MiB", "1.0 MiB", "–", "0 B"]
    assert column(table, "of a step") == ["5 %", "1 %", "–", "10 %"]
    assert column(table, "") == ["", ">", "", ""]
    assert "of a step" not in page.tables(found)[0].columns


def test_the_efficiency_is_the_plans_times_the_executions():
    metrics = {"bound_s": 0.010, "predicted_s": 0.0125, "bound_ingress_s": 0.010}
    metrics |= {"bound_relayed_s": 0.004, "bound_egress_s": 0.02, "rate_bytes_per_s": 373e9}
    one = sample("nccl", 0.025, metrics=metrics)
    _, table = page.tables([one])
    assert table.rows[0][3:] == ("ingress", "10.0 ms", "40 %", "80 %", "50 %")
    assert "373 GB/s" in table.legend[0]


def test_phases_and_the_method_that_auto_chose_are_shown():
    one = sample("auto", 0.01, reason="auto chose ipc", metrics={"phase_pack_s": 0.004})
    results, phases = page.tables([one])
    assert column(results, "method") == ["auto (ipc)"]
    assert "Refit mode: collocated, method: auto (ipc), ranks: 4" in page.log_lines(one)
    assert column(phases, "pack") == ["4.00 ms"]


def test_phases_are_in_the_order_of_a_refit_whatever_the_method():
    direct = ("copy_within", "move", "hash", "compare", "meet")
    staged = ("copy_within", "pack", "move", "unpack", "meet", "compare")
    found = [
        sample(method, 0.01, metrics={f"phase_{name}_s": 0.002 for name in names})
        for method, names in (("ipc", direct), ("nvshmem", staged))
    ]
    _, phases = page.tables(found)
    assert phases.columns == (
        "mode", "method", "copy within", "pack", "move", "unpack", "hash", "compare", "meet",
    )  # fmt: skip
    assert phases.rows[0][3:] == ("–", "2.00 ms", "–", *["2.00 ms"] * 3)
    assert phases.rows[1][6] == "–" and "overlap" in phases.legend[0]


def test_with_delta_bytes_are_of_what_changed_and_no_bound_is_compared():
    one = sample("gloo", 0.01, metrics={"bound_s": 0.01, "predicted_s": 0.01})
    op = msgspec.structs.replace(one.case.op, changed=0.02)
    metrics = one.metrics | {"received_bytes": (2e6, 3e6)}
    case_ = msgspec.structs.replace(one.case, op=op)
    (table,) = page.tables([msgspec.structs.replace(one, case=case_, metrics=metrics)])
    assert table.title.endswith("fp32, 2 % changed")
    assert column(table, "moved") == ["5.00 MB"]
    assert len(page.tables([one])) == 2


def test_what_is_not_as_usual_is_in_the_title_and_apart():
    usual = sample("gloo", 0.01)
    metrics = {"extra_bytes": (5.0 * 2**20, 2.0**20), "destination_bytes": (2.0**22, 0.0)}
    op = msgspec.structs.replace(usual.case.op, atomic=True, verify="full", placement=(0, 2, 1, 3))
    case_ = msgspec.structs.replace(usual.case, op=op)
    other = msgspec.structs.replace(usual, case=case_, metrics=metrics)
    first, second = page.tables([usual, other])
    assert first.title == "Refit tp2-tp4: gpt-4x1024, fp32"
    assert second.title == f"{first.title}, verify full, atomic, placed"
    assert column(second, "extra memory") == ["1.0 MiB + 4.0 MiB"]
    assert "second copy" in second.legend[0] and "second copy" not in first.legend[0]


def test_only_a_table_with_a_mark_explains_it():
    one, two = sample("gloo", 0.01), sample("nccl", 0.02)
    assert "recommended" not in " ".join(page.tables([one])[0].legend)
    assert "recommended" in " ".join(page.tables([one, two])[0].legend)


def test_a_run_is_shown_reported_and_told_as_json(tmp_path):
    info = known.info("refit", None, "20260101T000000-refit-tp2-tp4")
    tables = show.of(show.StoredRun(info=info, samples=(sample("nccl", 0.01), failed("gloo"))))
    titles = [table.title for table in tables]
    assert titles[1:] == ["Refit tp2-tp4: gpt-4x1024, fp32", "Not measured"]
    metrics = {"bound_s": 0.005, "predicted_s": 0.005, "bound_ingress_s": 0.005}
    document = samples.document(tmp_path, info, [sample("nccl", 0.01, metrics=metrics)])
    assert document["results"][0]["of_bound"] == pytest.approx(0.5)
    assert document["results"][0]["binding"] == "ingress"


@pytest.fixture(scope="module")
def dry():
    from meshwise.spec import Cluster
    from meshwise.verbs import files

    links = forecast.links(files.take("h200-hgx", Cluster))
    one = case("nccl", name="8b-tp2-tp4")
    return forecast.forecast(one.op, one.world_size, links)


def test_a_dry_run_adds_up(dry):
    loads = dry.loads
    own = sum(loads[rank][rank] for rank in range(4))
    assert sum(map(sum, loads)) == dry.wire_bytes + dry.local_bytes
    assert own == dry.local_bytes
    # every rank ends up with its quarter of 8.03 B parameters of 2 bytes, norms whole
    for rank in range(4):
        assert sum(row[rank] for row in loads) == pytest.approx(8.03e9 / 4 * 2, rel=2e-3)
    # ranks 1 and 2 hold nothing of their quarter: all of it comes in
    assert dry.max_in_bytes == pytest.approx(4.015e9, rel=1e-3)
    assert dry.binding == "ingress"
    assert dry.bound_s == pytest.approx(4.015e9 / 373e9, rel=1e-3)
    assert dry.plan_efficiency == pytest.approx(1.0, abs=1e-3)


def test_renumbered_ranks_of_tp2_to_tp4_need_no_wire(dry):
    assert dry.placed_wire_bytes == 0
    summary = dict(row for row in page.forecasts([dry])[0].rows)
    assert summary["with --place"] == "0 between ranks, 8.03 GB less"


@pytest.mark.parametrize("name", ["train", "infer", "sizes"])
def test_a_degree_or_size_that_does_not_exist_is_named(name):
    with pytest.raises(ValueError, match=f"{name}: 'cpp' is not one of .*(ep|ffn), "):
        meshwise.refit("tp2-tp1", dry_run=True, **{name: {"cpp": 2}})


def test_a_dry_run_tells_the_share_of_a_step_and_what_it_does_not_know(dry):
    assert (
        dict(page.forecasts([dry], 2.0)[0].rows)["of a step"] == "0.538 % of 2.00 s, as predicted"
    )
    op = msgspec.structs.replace(dry.op, changed=0.02)
    rows = dict(page.forecasts([msgspec.structs.replace(dry, op=op)])[0].rows)
    assert "for a whole refit" in rows["with --delta"] and "of a step" not in rows


def test_a_placed_dry_run_shows_the_permutation(capsys):
    flags = "--scenario tp2-tp4 --num-layers 1 --place --dry-run"
    assert call("refit", *flags.split()) == 0
    assert re.search(r"placed +inference rank 1 on 2, 2 on 1\n", capsys.readouterr().out)
    assert call("refit", *flags.split(), "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["op"]["placement"] == [0, 2, 1, 3]


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [("", "fp32"), ("--model gpt-30m", "bf16"), ("--model gpt-30m --fp32", "fp32")],
)
def test_weights_of_a_model_are_bf16_unless_told(flags, dtype, capsys):
    copied = (
        "--tensor-model-parallel-size 2 --group-query-attention --transformer-impl local "
        "--normalization RMSNorm --position-embedding-type rope --tokenizer-type NullTokenizer "
        "--num-workers 4 --distributed-timeout-minutes 60"
    )
    assert call("refit", *copied.split(), *flags.split(), "--dry-run", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["op"]["source"].get("dtype", "bf16") == dtype


def test_a_cluster_without_rates_is_said_before_another_is_taken(caplog):
    store.write("cluster.toml", known.CPUS)
    with caplog.at_level("INFO", "meshwise"):
        assert call("refit", "--scenario", "tp2-tp1", "--num-layers", "1", "--dry-run") == 0
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "using ./cluster.toml" and "names no rate of its links" in said[1]
    assert said[2] == "using the cluster h200-hgx that comes with Meshwise"


def test_a_dry_run_says_what_binds_at_which_rate(dry):
    summary, bounds, matrix = page.forecasts([dry])
    assert dict(summary.rows)["bound"] == "10.8 ms, ingress"
    assert bounds.rows[0][0] == "ingress (binds)"
    assert "373 GB/s" in bounds.legend[0]
    assert matrix.columns == ("", "0", "1", "2", "3")
    assert matrix.rows[0][1] == matrix.rows[3][4]


def test_the_figure_has_a_cell_for_each_pair_that_bytes_go_between(dry):
    ring = [[0] * 4 for _ in range(4)]
    for rank in range(4):
        ring[rank][(rank + 1) % 4] = (rank + 1) * 1_100_000
    one = msgspec.structs.replace(dry, num_ranks=4, loads=tuple(map(tuple, ring)))
    root = xml.fromstring(svg.standalone(page.figure(one)))
    text = [text.strip() for text in root.itertext()]
    assert [text.count(cell) for cell in ("1.1", "2.2", "3.3", "4.4", ".")] == [1, 1, 1, 1, 0]
    assert {"from", "to"} <= set(text) and "MB from each rank" in page.figure(one).caption


def test_the_figure_of_too_many_ranks_is_refused():
    from meshwise.spec import Cluster
    from meshwise.verbs import files

    links = forecast.links(files.take("h200-hgx", Cluster))
    one = case("nccl", "non-collocated", name="ep4x16-ep8x8")
    dry = forecast.forecast(one.op, one.world_size, links)
    assert dry.loads == ()
    with pytest.raises(ValueError, match="figure: draws at most 16 ranks, and here are 24"):
        page.figure(dry)


def test_between_hosts_the_network_binds():
    from meshwise.spec import Cluster
    from meshwise.verbs import files

    links = forecast.links(files.take("h200-hgx", Cluster))
    one = case("nccl", name="16gpu-tp4pp2-tp8")
    dry = forecast.forecast(one.op, 16, links)
    # 3.63 GB of 2-byte halves of 16 layers and a table must cross 8 x 50 GB/s into one host
    assert dry.binding == "hosts"
    assert dry.bound_s == pytest.approx(3.635e9 / 400e9, rel=0.01)


def test_list_names_scenarios_with_gpus_and_command(capsys):
    assert call("refit", "--list") == 0
    out = capsys.readouterr().out
    assert re.search(r"\ntp2-tp1-apart +2 +3 +non-collocated", out)
    assert out.count("Scenarios: Megatron's suite\n") == 1
    assert out.count("meshwise refit --scenario") == 1
    assert call("refit", "--list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert {"gpus", "command", "scenario", "menu"} <= listed[0].keys()
    assert len(listed) == len(cases.scenarios())


def test_a_dry_run_of_the_sources_flags_needs_no_torch():
    code = """
import contextlib, io, sys
from meshwise.cli.app import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as out:
    main(sys.argv[1:])
import json
found = json.loads(out.getvalue())
assert "torch" not in sys.modules
print(found[0]["wire_bytes"], found[0]["op"]["model"]["layers"], found[0]["op"]["source"]["dtype"])
"""
    flags = (
        "refit --tensor_model_parallel_size 2 --rl-inference-tensor-model-parallel-size 1 "
        "--refit-mode collocated --refit-method nccl --num-layers 3 --hidden-size 256 "
        "--num-attention-heads 4 --seq-length 512 --max-position-embeddings 512 "
        "--micro-batch-size 1 --vocab-size 1024 --bf16 --untie-embeddings-and-output-weights "
        "--disable-bias-linear --no-load-checkpoint --num-benchmark-warmup 1 "
        "--num-benchmark-iterations 2 --dry-run --json"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *flags.split()], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # each of 2 ranks lacks half of 3 layers of 12 x 256^2 and of two tables, 2 bytes each
    halves = 2 * (3 * 12 * 256**2 + 2 * 1024 * 256) // 2 * 2
    assert done.stdout.split() == [str(halves), "3", "bf16"]


def test_stacks_name_the_orders_and_no_library_is_needed(tmp_path, capsys):
    """FSDP2 over 2 ranks to vLLM's tp 2: each lacks what the other has of its half."""
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = f"--from hf:{tmp_path} --layout fsdp2 --to vllm:{tmp_path} --tp 2 --dry-run --json"
    assert call("refit", *flags.split()) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["op"]["source"]["order"] == "hf-fused"
    assert (found["op"]["destination"]["order"], found["op"]["destination"]["tp"]) == ("engine", 2)
    by_rows = 0  # q, k, v, gate, up and the tables: rank r's rows are tp's
    by_columns = 64 * 64 + 64 * 128  # out and down: half of rank r's columns is with the other
    norms = 3 * 64
    assert found["wire_bytes"] == 2 * (2 * (by_rows + by_columns // 4 + norms // 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "nothing to refit: give --scenario"),
        ("--scenario tp2tp4", "did you mean tp2-tp4"),
        ("--scenario tp2-tp4 --figure x.svg", "add --dry-run"),
        ("--scenario tp2-tp4 --step-time never", "--step-time = 'never': is not under"),
        ("--scenario tp2-tp4 --step-time 1e400s", "--step-time = '1e400s': is too large"),
        ("--scenario tp2-tp4 --timeout soon", "timeout = 'soon': is not understood"),
        ("--scenario tp2-tp4 --bf16 --fp16", "--bf16 and --fp16: give one"),
        ("--scenario tp2-tp4 --num-layers 0 --dry-run", "--num-layers = 0: must be >= 1"),
        ("--scenario tp2-tp4 --rate fast --dry-run", "rate = 'fast': must be bytes a second"),
        ("--scenario tp2-tp4 --rate 1e400GB/s --dry-run", "rate = '1e400GB/s': must be bytes"),
        ("--scenario tp2-tp4 --cap 1e400", "cap = '1e400': is too large"),
        ("--scenario tp2-tp4 --cap=-1", "cap = '-1': is not understood"),
        ("--scenario tp2-tp4 --cap 1e30", "cap = '1e30': must be some memory"),
        ("--scenario tp2-tp4 --cap 1KiB --dry-run", "cap = 1.0 KiB: must be at least 3MiB"),
        ("--scenario tp2-tp4 --delta --verify off --dry-run", "verify = 'off': --delta finds"),
        ("--scenario tp2-tp4 --delta --atomic", "atomic = True: does not go with --delta"),
        ("--scenario tp2-tp1 --ffn-hidden-size 63 --dry-run", "tp = 2: must divide the model's"),
        ("--scenario tp2-tp1 --nproc 5000 --dry-run", "nproc = 5000: must be at most 4096 ranks"),
        ("--scenario tp2-tp1 --hidden-size 100000000", "--hidden-size = 100000000: must be >= 1"),
        ("--scenario tp2-tp1 --hidden-size 16777216 --dry-run", "must be at most 1024 TiB"),
        ("--scenario tp2-tp4 --nproc 6 --dry-run", "nproc = 6: must be a multiple of 2"),
        ("--scenario tp2-tp4 --num-benchmark-iterations 0", "must be >= 1"),
        ("--scenario tp2-tp4 --timeout 0s", "timeout = '0s': must be some time"),
        ("--scenario tp2-tp4 --delta --changed 2", "changed = 2.0: must be a share"),
        ("--scenario tp2-tp4 --changed 0.5", "--changed = 0.5: only --delta sends changed"),
        ("--scenario tp2-tp4 --fp32 --fp16", "--fp16 and --fp32: give one"),
        ("--scenario tp2-tp4 --cluster none.toml --dry-run", "none.toml does not exist"),
        ("--tensor-model-parallel-size 3 --dry-run", "must divide the model's heads = 8"),
        ("--refit-method mpi", "--refit-method"),
        ("--from hf:llama-3-8b --dry-run", "to = null: --from and --to go together"),
        ("--from hf --to vllm:llama-3-8b", "from = 'hf': must be one of hf:MODEL, "),
        ("--from hf:gpt-30m --to vllm:gpt-125m", "of hf:gpt-30m and"),
        ("--from hf:gpt-30m --to vllm:gpt-30m", "has no names for GPT-2's"),
        ("--from hf:llama-3-8b --to vllm:llama-3-70b", "hidden = 4096 of hf:llama-3-8b and"),
        ("--from hf:llama-3-8b --to vllm:llama-3-8b --model gpt-30m", "--from names the model"),
        ("--from hf:llama-3-8b --to vllm:llama-3-8b --layout fsdp", "'fsdp' must be one of tp, pp"),
        ("--from hf:llama-3-8b --to vllm:llama-3-8b --tp 0", "tp = 0: must be >= 1"),
        ("--scenario tp2-tp1 --tp 2 --rl-inference-tensor-model-parallel-size 4", "is given twice"),
        ("--scenario tp2-tp1 --layout tp2 --tensor-model-parallel-size 4", "tp is given twice"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert call("refit", *arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err.strip().splitlines()[-1] and "Traceback" not in err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("num_devices", "arguments", "message"),
    [
        (1, "--ffn-hidden-size 63", "tp = 2: must divide the model's ffn = 63"),
        (2, "--ffn-hidden-size 63", "tp = 2: must divide the model's ffn = 63"),
        (2, "--cap 1KiB", "cap = 1.0 KiB: must be at least 2MiB for tp2-tp1"),
    ],
)
def test_what_cannot_be_moved_begins_no_run(num_devices, arguments, message, capsys):
    """Whether rates are known or not; a layout that cannot be, with too few ranks too."""
    tier = msgspec.structs.replace(known.CPUS.tiers[0], num_devices=num_devices)
    for rate in (None, 1e9):
        tiers = (msgspec.structs.replace(tier, bytes_per_s=rate),)
        machine = msgspec.structs.replace(
            known.CPUS, num_hosts=1, num_devices_per_host=num_devices, tiers=tiers
        )
        store.write("cluster.toml", machine)
        flags = f"--num-layers 1 --hidden-size 64 --vocab-size 250 {arguments}"
        assert call("refit", "--scenario", "tp2-tp1", *flags.split()) == 2
        assert message in capsys.readouterr().err
        assert not Path("runs").exists()


def test_a_figure_of_too_many_ranks_is_refused_before_anything_is_planned(monkeypatch, capsys):
    monkeypatch.setattr(forecast, "forecast", None)
    flags = "--scenario kimi-k2 --dry-run --figure k.svg"
    assert call("refit", *flags.split()) == 2
    assert "figure = 'k.svg': draws at most 16 ranks, and here are 64" in capsys.readouterr().err


def test_a_dry_run_draws_its_first_transfer(capsys):
    flags = "--scenario tp2-tp1 --scenario kimi-k2 --num-layers 1 --dry-run --figure"
    assert call("refit", *flags.split(), "k.svg") == 0
    assert "tp2-tp1, collocated" in Path("k.svg").read_text(encoding="utf-8")
    assert call("refit", "--scenario", "tp2-tp1", "--dry-run", "--figure", "k.svg/a.svg") == 2
    assert "k.svg/a.svg cannot be written: Not a directory" in capsys.readouterr().err


def test_the_least_cap_grows_with_peers_and_steps():
    def least(name: str, given=None, **options) -> int:
        one = case("nccl", cases.scenarios()[name].mode, name)
        op = msgspec.structs.replace(one.op, cap_bytes=1, **options)
        with pytest.raises(ValueError, match="must be at least") as error:
            forecast.known(op, one.world_size, given)
        return int(re.search(r"at least (\d+)MiB", str(error.value))[1])

    # a peer; tiles half full of 614 MB that come in or stay and 307 MB that go: 28 k of 96 bytes
    assert least("tp2-tp1") == 1 + 3
    assert least("tp2-tp1", verify="full") == 1 + 6  # three lines of 7 words for one
    # the second host's replicas pass on to all 7 others, in the second of two steps
    of_hosts = forecast.LinkRates(bounds.Rates("two hosts", 373e9, 400e9), 8)
    assert least("dp8-dp8", of_hosts) >= 2 * 7 > least("dp8-dp8")


def test_a_small_transfer_takes_what_it_moves_and_no_cap(dry):
    one = case("gloo", name="tp2-tp1")
    links = forecast.LinkRates(bounds.Rates("all", 1e9), 8)
    small = msgspec.structs.replace(one.op, model=cases.resized(one.op.model, vocab=512))
    found = forecast.forecast(small, 2, links)
    # 4 layers of 12 x 1024^2 and two tables, fp32: half of all comes from the other rank
    moved = 2 * 4 * (4 * 12 * 1024**2 + 2 * 512 * 1024) // 2
    assert moved < found.staging_bytes < 1.01 * moved
    assert dry.staging_bytes == dry.op.cap_bytes


def test_a_cluster_of_cpus_has_no_links_to_plan_with():
    store.write("cluster.toml", known.CPUS)
    assert call("refit", "--scenario", "tp2-tp1", "--dry-run") == 0
    assert call("refit", "--scenario", "tp2-tp1", "--dry-run", "--cluster", "./cluster.toml") == 2


def test_run_info_of_a_refit_reads_back(tmp_path):
    info = known.info("refit", None, "20260101T000000-refit-tp2-tp4")
    one = sample("nccl", 0.01)
    known.write_run(tmp_path, info, [one])
    read, found, warnings = store.load(tmp_path / info.run_id)
    assert isinstance(read, RunInfo) and found == [one] and not warnings
