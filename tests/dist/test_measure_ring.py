"""measure ring on gloo: rows, files and exit codes end to end; --verify sees what is broken."""

import itertools
import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from meshwise import launch, store
from meshwise.attention.reference import multiplicity, reference
from meshwise.cli import app
from meshwise.launcher import Job
from meshwise.probe import ring as probe
from meshwise.probe import ring_verify
from meshwise.probe.cases import ring as cases
from meshwise.ranks import Ranks
from meshwise.spec import Cluster, Device, Dilation, LongAttention, Sample, Tier
from meshwise.spec.label import label

pytestmark = pytest.mark.dist
SMALL = (
    "--batch_size 1 --embed_dim 32 --num_heads 4 --segment_lengths 16 64 --dilation_rates 1 2 "
    "--warmup_runs 1 --benchmark_runs 2"
)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OUTPUT_DIR", *cases.VARIABLES)
    for name in names:
        monkeypatch.delenv(name, raising=False)
    cluster = Cluster(
        name="here", num_hosts=1, num_devices_per_host=2,
        device=Device(name="cpu", kind="cpu", memory_bytes=2**30),
        tiers=(Tier(name="host", num_devices=2, bytes_per_s=1e9),),
    )  # fmt: skip
    store.write("cluster.toml", cluster)


def call(command: str) -> int:
    with pytest.raises(SystemExit) as ended:
        app.main(["measure", "ring", *command.split()])
    return ended.value.code


# ---- the definition


def by_hand(q, k, v, op: LongAttention, shift: list[list[int | None]]):
    """out and lse, key by key; ``shift[branch][head]``: the offsets."""
    out, lse = np.zeros(q.shape), np.full((op.batch, op.heads, op.seq_len), -np.inf)
    places = itertools.product(range(op.batch), range(op.heads), range(op.seq_len))
    for b, h, p in places:
        weights = {}
        for x in range(p + 1 if op.causal else op.seq_len):
            if op.window is not None and p - x >= op.window:
                continue
            times = 1 if op.dilation is None else 0
            for branch in range(len(shift)):
                width = min(op.dilation.segment_lengths[branch], op.seq_len)
                rate, s = op.dilation.dilation_rates[branch], shift[branch][h]
                together = p // width == x // width
                times += together and s is not None and p % width % rate == x % width % rate == s
            score = q[b, p, h] @ k[b, x, h * op.kv_heads // op.heads] / math.sqrt(op.head_dim)
            weights[x] = times * math.exp(score)
        total = sum(weights.values())
        if total:
            lse[b, h, p] = math.log(total)
            rows = (w * v[b, x, h * op.kv_heads // op.heads] for x, w in weights.items())
            out[b, p, h] = sum(rows) / total
    return out, lse


MOD = [[0, 0, 0, 0], [0, 1, 2, 0]]
PATTERNS = {
    "dense": (None, []),
    "mod": (Dilation(segment_lengths=(5, 40), dilation_rates=(1, 3)), MOD),
    "dead rows": (Dilation(segment_lengths=(8,), dilation_rates=(3,)), MOD[1:]),
    "by kv head": (
        Dilation(segment_lengths=(9,), dilation_rates=(3,), offset_heads="kv"), [[0, 0, 1, 1]],
    ),
    "block": (
        Dilation(segment_lengths=(9,), dilation_rates=(3,), offsets="block"), [[0, 0, 1, 1]],
    ),
    "group": (
        Dilation(segment_lengths=(5, 7, 6), dilation_rates=(1, 2, 2), offsets="group"),
        [[0, None, None, None], [None, 1, None, None], [None, None, 0, 0]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_reference_is_the_definition(pattern, causal):
    dilation, shift = PATTERNS[pattern]
    op = LongAttention(
        batch=2, seq_len=17, heads=4, kv_heads=2, head_dim=3, causal=causal, dilation=dilation,
        window=6 if causal and dilation is None else None,
    )  # fmt: skip
    draw = np.random.default_rng(0)
    q, k, v = (draw.normal(size=(2, 17, heads, 3)) for heads in (4, 2, 2))
    wanted, wanted_lse = by_hand(q, k, v, op, shift)
    out, lse = reference(*map(torch.from_numpy, (q, k, v)), op)
    np.testing.assert_allclose(out, wanted, atol=1e-14)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-14)
    pairs = sum(int(multiplicity(op, head).sum()) for head in range(4))
    assert pairs == op.pairs


def test_the_reference_has_gradients_also_beside_dead_rows():
    dilation = Dilation(segment_lengths=(4,), dilation_rates=(3,))
    op = LongAttention(batch=1, seq_len=6, heads=2, kv_heads=1, head_dim=2, dilation=dilation)
    inputs = [torch.randn(1, 6, heads, 2).double().requires_grad_() for heads in (2, 1, 1)]
    assert torch.autograd.gradcheck(lambda *x: reference(*x, op)[0], inputs)


def test_a_detached_mixture_has_the_same_values_and_another_gradient():
    grads, outs = [], []
    for mixture in ("exact", "detached"):
        dilation = Dilation(segment_lengths=(4, 8), dilation_rates=(1, 2), mixture=mixture)
        op = LongAttention(batch=1, seq_len=8, heads=2, kv_heads=2, head_dim=2, dilation=dilation)
        torch.manual_seed(0)
        inputs = [torch.randn(1, 8, 2, 2).double().requires_grad_() for _ in range(3)]
        outs.append(reference(*inputs, op)[0])
        grads.append(torch.autograd.grad(outs[-1].square().sum(), inputs))
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(grads[0][2], grads[1][2])  # of v
    assert not torch.allclose(grads[0][0], grads[1][0])


# ---- measuring


def test_the_command_measures_rings_skips_others_and_writes_its_files(capsys, monkeypatch):
    monkeypatch.setenv("SEQ_LENGTHS", "64")
    assert call(f"2 {SMALL} --ring_sizes 1 2 4 --output_dir out --profile") == 0
    out = capsys.readouterr().out
    assert "local, " in out and "here are 2" in out and "out/latest.json" in out
    found = json.loads(Path("out/latest.json").read_text())
    (dated,) = Path("out").glob("ring_v2_collective_benchmark_*_world2.json")
    assert dated.read_text() == Path("out/latest.json").read_text()
    alone, both, four = found["results"]
    assert [row["status"] for row in found["results"]] == ["ok", "ok", "skipped"]
    assert alone["bytes_received"] == alone["collectives"] == 0
    assert 0 < both["bytes_received"] <= both["comm_lower_bound_bytes"]
    assert both["bytes_received"] >= both["owner_bound_bytes"] > 0
    assert both["communication_time_ms"] > 0 and both["exposed_comm_ms"] >= 0
    assert both["baseline_id"] and four["total_time_ms"] is None
    traces = sorted(path.name[-10:] for path in Path("out").glob("trace_*"))
    assert traces == ["rank0.json", "rank1.json"]
    assert "traceEvents" in json.loads(next(Path("out").glob("trace_*")).read_text())
    info, samples, _ = store.load(found["run_dir"])
    assert (info.status, len(samples)) == ("complete", 3)


def test_mode_all_starts_a_world_for_each_ring_size_and_no_save_leaves_nothing(capsys):
    before = set(Path().iterdir())
    assert call(f"{SMALL} --all --seq_lengths 64 --no_save --forward-only --json") == 0
    found = json.loads(capsys.readouterr().out)
    worlds = [(row["ring_size"], row["world_size"], row["status"]) for row in found["results"]]
    assert worlds == [(1, 1, "ok"), (2, 2, "ok"), (4, 4, "skipped"), (8, 8, "skipped")]
    assert found["results"][1]["backward_time_ms"] is None
    assert set(Path().iterdir()) == before


def test_ranks_that_die_are_an_error_row_and_exit_4(monkeypatch, capsys):
    genuine, asked = launch.run, []

    def run(target, request, **options):
        asked.append([case.op.seq_len for case in request.cases])
        if len(asked) == 1:
            raise launch.RanksFailed("rank 1 died of signal 9", 1)
        genuine(target, request, **options)

    monkeypatch.setattr(launch, "run", run)
    assert call(f"2 {SMALL} --seq_lengths 64 96 --ring_sizes 2 --json") == 4
    assert asked == [[64, 96], [96]]
    first, second = json.loads(capsys.readouterr().out)["results"]
    assert (first["status"], first["reason"]) == ("error", "rank 1 died of signal 9")
    assert second["status"] == "ok"


def after(monkeypatch, error: launch.RanksFailed) -> None:
    """The job measures all that it is asked and then fails so."""
    genuine = launch.run

    def run(target, request, **options):
        genuine(target, request, **options)
        raise error

    monkeypatch.setattr(launch, "run", run)


def test_a_rank_that_dies_after_the_last_row_costs_none(monkeypatch, capsys):
    after(monkeypatch, launch.RanksFailed("rank 1 died of SIGSEGV during case ring", 1))
    assert call(f"2 {SMALL} --seq_lengths 64 --ring_sizes 1 2 --json") == 0
    told = capsys.readouterr()
    assert [row["status"] for row in json.loads(told.out)["results"]] == ["ok", "ok"]
    assert "SIGSEGV during case ring; no case is left" in told.err


def test_under_a_launcher_a_job_that_hangs_leaves_the_row_it_hung_in(monkeypatch, capsys):
    def run(target, request, **options):
        raise launch.RanksFailed("rank 1 had not arrived at a gather", 1)

    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr(Job, "here", lambda: Job(world_size=2, launched=True))
    assert call(f"{SMALL} --seq_lengths 64 96 --ring_sizes 2 --output_dir out") == 4
    (only,) = json.loads(Path("out/latest.json").read_text())["results"]
    assert (only["seq_length"], only["status"]) == (64, "error")
    assert only["reason"] == "rank 1 had not arrived at a gather"


def test_under_a_launcher_a_case_that_hangs_after_a_refused_one_has_its_row(monkeypatch, capsys):
    def run(target, request, **options):
        first, second = request.cases
        refused = Sample(case_id=first.id, case=first, status="error", reason="rank 0: no")
        store.append(request.run_dir, refused)
        raise launch.RanksFailed(f"rank 1 had not arrived, during case {label(second)}", 1)

    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr(Job, "here", lambda: Job(world_size=2, launched=True))
    assert call(f"{SMALL} --seq_lengths 64 96 --ring_sizes 2 --output_dir out") == 4
    results = json.loads(Path("out/latest.json").read_text())["results"]
    assert [row["reason"][:6] for row in results] == ["rank 0", "rank 1"]


@pytest.mark.parametrize("flags", ["", "--no_save --profile"])
def test_a_place_that_cannot_be_written_is_refused_before_measuring(monkeypatch, capsys, flags):
    monkeypatch.setattr(launch, "run", lambda *_, **__: pytest.fail("was measured"))
    Path("file").touch()
    assert call(f"2 {SMALL} --seq_lengths 64 --output_dir file/out {flags}") == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: --output-dir = 'file/out': cannot be written: ")
    assert not Path("runs").exists()


def request(run_dir: Path, *flags, **given) -> str:
    usual = {
        "batch_size": 1, "embed_dim": 16, "num_heads": 2, "segment_lengths": (8, 32),
        "dilation_rates": (1, 2), "seq_lengths": (32, 48), "ring_sizes": (2,),
    }  # fmt: skip
    chosen = cases.settings(usual | given, {}, "", "cpu")
    todo = tuple(row.case for row in cases.rows(chosen, 2, "cpu"))
    known = tuple(cases.known(case.op, case.world_size, None) for case in todo)
    asked = probe.RingRequest(cases=todo, known=known, run_dir=str(run_dir), iterations=1)
    run_dir.mkdir()
    return msgspec.json.encode(asked).decode()


def measured(ranks: Ranks, payload: str) -> str:
    try:
        probe.measure_ranks(ranks, payload.encode())
    except RuntimeError as error:
        return str(error)
    return ""


def lacking_memory(ranks: Ranks, payload: str, on: list[int]) -> str:
    """The first case's inputs do not fit on these ranks."""
    genuine, calls = probe.timing.randn, []

    def randn(*args, **options):
        calls.append(args)
        if ranks.rank in on and len(calls) == 1:
            raise torch.OutOfMemoryError("out of memory: tried to allocate 1 TiB")
        return genuine(*args, **options)

    probe.timing.randn = randn
    try:
        return measured(ranks, payload)
    finally:
        probe.timing.randn = genuine


def refusing(ranks: Ranks, payload: str) -> str:
    genuine = probe.dilated_attention

    def refuse(q, *args, **options):
        if q.shape[1] == 16:
            raise ValueError("q: is not to my taste")
        return genuine(q, *args, **options)

    probe.dilated_attention = refuse
    try:
        return measured(ranks, payload)
    finally:
        probe.dilated_attention = genuine


def samples_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]


def test_memory_that_all_ranks_lack_is_a_row_and_the_rest_follows(gloo_ranks, tmp_path):
    payload = request(tmp_path / "run")
    assert gloo_ranks(2, lacking_memory, payload=payload, on=[0, 1]) == ["", ""]
    first, second = samples_of(tmp_path / "run")
    assert (first["status"], second["status"]) == ("oom", "ok")
    assert first["reason"].startswith("rank 0: out of memory")


def test_memory_that_one_rank_lacks_is_a_row_and_ends_the_job(gloo_ranks, tmp_path):
    payload = request(tmp_path / "run")
    told = gloo_ranks(2, lacking_memory, payload=payload, on=[1])
    assert all("rank 1: out of memory" in text for text in told)
    (only,) = samples_of(tmp_path / "run")
    assert only["status"] == "oom" and only["reason"].startswith("rank 1: out of memory")


def test_a_refused_case_is_an_error_row(gloo_ranks, tmp_path):
    gloo_ranks(2, refusing, payload=request(tmp_path / "run"))
    first, second = samples_of(tmp_path / "run")
    assert (first["status"], first["reason"]) == ("error", "rank 0: q: is not to my taste")
    assert second["status"] == "ok" and len(second["rank_times_s"]) == 2


# ---- --verify


def test_verify_passes_and_says_so(capsys):
    assert call(f"2 {SMALL} --seq_lengths 96 --causal --verify --ring_sizes 1 2 4") == 0
    out = capsys.readouterr().out
    assert out.strip().endswith("All tests passed")
    assert "Not checked: a ring of 4 needs 4 ranks, and here are 2." in out
    assert out.count("passed") == 2 * 6 + 1 and "FAILED" not in out


def checked(ranks: Ranks, file: str, broken: str, causal: bool) -> list[dict]:
    """The checks of a deliberately broken attention."""
    genuine = ring_verify.attention

    def attention(op, ring, prices, **more):
        whole = genuine(op, ring, prices, **more)
        later = genuine(msgspec.structs.replace(op, causal=False), ring, prices, **more)

        def attend(q, k, v):
            if broken == "sees later tokens":
                return later(q, k, v)
            if broken == "attends across heads":
                scores = torch.softmax(q @ k.transpose(-1, -2), -1)
                return scores @ v, whole(q, k, v)[1]
            if broken == "has no gradient of k":
                return whole(q, k.detach() + 0 * k, v)
            out, lse = whole(q, k, v)
            if broken == "one row is wrong on rank 1" and ranks.rank == 1:
                out = out * torch.ones_like(out).index_fill(1, torch.tensor([5]), 1.001)
            if broken == "raises":
                raise ValueError("no")
            return out, lse

        return attend

    op = LongAttention(
        batch=1, seq_len=32, heads=2, kv_heads=2, head_dim=4, causal=causal, dtype="fp64",
        dilation=Dilation(segment_lengths=(8, 32), dilation_rates=(1, 2)),
    )  # fmt: skip
    asked = ring_verify.VerifyRequest(op=op, ring_sizes=(2,), file=file)
    ring_verify.attention = attention
    try:
        ring_verify.verify_ranks(ranks, msgspec.json.encode(asked))
    finally:
        ring_verify.attention = genuine
    return json.loads(Path(file).read_text())


BROKEN = {
    "nothing": (True, set()),
    "sees later tokens": (True, {"forward", "log-sum-exp", "locality"}),
    "attends across heads": (False, {"forward", "locality"}),
    "has no gradient of k": (False, {"gradient of k"}),
    "one row is wrong on rank 1": (True, {"forward"}),
    "raises": (False, {"locality"}),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_verify_sees_an_attention_that_is_broken(gloo_ranks, tmp_path, broken):
    causal, wanted = BROKEN[broken]
    file = str(tmp_path / "checks.json")
    checks = gloo_ranks(2, checked, file=file, broken=broken, causal=causal)[0]
    failed = {check["name"] for check in checks if check["passed"] is False}
    assert failed >= wanted and bool(failed) == bool(wanted)


def test_a_failed_check_is_exit_code_1(monkeypatch, capsys):
    def run(target, request, **options):
        check = {"ring_size": 1, "name": "forward", "passed": False, "found": "error 1"}
        Path(request.file).write_text(json.dumps([check]))

    monkeypatch.setattr(launch, "run", run)
    assert call(f"1 {SMALL} --seq_lengths 64 --verify") == 1
    assert "1 of 1 tests FAILED" in capsys.readouterr().out


def verified(ranks: Ranks, file: str, way: str, order: str) -> list[dict]:
    op = LongAttention(
        batch=1, seq_len=31, heads=4, kv_heads=2, head_dim=4, causal=True, dtype="fp64", way=way,
        order=order,
    )  # fmt: skip
    asked = ring_verify.VerifyRequest(op=op, ring_sizes=(2,), file=file)
    ring_verify.verify_ranks(ranks, msgspec.json.encode(asked))
    return json.loads(Path(file).read_text())


@pytest.mark.parametrize("way", ["auto", "ring", "gather", "heads"])
def test_verify_passes_for_dense_attention_by_every_way(gloo_ranks, tmp_path, way):
    order = "zigzag" if way == "ring" else "contiguous"
    checks = gloo_ranks(2, verified, file=str(tmp_path / "checks.json"), way=way, order=order)[0]
    assert len(checks) == 6 and all(check["passed"] for check in checks)
