"""The refit benchmark on gloo: every element is compared, wrong ones show, failures are rows."""

import json
from pathlib import Path

import msgspec
import pytest
import torch

import meshwise
from meshwise import launch, store
from meshwise.cli import app
from meshwise.options.refit import Moving
from meshwise.probe import elements, refit
from meshwise.probe.cases import refit as cases
from meshwise.ranks import Ranks
from meshwise.reshard.holdings import HeldTensor, Holdings, buffers, holdings
from meshwise.reshard.regions import Box, Piece, replicated, sharded
from meshwise.spec import Case, Cluster, Device, Resharding, Tier

pytestmark = pytest.mark.dist
SMALL = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 250}
FLAGS = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 250"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OUTPUT_DIR", "RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def machine(num_devices: int) -> None:
    cluster = Cluster(
        name="here", num_hosts=1, num_devices_per_host=num_devices,
        device=Device(name="cpu", kind="cpu", memory_bytes=2**30),
        tiers=(Tier(name="host", num_devices=num_devices, bytes_per_s=1e9),),
    )  # fmt: skip
    store.write("cluster.toml", cluster)


HELD: Holdings = {
    "rows": HeldTensor((6, 5), "bf16", sharded((6, 5), 0, [0, 1])),
    "columns": HeldTensor((6, 5), "fp32", sharded((6, 5), 1, [0, 1], sizes=[2, 3])),
    "stacked": HeldTensor((4, 3, 5), "fp32", sharded((4, 3, 5), 0, [0, 1])),
    "expert": HeldTensor(
        (4, 3, 5), "fp32", (Piece(0, Box((2, 0, 0), (3, 3, 5)), (0, 0, 0), "e2"),)
    ),
    "norm": HeldTensor((7,), "fp32", replicated((7,), [0, 1])),
    "up": HeldTensor((2, 3), "fp8", (Piece(0, Box((0, 0), (2, 3)), (2, 0), "fused"),)),
}
LOCAL = {  # of rank 0: an expert by itself has a dim less; "fused" has rows before and after
    "rows": ((3, 5), torch.bfloat16),
    "columns": ((6, 2), torch.float32),
    "stacked": ((2, 3, 5), torch.float32),
    "e2": ((3, 5), torch.float32),
    "norm": ((7,), torch.float32),
    "fused": ((5, 3), torch.int8),
}


def local() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape).to(dtype) for name, (shape, dtype) in LOCAL.items()}


@pytest.mark.parametrize("part", [1, 4, 2**22])
def test_elements_are_the_same_however_the_work_is_cut(part, monkeypatch):
    whole, cut = local(), local()
    elements.write(whole, HELD, 0, version=1)
    monkeypatch.setattr(elements, "PART", part)
    elements.write(cut, HELD, 0, version=1)
    for name in whole:
        assert torch.equal(whole[name].view(torch.uint8), cut[name].view(torch.uint8))
    assert elements.wrong(cut, HELD, 0, version=1) == (15 + 12 + 30 + 15 + 7 + 6, {})


def test_elements_of_a_tensor_do_not_depend_on_its_layout():
    mine, other = local(), {"columns": torch.zeros(6, 5)}
    elements.write(mine, HELD, 0, version=1)
    elements.write(other, {"columns": HeldTensor((6, 5), "fp32", replicated((6, 5), [0]))}, 0, 1)
    assert torch.equal(mine["columns"].view(torch.int32), other["columns"][:, :2].view(torch.int32))


def test_a_wrong_element_an_old_version_and_poison_show():
    mine = local()
    elements.write(mine, HELD, 0, version=1)
    mine["rows"].view(torch.int16)[2, 4] ^= 1
    assert elements.wrong(mine, HELD, 0, version=1)[1] == {"rows": 1}
    old = elements.wrong(mine, HELD, 0, version=2)[1]
    assert old["columns"] == 12 and old["norm"] == 7 and old["rows"] >= 14
    elements.poison(mine)
    assert elements.wrong(mine, HELD, 0, version=1)[1]["stacked"] == 30


def test_rows_that_nobody_holds_stay():
    mine = local()
    elements.write(mine, HELD, 0, version=1)
    assert not mine["fused"][[0, 1, 4]].any() and mine["fused"][2:4].any()


def test_changes_are_the_same_in_every_layout():
    shape = (64, 1024)
    whole = {"w": HeldTensor(shape, "fp32", replicated(shape, [0]))}
    columns = {"w": HeldTensor(shape, "fp32", sharded(shape, 1, [0, 1]))}
    a, b = {"w": torch.zeros(shape)}, {"w": torch.zeros(64, 512)}
    for turn in range(3):
        elements.change(a, whole, 0, turn, every=8)
        elements.change(b, columns, 0, turn, every=8)
    assert torch.equal(a["w"].view(torch.int32)[:, :512], b["w"].view(torch.int32))
    assert int(a["w"].view(torch.int32).count_nonzero()) == 3 * 64 * 1024 // 8


def request(run_dir: Path, check: bool = True, **rest) -> refit.RefitRequest:
    scenario = cases.changed(cases.scenarios()["tp2-tp1"], sizes=SMALL)
    source, destination = cases.layouts(scenario, "collocated", 2)
    op = Resharding(model=scenario.model, source=source, destination=destination)
    case = Case(op=op, regime="blocking", backend="gloo", world_size=2)
    asked = Moving(iterations=3, check=check)
    return refit.RefitRequest(case=case, run_dir=str(run_dir), asked=asked, **rest)


def measured(ranks: Ranks, payload: str) -> None:
    refit.measure_ranks(ranks, payload.encode())


def with_a_flipped_bit(ranks: Ranks, payload: str) -> None:
    """A refit whose rank 1 loses a bit of one weight each time, and says nothing."""
    genuine = refit.Refit

    class Careless(genuine):
        def __call__(self):
            moved = super().__call__()
            if ranks.rank == 1:
                tensors["model.norm.weight"].view(torch.int32)[3] ^= 4
            return moved

        def __init__(self, source, source_plan, destination, *rest, **options):
            tensors.update(destination)
            super().__init__(source, source_plan, destination, *rest, **options)

    tensors: dict[str, torch.Tensor] = {}
    refit.Refit = Careless
    try:
        refit.measure_ranks(ranks, payload.encode())
    finally:
        refit.Refit = genuine


def with_nothing_moved(ranks: Ranks, payload: str) -> None:
    """A refit that reports success and moves nothing after the first time."""
    genuine = refit.Refit

    class Idle(genuine):
        def __call__(self):
            if not hasattr(self, "first"):
                self.first = super().__call__()
            return self.first

    refit.Refit = Idle
    try:
        refit.measure_ranks(ranks, payload.encode())
    finally:
        refit.Refit = genuine


def lacking_memory(ranks: Ranks, payload: str) -> None:
    genuine = torch.empty

    def empty(*args, **options):
        if ranks.rank == 1:
            raise torch.OutOfMemoryError("out of memory: tried to allocate 1 TiB")
        return genuine(*args, **options)

    refit.torch.empty = empty
    try:
        refit.measure_ranks(ranks, payload.encode())
    finally:
        refit.torch.empty = genuine


def outcome(gloo_ranks, run_dir: Path, function, **rest):
    run_dir.mkdir()
    payload = msgspec.json.encode(request(run_dir, **rest)).decode()
    gloo_ranks(2, function, payload=payload)
    (line,) = (run_dir / "samples.jsonl").read_text().splitlines()
    return json.loads(line)


def test_a_refit_is_timed_and_every_element_of_both_copies_compared(gloo_ranks, tmp_path):
    sample = outcome(gloo_ranks, tmp_path / "run", measured, metrics={"bound_s": 0.5})
    assert sample["status"] == "ok" and len(sample["times_s"]) == 3
    assert [len(times) for times in sample["rank_times_s"]] == [3, 3]
    # 2 layers of 12 x 64^2 and 2 x 64, a last norm, two tables of 250 rows: on each rank
    each = 2 * (12 * 64**2 + 2 * 64) + 64 + 2 * 250 * 64
    metrics = sample["metrics"]
    assert metrics["compared"] == 2 * each
    # half of everything but the norms comes from the other rank
    assert sum(metrics["received_bytes"]) == 2 * (each - 5 * 64) // 2 * 4
    assert metrics["sent_bytes"] == metrics["received_bytes"][::-1]
    assert metrics["bound_s"] == 0.5
    assert min(metrics["extra_bytes"]) > 0


def test_one_flipped_bit_is_an_error_that_names_rank_and_tensor(gloo_ranks, tmp_path):
    sample = outcome(gloo_ranks, tmp_path / "run", with_a_flipped_bit)
    assert sample["status"] == "error" and not sample["times_s"]
    assert "rank 1 has 1 wrong elements of norm.weight" in sample["reason"]


def test_weights_that_stayed_old_are_an_error(gloo_ranks, tmp_path):
    assert outcome(gloo_ranks, tmp_path / "run", with_nothing_moved)["status"] == "error"


def test_nothing_is_compared_if_not_asked(gloo_ranks, tmp_path):
    sample = outcome(gloo_ranks, tmp_path / "run", with_a_flipped_bit, check=False)
    assert sample["status"] == "ok" and "compared" not in sample["metrics"]


def test_memory_that_one_rank_lacks_is_a_row(gloo_ranks, tmp_path):
    sample = outcome(gloo_ranks, tmp_path / "run", lacking_memory)
    assert sample["status"] == "oom"
    assert sample["reason"].startswith("rank 1: out of memory")


def test_the_verb_measures_what_can_be_and_says_why_the_rest_cannot(monkeypatch):
    machine(2)
    monkeypatch.setenv("RUN_ID", "mine")
    monkeypatch.setenv("OUTPUT_DIR", "out")
    run_dir = meshwise.refit(
        "tp2-tp1", sizes=SMALL, mode="all", iterations=2, warmup=1, train={"tp": 2}
    )
    info, (together, apart), _ = store.load(run_dir)
    assert info.verb == "refit" and info.status == "complete"
    assert together.status == "ok" and together.reason == "auto chose gloo"
    assert together.metrics["bound_s"] > 0  # from the rate of cluster.toml
    assert (apart.status, apart.reason) == ("skipped", "needs 3 ranks, and here are 2")
    log = Path("out/logs/mine.log").read_text()
    assert "Mean refit time:" in log and "Not measured: skipped: needs 3 ranks" in log


def test_the_least_cap_is_enough_and_a_forecast_of_memory_holds():
    machine(2)
    for cap in ("512MiB", "2MiB"):
        (told,) = meshwise.refit("tp2-tp1", sizes=SMALL, cap=cap, dry_run=True)
        run_dir = meshwise.refit("tp2-tp1", sizes=SMALL, cap=cap, iterations=1, warmup=0)
        _, (sample,), _ = store.load(run_dir)
        assert sample.status == "ok"
        assert max(sample.metrics["extra_bytes"]) <= told.staging_bytes
    with pytest.raises(ValueError, match=r"cap = 1\.0 MiB: must be at least 2MiB for tp2-tp1"):
        meshwise.refit("tp2-tp1", sizes=SMALL, cap="1MiB")


def test_the_command_prints_lines_and_a_table_or_json_alone(capsys):
    machine(2)
    command = f"refit --scenario 3 {FLAGS} --num-benchmark-iterations 2 --step-time 2s --place"
    with pytest.raises(SystemExit) as ended:
        app.main(command.split())
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "Iteration 2/2:" in out and "\nMean: " in out and "of a step" in out
    with pytest.raises(SystemExit) as ended:
        app.main([*command.split(), "--json"])
    assert ended.value.code == 0
    document = json.loads(capsys.readouterr().out)
    assert document["recommended"] == document["results"][0]["id"]


def test_a_method_that_needs_gpus_is_skipped_on_cpus(capsys):
    machine(2)
    with pytest.raises(SystemExit) as ended:
        app.main(f"refit --scenario tp2-tp1 {FLAGS} --refit-method nvshmem".split())
    assert ended.value.code == 4  # nothing was measured
    assert "nvshmem needs GPUs" in capsys.readouterr().out


def test_a_run_id_with_a_folder_is_refused(monkeypatch):
    machine(2)
    monkeypatch.setenv("RUN_ID", "../elsewhere")
    with pytest.raises(ValueError, match="must be a file's name, without a folder"):
        meshwise.refit("tp2-tp1", sizes=SMALL)


@pytest.mark.parametrize("placement", [(), (1, 0)])
def test_padded_buffers_of_renumbered_ranks_are_whole(placement):
    from meshwise.reshard.transfer import renumbered

    scenario = cases.changed(cases.custom(), sizes=SMALL, train={"tp": 2})
    held = holdings(scenario.model, cases.layouts(scenario, "collocated", 2)[1])
    held = renumbered(held, placement) if placement else held
    shapes = [buffers(held, rank)["model.embed_tokens.weight"][0] for rank in (0, 1)]
    assert shapes == [(128, 64), (128, 64)]  # 250 rows padded to 256


def test_ranks_that_stop_end_their_case_and_not_the_others(monkeypatch):
    machine(2)
    genuine, asked = launch.run, []

    def run(target, request, **options):
        asked.append(request.case.op.scenario)
        if len(asked) == 1:
            raise launch.RanksFailed("rank 1 had stopped during case refit; others were ended", 1)
        genuine(target, request, **options)

    monkeypatch.setattr(launch, "run", run)
    run_dir = meshwise.refit("tp2-tp1", "tp1-tp2", sizes=SMALL, iterations=1, warmup=0)
    _, (first, second), _ = store.load(run_dir)
    assert (first.status, second.status) == ("hung", "ok")
    assert "rank 1 had stopped" in first.reason
