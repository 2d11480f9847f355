"""What is fuzzed: each kind of input with valid examples, and the commands that read it.

A case runs in a folder of its own that holds a finished session (``session``); the mutant takes the
place of the file ``place``. ``{at}`` in a command is that path. Commands that would start ranks end
where they would start them.
"""

import gzip
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from meshwise import store
from meshwise.spec import Layout, Recipe, StepLine
from tests import sample_records as known

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
RUN = "runs/20260101T000100-run-gpt-small"
GPT = "--model gpt-30m --nproc 2"


WARM = (  # what every fork would otherwise import and work out anew
    "show plan.json", "report", "measure gemm --dry-run", "run --list-suites", "refit --list",
    f"run {GPT} --data tokens.npy", "run --model moe-380m --nproc 2 --mode infer",
    f"run {GPT} --save new", f"show {RUN}", f"report {RUN}", f"compare {RUN} {RUN}",
    "plan gpt-30m --nproc 2 --json", "run --model llama-3-8b --nproc 2", "report --scaling x",
    "run --suite gpt.tmp --num-hosts 1 --num-devices-per-host 1 --dry-run --scale-to-fit",
    "run --mode decode --model moe-380m --new-tokens 4 --nproc 1", "measure import tokens.npy",
    "refit --dry-run --expert-model-parallel-size 2 --num-experts 4 --fsdp-size 2",
    "show pattern --segment-lengths 64 --dilation-rates 1 --seq-len 512 --ranks 4",
)  # fmt: skip


class Kind(NamedTuple):
    """``form`` as ``mutate.mutant`` names it; argv has no place, its examples are the commands."""

    form: str
    examples: tuple[bytes, ...]
    place: str = ""
    commands: tuple[str, ...] = ()
    seldom: tuple[str, ...] = ()  # commands that take long


def session(folder: Path) -> None:
    """A finished session of two CPU ranks, whose measurements follow a law, and a checkpoint."""
    import meshwise

    measured = known.synthetic_run(folder / "runs")
    store.write(folder / "cluster.toml", known.CPUS)
    meshwise.calibrate(measured, out=folder / "costs.json")
    plan = meshwise.plan("gpt-30m", costs=folder / "costs.json", out=folder / "plan.json")
    run = msgspec.structs.replace(known.info("run", plan, Path(RUN).name), cluster=known.CPUS)
    known.write_run(folder / "runs", run, [known.step_sample(plan, [0.01] * 5, peak_bytes=4e9)])
    (folder / "tokens.npy").write_bytes(_tokens())
    checkpoint = json.loads(_checkpoint())
    (folder / "saved" / checkpoint["data"]).mkdir(parents=True)
    (folder / "saved" / "checkpoint.json").write_bytes(_checkpoint())


@cache
def finished() -> dict[str, bytes]:
    """The files of a session by their path in it."""
    with tempfile.TemporaryDirectory() as name:
        session(Path(name))
        paths = [path for path in Path(name).rglob("*") if path.is_file()]
        return {str(path.relative_to(name)): path.read_bytes() for path in paths}


def _read(*names: str) -> tuple[bytes, ...]:
    return tuple((ROOT / name).read_bytes() for name in names)


def _each(name: str) -> tuple[bytes, ...]:
    """Every entry of a list as a list of its own."""
    return tuple(_json([entry]) for entry in json.loads((DATA / name).read_bytes()))


def _head(data: bytes, lines: int = 60) -> bytes:
    return b"\n".join(data.split(b"\n")[:lines])


def _json(record: object) -> bytes:
    return msgspec.json.encode(record)


def _tokens() -> bytes:
    import io

    import numpy as np

    held = io.BytesIO()
    np.save(held, np.arange(4096, dtype=np.uint16) % 100)
    return held.getvalue()


def _checkpoint() -> bytes:
    from meshwise.spec.checkpoint import Checkpoint, Stored, Whole

    return _json(
        Checkpoint(
            step=3, seed=0, layout="dp1", optimizer="adamw", model=known.MOE,
            workload=known.WORKLOAD, data="step-3-00", files={"0.safetensors": Stored(
                bytes=100, hashes="0" * 32
            )}, tensors={"embed.weight": Whole(shape=(4, 4), dtype="float32")}, numbers={"n": 1},
        ).sealed()
    )  # fmt: skip


def _arguments(*commands: str) -> Kind:
    return Kind(
        "argv", tuple(json.dumps(["meshwise", *line.split()]).encode() for line in commands)
    )


def _importing(*names: str, suffix: str = ".txt", form: str = "text") -> Kind:
    examples = tuple(map(_head, _read(*(f"tests/data/{name}" for name in names))))
    return Kind(
        form,
        examples,
        f"all_reduce{suffix}",
        (
            "measure import {at} --json --cluster h200-hgx",
            "measure import {at}",
        ),
    )


def _run_file(place: str, form: str, *examples: bytes) -> Kind:
    commands = (f"show {RUN}", f"compare {RUN} {RUN} --json", f"show {RUN} --json")
    return Kind(form, examples, f"{RUN}/{place}", commands, (f"report {RUN}",))


@cache
def kinds() -> dict[str, Kind]:
    """Every kind by its name."""
    benchmarks = "benchmarks/2026-11-21-operators-4xh200"
    ring = "benchmarks/2026-11-22-ring-2xh200/results/"
    ring += "ring_v2_collective_benchmark_20261122_022125_world2.json"
    steps = b"\n".join(_json(StepLine(step=i, loss=2.0, time_s=0.1)) for i in range(3)) + b"\n"
    files = finished()
    measured = next(name for name in files if name.endswith("samples.jsonl") and RUN not in name)
    other = str(Path(measured).parent)
    lines = (
        files[measured],
        *(_head(files[measured], most) for most in (20, 30)),
        b"\n".join(map(_json, known.SAMPLES)) + b"\n",
    )
    plans = files["plan.json"], _json(known.answered())
    configs = sorted((DATA / "hugging_face").glob("*.json"))
    return {
        "cluster.toml": Kind("toml", (files["cluster.toml"],), "cluster.toml", (
            "show {at}", "measure gemm --dry-run",
            f"run {GPT}", "measure collectives --dry-run --json",
        )),
        "cluster.json": Kind("json", (_json(known.CPUS), _json(known.CLUSTER)), "cluster.json", (
            "show {at}", "measure gemm --cluster {at} --dry-run",
        )),
        "costs.json": Kind("json", (files["costs.json"], _json(known.COSTS)), "costs.json", (
            "show {at}", "show {at} --json",
        ), ("plan --nproc 2", "plan gpt-30m --nproc 2 --json", "report")),
        "plan.json": Kind("json", plans, "plan.json", (
            "show {at}", "show {at} --json", "run {at}", "show {at} --node layers.0.up",
            "measure collectives --sizes-from {at} --dry-run",
        ), ("report",)),
        "layout": Kind("json", (
            b'{"dp": 2, "zero": 2, "microbatch_size": 4}', b'{"tp": 2, "microbatch_size": 8}',
            _json(Layout(pp=2, schedule="1f1b", microbatch_size=2, num_microbatches=4)),
        ), "layout.json", (
            "plan gpt-30m --nproc 2 --layout {at}", "run --model gpt-30m --layout {at}",
            "run --model moe-380m --layout {at} --mode infer",
        ), ("plan gpt-30m --nproc 2 --why-not {at}",)),
        "recipe": Kind("json", (_json(Recipe()), b'{"optimizer": "sgd"}'), "recipe.json", (
            f"run {GPT} --recipe {{at}}",
        )),
        "model record": Kind("json", tuple(map(_json, (
            known.LLAMA, known.MOE, known.IMAGES, known.MODEL
        ))), "model.json", (
            "run --model {at} --nproc 2", "measure gemm --model {at} --dry-run",
        )),
        "config.json": Kind("json", tuple(path.read_bytes() for path in configs), "config.json", (
            "measure gemm --model {at} --dry-run --json", "run --model {at} --nproc 2",
            "measure fsdp --model {at} --dry-run", "measure attention --model {at} --dry-run",
        )),
        "primus models": Kind("json", _each("primus/model_configs.json"), "m.json", (
            "measure gemm --model-config-path {at} --dry-run --json",
        ), ("measure gemm --model-config-path {at} --dry-run",)),
        "primus shapes": Kind("json", _each("primus/attention_shapes.json"), "s.json", (
            "measure attention --shapes-json-path {at} --dry-run --json",
        ), ("measure attention --shapes-json-path {at} --dry-run",)),
        "run.json": _run_file("run.json", "json", _json(known.info("run", known.plan()))),
        "samples.jsonl": Kind("jsonl", lines, measured, (
            f"show {other}", f"show {other} --json", f"compare {other} {other}",
            f"measure health --baseline {other} --dry-run",
        ), (f"calibrate {other}", "report")),
        "samples.jsonl.gz": Kind("packed", tuple(map(gzip.compress, lines)), f"{measured}.gz", (
            f"show {other}",
        ), (f"calibrate {other} --json",)),
        "steps.jsonl": _run_file("steps.jsonl", "jsonl", steps),
        "phases.json": Kind("json", (_phases(),), f"{RUN}/phases.json", (
            "show {at}", f"show {RUN}",
        ), (f"report {RUN}",)),
        "nccl_check.json": Kind("json", _read(
            f"{benchmarks}/runs/20261121T193901-run-gpt-2.6b-dp4-zero2-mb8x1/nccl_check.json"
        ), f"{RUN}/nccl_check.json", ("show {at}", f"show {RUN}")),
        "nccl-tests": _importing(
            "nccl_tests_h200x4/nccl_tests_all_reduce.txt", "nccl_tests_a100x8/nccl_allgather.log",
            "nccl_tests_h200x4/nccl_tests_sendrecv.txt",
        ),
        "param": _importing(
            "param_h200x4/comms_4xH200_blocking.txt", "param_h200x4/comms_4xH200_nonblocking.txt"
        ),
        "param csv": _importing(
            "param_h200x4/general_all_to_allv_v100x4_head.csv", suffix=".csv"
        ),
        "nccl trace": _importing("nccl_trace/llama3_70b.log", suffix=".log"),
        "tokens.npy": Kind("bytes", (_tokens(),), "tokens.npy", (
            f"run {GPT} --data {{at}}",
        )),
        "checkpoint.json": Kind("json", (_checkpoint(),), "saved/checkpoint.json", (
            "show saved", "show {at}", f"run {GPT} --resume-from saved",
            f"run {GPT} --save saved",
        )),
        "splits": Kind("json", (b"[[0, 4096], [8192, 0]]", b"[[1,2],[4,5]]"), "v.json", (
            "measure collectives --splits {at} --dry-run",
        )),
        "ring results": Kind("json", _read(ring), (
            "res/ring_v2_collective_benchmark_20261122_022125_world2.json"
        ), ("report --scaling res --json",)),
        "sizes": _arguments(
            "measure collectives --sizes 8..8G:x2 --dry-run",
            "measure collectives --sizes 64K,1M..4M:+1M --ranks 0,1 --dry-run",
            "measure collectives --tables 256,1-1,32 --dry-run",
            "measure gemm --square 64 --budget 1m --timeout 30s --dry-run",
        ),
        "plan's arguments": _arguments(
            "plan gpt-30m --gpus 2 --global-batch-size 16 --seq-len 128 --top 3 --json",
            "plan --num-hosts 1 --num-devices-per-host 2 --out p.json",
        ),
        "run's arguments": _arguments(
            "run --model gpt-30m --nproc 2 --steps 3 --warmup 1 --seed 7 --dtype fp32 --dry-run",
            "run --suite gpt.tmp --num-hosts 1 --num-devices-per-host 1 --dry-run --scale-to-fit",
            "run --mode decode --model moe-380m --new-tokens 4 --nproc 1", "run --list-suites",
            'run --model {"family":"wide_resnet","channels":64} --layout {"dp":2} --nproc 2',
        ),
        "refit's arguments": _arguments(
            "refit --dry-run --scenario 1", "refit --list",
            "refit --dry-run --tensor-model-parallel-size 2 --num-layers 2 --hidden-size 64",
            "refit --dry-run --expert-model-parallel-size 2 --num-experts 4 --fsdp-size 2",
        ),
        "patterns": _arguments(
            "show pattern --segment-lengths 128,256 --dilation-rates 1,2 --seq-len 1024 --heads 4",
            "measure ring 2 --seq-lengths 256 --dry-run --segment-lengths 128 --dilation-rates 1",
            "show pattern --segment-lengths 64 --dilation-rates 1 --seq-len 512 --ranks 4 --json",
        ),
        "other arguments": _arguments(
            f"compare {RUN} {RUN} --fail-if slower>5%", "detect --peak bf16=990e12 --nproc 2",
            f"calibrate {other} --out c.json", "report --out r.html", "show plan.json --json",
            "measure overlap --dry-run", "measure profile --budget 2m --dry-run",
        ),
    }  # fmt: skip


def _phases() -> bytes:
    path = "benchmarks/2026-11-22-engine-one-h200/runs/20261122T152910-run-gpt-350m-dp1-mb2x32"
    found = json.loads((ROOT / path / "phases.json").read_bytes())
    found["spans"] = found["spans"][:1]
    return json.dumps(found).encode()
