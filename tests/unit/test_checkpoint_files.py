"""Data files of a checkpoint are read as they were saved or not at all, and one run at a time
replaces a checkpoint. The safetensors library writes the files; damage is done to their bytes."""

import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import meshwise
from meshwise import files
from meshwise.cli.app import main
from meshwise.engine import blocks, folder
from meshwise.engine.blocks import BLOCK, DataFile
from meshwise.pages import show
from meshwise.spec import Model, Workload
from meshwise.spec.checkpoint import Checkpoint, Stored, Whole

FEW = settings(max_examples=60, deadline=None)
RANDOM = np.random.default_rng(0)
TENSORS = {  # more than two blocks, whose edges lie within rows
    "a": RANDOM.standard_normal((700, 1001), np.float32),
    "b": RANDOM.standard_normal((3, 500, 601), np.float32),
    "c": RANDOM.standard_normal(200_003).astype(np.float16),
    "d": RANDOM.integers(0, 9, (5, 0)),
    "e": RANDOM.standard_normal((700, 301)),
}


def write(path, tensors, low=None):
    begins = {name: [0] * tensor.ndim for name, tensor in tensors.items()} | (low or {})
    offsets = {name: {"saved_offsets": begin} for name, begin in begins.items()}
    save_file(tensors, path, {"format": "pt", blocks.OFFSETS: json.dumps(offsets)})
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write(tmp_path_factory.mktemp("file") / "a.safetensors", TENSORS)


def content_of(file, name):
    """A tensor, put together from the pieces of its part."""
    part = file.parts[name]
    found = np.zeros(part.shape, TENSORS[name].dtype)
    for box, first, last in part.pieces():
        values = file.read(first, last).view(found.dtype).reshape(box.shape)
        found[tuple(map(slice, box.low, box.high))] = values
    return found


def test_all_is_read_in_pieces_of_one_block_each(file):
    opened = DataFile(file, blocks.stored(file))
    assert opened.parts.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert np.array_equal(content_of(opened, name), tensor), name
        for box, first, last in opened.parts[name].pieces():
            assert first // BLOCK == (last - 1) // BLOCK
            assert box.num_elements * tensor.itemsize == last - first
    stored = blocks.stored(file)
    assert stored.bytes == file.stat().st_size > 2 * BLOCK
    assert len(stored.hashes) == 16 * (1 + -(-stored.bytes // BLOCK))


@st.composite
def damaged(draw, content, header):
    """Bytes of the same length, somewhere else than they were saved."""
    wrong = bytearray(content)
    size = len(content)
    place = st.integers(header, size - 1)
    kind = draw(st.sampled_from(["bits", "sign", "page", "swap", "blocks", "roll", "reverse"]))
    if kind == "bits":
        for at in draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=9, unique=True)):
            wrong[at] ^= 1 << draw(st.integers(0, 7))
    elif kind == "sign":  # of numbers of eight, four or two bytes, of a stretch of any length
        width = draw(st.sampled_from([2, 4, 8]))
        first, last = sorted((draw(place), draw(place)))
        for at in range(first - (first - header) % width + width - 1, last + 1, width):
            wrong[at] ^= 0x80
    elif kind == "page":
        at = draw(place) // 4096 * 4096
        wrong[at : at + 4096] = bytes(len(wrong[at : at + 4096]))
    elif kind in ("swap", "blocks"):
        width = BLOCK if kind == "blocks" else draw(st.sampled_from([2, 4, 8, 64, 4096, 65536]))
        most = (size - header) // width - 1
        first, other = (header + draw(st.integers(0, most)) * width for _ in range(2))
        wrong[first : first + width], wrong[other : other + width] = (
            content[other : other + width],
            content[first : first + width],
        )
    else:
        at, width = draw(place), draw(st.sampled_from([8, 64, 4096]))
        part = wrong[at : at + width]
        wrong[at : at + width] = part[1:] + part[:1] if kind == "roll" else part[::-1]
    return bytes(wrong)


@pytest.fixture(scope="module")
def original(file):
    content = file.read_bytes()
    return content, 8 + int.from_bytes(content[:8], "little"), blocks.stored(file)


@settings(FEW, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_any_damage_is_seen_and_only_where_it_is(original, file, data):
    content, header, stored = original
    wrong = data.draw(damaged(content, header))
    places = np.flatnonzero(np.frombuffer(wrong, np.uint8) != np.frombuffer(content, np.uint8))
    path = file.with_name("wrong.safetensors")
    path.write_bytes(wrong)
    if len(places) and places[0] < header:
        with pytest.raises(ValueError, match=r"its header.* not as saved|damaged header"):
            DataFile(path, stored)
        return
    opened = DataFile(path, stored)
    bad = {int(place - header) // BLOCK for place in places}
    assert [(one.offset - header) // BLOCK for one in opened.damage()] == sorted(bad)
    for name, part in opened.parts.items():
        for _, first, last in part.pieces():
            if first // BLOCK in bad:
                with pytest.raises(ValueError, match=r"bytes \d+ to \d+ \(.*are not as saved"):
                    opened.read(first, last)
            else:
                right = content[header + first : header + last]
                assert opened.read(first, last).tobytes() == right, name
    for one in opened.damage():
        first, last = one.offset - header, one.offset - header + one.bytes
        held = {n for n, p in opened.parts.items() if max(p.first, first) < min(p.last, last)}
        assert {*one.tensors} == held


def test_other_lengths_are_refused(original, file):
    content, _, stored = original
    path = file.with_name("other.safetensors")
    for wrong in (content[:-1], content[:-BLOCK], content + b"\0", content + content, content[:5]):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match=r"bytes of|cut off"):
            DataFile(path, stored)


@FEW
@given(data=st.data())
def test_a_file_without_hashes_is_read_or_refused_by_its_header(tmp_path_factory, data):
    """As version 1 wrote them, with whatever in it."""
    path = tmp_path_factory.mktemp("old") / "old.safetensors"
    write(path, {"a": np.ones((3, 4), np.float32), "b": np.zeros(5, np.int8)}, {"a": [3, 0]})
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.sampled_from([*b'0129-[]{}",:a', 0, 255]))
    path.write_bytes(content)
    try:
        opened = DataFile(path, Stored(bytes=len(content), hashes=""))
    except ValueError as error:
        assert str(error).startswith(str(path))
        return
    for part in opened.parts.values():
        for _, first, last in part.pieces():
            assert len(opened.read(first, last)) == last - first


def record(files, **changes):
    fields = {
        "step": 8, "seed": 3, "layout": "dp2", "optimizer": "AdamW", "data": "step-8-bd407210",
        "model": Model(hidden=12, layers=4, heads=4, ffn=24, vocab=13, max_seq_len=10),
        "workload": Workload(global_batch_size=2, seq_len=32), "files": files, "numbers": {"n": 1},
        "tensors": {n: Whole(shape=t.shape, dtype=str(t.dtype)) for n, t in TENSORS.items()},
    }  # fmt: skip
    return Checkpoint(**fields | changes)


def code(words):
    with pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code


@pytest.fixture
def kept(tmp_path, file):
    """A checkpoint of two files that hold the same."""
    data = tmp_path / "step-8-bd407210"
    data.mkdir()
    names = ("00000-000.safetensors", "00001-000.safetensors")
    for name in names:
        (data / name).write_bytes(file.read_bytes())
    held = folder.HeldFolder(tmp_path)
    held.replace(record(dict.fromkeys(names, blocks.stored(file))))
    held.close()
    return tmp_path


def test_show_verifies_a_folder(kept, capsys):
    assert code(["show", str(kept)]) == 0
    assert "all 16.2 MiB as saved" in capsys.readouterr().out
    second = kept / "step-8-bd407210" / "00001-000.safetensors"
    content = bytearray(second.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    content[header + BLOCK + 5] ^= 4
    second.write_bytes(content)
    assert code(["show", str(kept)]) == 4
    told = capsys.readouterr().out
    assert second.name in told and f"{header + BLOCK} to {header + 2 * BLOCK}" in told
    assert code(["show", str(kept), "--json"]) == 4
    (one,) = json.loads(capsys.readouterr().out)["damage"]
    assert (one["file"], one["offset"], one["bytes"]) == (second.name, header + BLOCK, BLOCK)
    assert set(one["tensors"]) < TENSORS.keys()
    second.unlink()
    assert code(["show", str(kept)]) == 4
    assert "does not exist" in capsys.readouterr().out
    assert code(["show", str(kept / "checkpoint.json")]) == 0
    assert "data not compared" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "after"),
    [('"step": 8', '"step": 9'), ('"seed": 3', '"seed": 2'), ("bd407210", "bd407211"),
     ('"n": 1', '"n": 2'), ("700", "701"), ("float32", "float64"), ('"heads": 4', '"heads": 2')],
)  # fmt: skip
def test_an_edited_json_is_refused(kept, capsys, before, after):
    path = kept / "checkpoint.json"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))
    with pytest.raises(ValueError, match=r"checkpoint\.json is not as saved: its content has"):
        folder.read(path)
    assert code(["show", str(kept)]) == 2 and "not as saved" in capsys.readouterr().err


def test_every_byte_of_the_json_counts(kept):
    """Each digit, letter and sign changed in turn: refused, whatever it says then."""
    path = kept / "checkpoint.json"
    right, content = folder.read(path), path.read_bytes()
    for at in range(0, len(content), 3):
        wrong = bytearray(content)
        wrong[at] ^= 1
        path.write_bytes(wrong)
        try:
            assert folder.read(path) == right  # a space that became another
        except ValueError as error:
            assert str(path) in str(error)


def test_version_1_is_read_with_a_note(kept, capsys):
    path = kept / "checkpoint.json"
    old = json.loads(path.read_text())
    del old["digest"]
    sizes = {name: stored["bytes"] for name, stored in old["files"].items()}
    path.write_text(json.dumps(old | {"schema_version": 1, "files": sizes}))
    assert "without hashes" in folder.read(path).note
    assert code(["show", str(kept)]) == 0
    assert "without hashes" in capsys.readouterr().out
    path.write_text(json.dumps(old | {"schema_version": 1}))  # what version 1 never wrote
    with pytest.raises(ValueError, match="files"):
        folder.read(path)


HOLDS = "import sys; from pathlib import Path; from meshwise.engine import folder\n\
held = folder.HeldFolder(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"


def test_the_lock_cannot_be_held_by_other_users(tmp_path):
    before = os.umask(0)
    try:
        folder.HeldFolder(tmp_path).close()
    finally:
        os.umask(before)
    assert (tmp_path / ".lock").stat().st_mode & 0o007 == 0


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path):
    order = [sys.executable, "-c", HOLDS, str(tmp_path)]
    here = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    first = subprocess.Popen(order, env=here, **pipes)
    assert first.stdout.readline() == b"held\n"
    with pytest.raises(ValueError, match=rf"another run \(process {first.pid} on .* saves into"):
        folder.HeldFolder(tmp_path)
    first.send_signal(signal.SIGKILL)
    first.wait()
    folder.HeldFolder(tmp_path).close()


ROUNDS = 60


def race(place, name, pipe):
    """Hold the folder and replace the checkpoint, in every round at the other's very moment."""
    fcntl.flock = lambda *_: None  # a file system that grants a lock to everyone
    for number in range(ROUNDS):
        pipe.recv()
        held = folder.HeldFolder(place)
        data = f"step-{number}-{name * 8}"
        path = place / data / "x.safetensors"
        path.parent.mkdir()
        write(path, {"x": np.full(9, number, np.float32)})
        one = record({path.name: blocks.stored(path)}, step=number, data=data)
        pipe.send("ready")
        pipe.recv()
        try:
            held.replace(one)
            pipe.send("")
        except ValueError as error:
            pipe.send(str(error))
        held.close()


def test_of_two_commits_at_once_one_is_refused_and_the_other_whole_though_locks_lie(tmp_path):
    context, pipes, runs = multiprocessing.get_context("fork"), [], []
    for name in "ab":
        ours, theirs = context.Pipe()
        runs.append(context.Process(target=race, args=(tmp_path, name, theirs)))
        runs[-1].start()
        pipes.append(ours)
    reasons = set()
    for number in range(ROUNDS):
        for moment in ("begin", "commit"):
            for pipe in pipes:
                pipe.send(moment)
            told = [pipe.recv() for pipe in pipes if pipe.poll(60)]
        assert len(told) == 2 and told.count("") == 1, told
        reasons.add("exists" in max(told))
        shown = meshwise.show(tmp_path)
        assert not shown.damage and shown.checkpoint.step == number
        assert shown.checkpoint.data.endswith("ab"[told.index("")] * 8)
        assert [path.name for path in tmp_path.glob("step-*")] == [shown.checkpoint.data]
    for run in runs:
        run.join()
        assert run.exitcode == 0


def test_a_run_does_not_replace_what_another_wrote(tmp_path, file, kept):
    first, stored = folder.HeldFolder(kept), blocks.stored(file)
    other = record({}, step=9, data="step-9-aaaaaaaa").sealed()
    (kept / "checkpoint.json").write_bytes(msgspec.json.encode(other))
    mine = kept / "step-10-bbbbbbbb"
    mine.mkdir()
    write(mine / "x.safetensors", TENSORS)
    with pytest.raises(ValueError, match="is not the one that this run wrote or found"):
        first.replace(record({"x.safetensors": stored}, step=10, data=mine.name))
    assert folder.read(kept / "checkpoint.json") == other and not mine.exists()
    first.close()


def test_a_file_that_another_host_wrote_may_be_seen_late(kept, file, monkeypatch):
    held, stored = folder.HeldFolder(kept), blocks.stored(file)
    data = kept / "step-9-dddddddd"
    data.mkdir()
    copy = shutil.copy(file, data / "copy")
    writing = threading.Timer(0.5, shutil.move, (copy, data / "00007-000.safetensors"))
    writing.start()
    held.replace(record({"00007-000.safetensors": stored}, step=9, data=data.name))
    assert folder.read(kept / "checkpoint.json").step == 9
    writing.join()
    monkeypatch.setattr(files, "LATE_S", 0.2)
    with pytest.raises(ValueError, match=r"/x is missing; use a folder that all hosts see"):
        held.replace(record({"x": stored}, step=10, data=data.name))
    assert folder.read(kept / "checkpoint.json").step == 9  # the old one stays
    held.close()


def test_what_a_killed_commit_left_is_no_obstacle(kept):
    (kept / ".committing").touch()
    held = folder.HeldFolder(kept)
    data = kept / "step-9-cccccccc"
    data.mkdir()
    held.replace(record({}, step=9, data=data.name))
    assert folder.read(kept / "checkpoint.json").step == 9
    assert [path.name for path in kept.glob("step-*")] == [data.name]
    held.close()


def test_tables_of_much_damage_stay_short():
    from meshwise.spec.checkpoint import Damage, Verified

    many = tuple(Damage(file="x", reason="not as saved", offset=i, bytes=9) for i in range(50))
    found = Verified(checkpoint=record({}), verified_bytes=9, damage=many)
    _, table = show.of(found)
    assert len(table.rows) == 20 and any("30 more" in line for line in table.legend)
