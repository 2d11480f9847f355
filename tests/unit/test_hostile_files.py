"""Every file that a verb takes against every class of hostile file: exit code 2, one line that
names the file, no waiting, no more memory than the caps allow."""

import gzip
import json
import os
import resource
import signal
from pathlib import Path

import pytest

from meshwise import store
from meshwise.cli import app
from tests import sample_records as known

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100,
    "max_position_embeddings": 64,
}  # fmt: skip
RUN = "runs/20260101T000000-measure-profile-four"
RAN = "runs/20260101T000100-run-gpt-small"

# the file, and the words that read it
TAKERS = [
    ("cluster.toml", ["show", "cluster.toml"]),
    ("cluster.toml", ["measure", "profile", "--dry-run"]),
    ("cluster.toml", ["refit", "tp2-tp1", "--dry-run", "--cluster", "cluster.toml"]),
    ("costs.json", ["show", "costs.json"]),
    ("costs.json", ["plan", "gpt-30m", "--out", "new.json"]),
    ("costs.json", ["report"]),
    ("plan.json", ["show", "plan.json"]),
    ("plan.json", ["run", "plan.json"]),
    ("plan.json", ["measure", "fsdp", "--plan", "plan.json", "--dry-run"]),
    ("layout.json", ["plan", "gpt-30m", "--layout", "layout.json", "--out", "new.json"]),
    ("layout.json", ["run", "--model", "gpt-30m", "--layout", "layout.json"]),
    ("recipe.json", ["run", "--model", "gpt-30m", "--recipe", "recipe.json"]),
    ("config.json", ["measure", "gemm", "--model", "config.json", "--dry-run"]),
    ("model.json", ["run", "--model", "model.json"]),
    ("models.json", ["measure", "gemm", "--model-config-path", "models.json", "--dry-run"]),
    ("shapes.json", ["measure", "attention", "--shapes-config-path", "shapes.json", "--dry-run"]),
    ("splits.json", ["measure", "collectives", "--splits", "splits.json", "--dry-run"]),
    (f"{RUN}/run.json", ["show", RUN]),
    (f"{RUN}/run.json", ["report"]),
    (f"{RUN}/run.json", ["compare", RUN, RAN]),
    (f"{RAN}/phases.json", ["show", f"{RAN}/phases.json"]),
    (f"{RAN}/nccl_check.json", ["show", f"{RAN}/nccl_check.json"]),
    ("folder/checkpoint.json", ["show", "folder"]),
    ("ring/latest.json", ["report", "--scaling", "ring"]),
    ("result.txt", ["measure", "import", "result.txt"]),
]
DEEP = "[" * 10**5
BAD = {
    "empty": "",
    "binary": bytes(range(256)),
    "deep": DEEP,
    "deep object": '{"a":' * 10**5,
    "number of 5000 digits": '{"a": 1' + "0" * 5000 + "}",
    "10^320": '{"schema_version": 1' + "0" * 320 + "}",
    "infinite": '{"schema_version": 1e999}',
    "NaN": '{"name": NaN}',
    "a key twice": '{"name": "a",\n"name": "b"}',
    "half a character": '{"name": "\\ud800"}',
    "large": b" " * (2**26),
    "a list": "[]",
    "a number": "1",
    "text": "Hello",
    "long key": ".".join("a" * 10**5) + " = 1",
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Good files of every kind; 10 s of processor time."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    plan = known.plan()
    for name, record in (
        ("cluster.toml", known.CLUSTER), ("costs.json", known.COSTS), ("plan.json", plan),
        ("layout.json", known.LAYOUT), ("model.json", known.MOE),
    ):  # fmt: skip
        store.write(name, record)
    known.write_run(Path("runs"), known.info(), known.SAMPLES)
    ran = known.info("run", plan, Path(RAN).name)
    known.write_run(Path("runs"), ran, [known.step_sample(plan, [0.01] * 5, peak_bytes=4e9)])
    Path("config.json").write_text(json.dumps(CONFIG))

    def too_long(*_: object) -> None:
        raise TimeoutError("10 s of processor time")

    before = signal.signal(signal.SIGPROF, too_long)
    signal.setitimer(signal.ITIMER_PROF, 10)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


def call(words: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        app.main(words)
    return ended.value.code


def refused(words, capsys) -> str:
    """The error of a verb that must refuse: one line of 300 characters at most."""
    assert call(words) == 2, words
    told = capsys.readouterr().err
    (line,) = [line for line in told.splitlines() if line.startswith("error: ")]
    assert told.endswith(f"{line}\n") and len(line) <= 300, words
    return line


@pytest.mark.parametrize("kind", BAD)
def test_what_holds_no_record(kind, capsys):
    content = BAD[kind] if isinstance(BAD[kind], bytes) else BAD[kind].encode()
    for file, words in TAKERS:
        path = Path(file)
        path.parent.mkdir(exist_ok=True)
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(content)
        line = refused(words, capsys)
        assert path.name in line or path.parent.name in line, (words, line)
        path.unlink()
        if before is not None:
            path.write_bytes(before)


@pytest.mark.parametrize("kind", ["FIFO", "device", "folder", "loop"])
def test_what_is_no_file(kind, capsys):
    for file, words in TAKERS:
        path = Path(file)
        if kind == "loop" and file == "cluster.toml":
            continue  # as good as none: this machine is looked at, with torch
        path.parent.mkdir(exist_ok=True)
        before = path.read_bytes() if path.exists() else None
        path.unlink(missing_ok=True)
        if kind == "FIFO":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "loop":
            path.symlink_to(path.name)
        else:
            path.mkdir()
        assert call(words) == 2 or kind in ("folder", "loop"), words
        told = capsys.readouterr().err
        assert "Traceback" not in told and all(len(line) <= 300 for line in told.splitlines())
        path.rmdir() if kind == "folder" else path.unlink()
        if before is not None:
            path.write_bytes(before)


def test_a_gzip_bomb_of_samples_costs_neither_memory_nor_time(capsys):
    """4 MiB that unpack to 4 GiB; and what unpacks to lines without end."""
    packed = Path(RUN) / "samples.jsonl.gz"
    packed.write_bytes(gzip.compress(bytes(2**26)) * 64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "samples.jsonl.gz unpacks to more than 128 MiB" in refused(["show", RUN], capsys)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 2**29
    for line in (b"\n", b"x\n", b"{}\n"):
        packed.write_bytes(gzip.compress(line * 2**24))
        assert "more than 1000 lines are damaged" in refused(["show", RUN], capsys)
    for damaged in (b"\x1f\x8b", gzip.compress(b"x" * 99)[:-4], b"text"):
        packed.write_bytes(damaged)
        assert "samples.jsonl.gz is damaged gzip" in refused(["show", RUN], capsys)


def test_samples_beside_damaged_ones_are_kept(capsys):
    path = Path(RUN) / "samples.jsonl"
    good = path.read_text()
    bad = ["", "{", DEEP, '{"metrics": {"a": 1e999}}', "1" + "0" * 320, "\x1b[2J"]
    path.write_text("\n".join(bad) + "\n" + good)
    assert len(store.load(RUN)[1]) == len(known.SAMPLES)
    assert call(["show", RUN]) == 0
    told = capsys.readouterr().err
    assert told.count("is truncated or damaged and was skipped") == len(bad)
    assert "\x1b" not in told


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("metrics", {"a": 1e999}),
        ("times_s", [1e999]),
        ("rank_times_s", [[-1e999]]),
    ],
)
def test_samples_of_infinite_numbers_are_skipped(field, value):
    path = Path(RUN) / "samples.jsonl"
    first, *rest = path.read_text().splitlines()
    damaged = json.dumps(json.loads(first) | {field: value}).replace("Infinity", "1e999")
    path.write_text("\n".join([damaged, *rest]) + "\n")
    _, samples, warnings = store.load(RUN)
    assert len(samples) == len(known.SAMPLES) - 1
    assert f"{field}" in warnings[0] and "is not a finite number" in warnings[0]


@pytest.mark.parametrize(
    "provenance",
    [
        {"gpus": [1]},
        {"gpus": {"a": 1}},
        {"settings": []},
        {"imported": {}},
        {"imported": 1},
        {"ring": {}},
        {"ring": {"dtype": []}},
        {"cases": 1},
    ],
)
def test_a_provenance_of_another_shape_is_refused_by_field(provenance, capsys):
    path = Path(RUN) / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"provenance": provenance}))
    assert f"provenance.{next(iter(provenance))}" in refused(["show", RUN], capsys)


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.npy", "tokens.uint32.bin"])
@pytest.mark.parametrize("kind", ["FIFO", "device", "folder", "damaged", "empty"])
def test_token_files(name, kind):
    from meshwise.engine import data

    path = Path(name)
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"\x93NUMPY\x01\x00\xff" if kind == "damaged" else b"")
    with pytest.raises(ValueError, match=path.stem):
        data.open_tokens(name, 8)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<i8', 'fortran_order': False, 'shape': (4611686018427387904,)}",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (-4,)}",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (10**20,)}",
        "{'descr': '|O', 'fortran_order': False, 'shape': (4,)}",
        "{'descr': [('a', '<i8')], 'fortran_order': False, 'shape': (4,)}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (4,)}",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (2, 2)}",
        "{'descr': '<i8', 'fortran_order': False, 'shape': ()}",
        "(" * 9000,
        "-" * 9000 + "1",
        "[" * 200 + "]" * 200,
        "__import__('os').system('touch broken')",
    ],
)
def test_npy_headers(header):
    from meshwise.engine import data

    text = header.encode() + b"\n"
    head = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little")
    Path("a.npy").write_bytes(head + text + bytes(64))
    with pytest.raises(ValueError, match=r"a\.npy"):
        data.open_tokens("a.npy", 1)
    assert not Path("broken").exists()
