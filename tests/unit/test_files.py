"""Files: hostile ones are refused in one line that names them; ours are whole, whatever fails."""

import errno
import gzip
import os
import socket
import stat
import threading
import time
from pathlib import Path

import pytest

from meshwise import files


@pytest.fixture
def tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    return tmp_path


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path):
    os.mkfifo("fifo")
    server = socket.socket(socket.AF_UNIX)
    server.bind("socket")
    for path, reason in (
        ("fifo", "fifo is a FIFO"),
        (tmp_path, "is a folder"),
        ("/dev/zero", "/dev/zero is a device"),
        ("socket", "socket cannot be read"),
        ("nowhere", "nowhere does not exist"),
        ("a" * 300, "cannot be read: File name too long"),
    ):
        with pytest.raises(ValueError, match=reason):
            files.read_bytes(path)
    server.close()


def test_a_file_that_appears_late_is_waited_for_and_one_that_does_not_only_for_a_while(tmp_path):
    path = tmp_path / "late"
    assert not files.appeared(path, 0.0)
    writing = threading.Timer(0.5, path.touch)
    writing.start()
    assert files.appeared(path)
    begun = time.monotonic()
    assert not files.appeared(tmp_path / "never", 0.3)
    assert time.monotonic() - begun >= 0.3
    writing.join()


def test_a_link_to_a_file_is_read(tmp_path):
    Path("file").write_text("é")
    Path("link").symlink_to("file")
    assert files.read_text("link") == "é"
    Path("file").write_bytes(b"one\n\xff")
    with pytest.raises(ValueError, match=r"link is not a text file \(line 2 is not UTF-8\)"):
        files.read_text("link")


def test_size_is_bounded(tmp_path):
    Path("file").write_bytes(b"12345678")
    assert files.read_bytes("file", at_most=8) == b"12345678"
    with pytest.raises(ValueError, match="file is larger than"):
        files.read_bytes("file", at_most=7)


def test_gzip_is_bounded_and_checked():
    packed = gzip.compress(bytes(2**26))
    with pytest.raises(ValueError, match=r"a\.gz unpacks to more than 1 MiB"):
        files.unpack(packed, "a.gz", at_most=2**20)
    two = gzip.compress(b"one ") + gzip.compress(b"two")
    assert files.unpack(two, "a.gz", at_most=7) == b"one two"
    assert files.unpack(b"", "a.gz") == b""
    flipped = bytearray(two)
    flipped[len(two) // 4] ^= 1
    for damaged in (two[:-3], b"text", bytes(flipped)):
        with pytest.raises(ValueError, match=r"a\.gz is damaged gzip"):
            files.unpack(damaged, "a.gz")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": [1, {"b": 1,\n"b": 2}]}', "x: line 2: a[1].b: stands twice"),
        ('{"a":\n [0, NaN]}', "x: line 2: a[1]: NaN is not a finite number"),
        ('[{}, {"a": {"b": 1e999}}]', "x: line 1: [1].a.b: 1e999 is not a finite number"),
        ('{"a": -Infinity}', "x: line 1: a: -Infinity is not a finite number"),
        ('{"a": 9223372036854775808}', "x: line 1: a: 9223372036854775808 is not below 2^63"),
        ('{"a": "[}", "b": -1e400}', "x: line 1: b: -1e400 is not a finite number"),
        ('{"a": 1' + "0" * 10**6 + "}", "x: line 1: a: 10000000000000000000000"),
        ('{"a": "\\ud800"}', "x: line 1: a: holds half a character (a lone surrogate)"),
        ("[" * 65 + "]" * 65, "is deeper than 64 levels"),
        ('{"a":' * 10**5, "is deeper than 64 levels"),
        ('{"a": 1,\n}', "x is not JSON: Expecting property name enclosed in double quotes: line 2"),
        ("", "x is not JSON: Expecting value: line 1"),
        (b"\xff", "x is not a text file (line 1 is not UTF-8)"),
        (" " * (2**24 + 1), "x is larger than 16 MiB"),
    ],
)
def test_json_that_is_refused(text, message):
    with pytest.raises(ValueError) as error:
        files.parse_json(text, "x")
    assert message in str(error.value)
    assert len(str(error.value)) <= 300


def test_a_long_document_is_text_not_many_values(monkeypatch):
    monkeypatch.setattr(files, "MOST_BYTES", 1000)
    monkeypatch.setattr(files, "MOST_VALUES", 100)
    assert len(files.parse_json(f'["{"x" * 5000}"]', "it", at_most=10_000)[0]) == 5000
    with pytest.raises(ValueError, match="it holds more than 100 values; is it the right file"):
        files.parse_json(f"[{'[],' * 1000}1]", "it", at_most=10_000)
    assert len(files.parse_json(f"[{'[],' * 300}1]", "it")) == 301


def test_a_file_that_runs_as_its_owner_is_replaced_by_one_that_does_not(tmp_path):
    path = tmp_path / "plan.json"
    path.touch()
    path.chmod(0o6755)
    files.write_whole(path, "{}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o755


def test_json_that_is_read():
    assert files.parse_json('{"a": [1, -2.5e3, "\\ud83d\\ude00", null]}', "x") == {
        "a": [1, -2500.0, "😀", None]
    }
    assert files.parse_json(b"9223372036854775807", "x") == 2**63 - 1
    deep = files.parse_json("[" * 64 + "]" * 64, "x")
    for _ in range(63):
        (deep,) = deep
    assert deep == []


def test_the_place_in_a_long_document_is_left_out():
    with pytest.raises(ValueError, match="x: NaN is not a finite number"):
        files.parse_json("[" + "1," * 2**21 + "NaN]", "x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = inf", "x: a: is not a finite number"),
        ("[[b]]\nc = 1e999", "x: b[0].c: is not a finite number"),
        ("a = 0x" + "f" * 16, "x: a: is not below 2^63"),
        ("a = " + "9" * 5000, "x: an integer is not below 2^63"),
        ("a = " + "[" * 10**5, "x: has more than 64 levels"),
        ("a = " + "[" * 65 + "]" * 65, "x: has more than 64 levels"),
        ("\n" + ".".join("a" * 10**5) + " = 1", "x: line 2: a key has more than 64 parts"),
        ("[" + " . ".join(['"a b"', "'c'"] * 10**4) + "]", "x: line 1: a key has more than 64"),
        ("a = 1\na = 2\n", "x is not TOML: Cannot overwrite a value (at line 2"),
        (b"\xff", "x is not a text file"),
        ("#" * 2**18 + "#", "x is larger than 0.25 MiB"),
    ],
)
def test_toml_that_is_refused(text, message):
    with pytest.raises(ValueError) as error:
        files.parse_toml(text, "x")
    assert message in str(error.value)


def test_toml_that_is_read():
    assert files.parse_toml(b"[a.b]\nc = [1, 2.5]\n", "x") == {"a": {"b": {"c": [1, 2.5]}}}


def left(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_with_its_permissions(tmp_path):
    path = files.write_whole(tmp_path / "new" / "file", "één")
    assert path.read_text() == "één"
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    path.chmod(0o640)
    files.write_whole(path, b"two")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"two", 0o640)
    assert left(path.parent) == ["file"]


def test_a_file_is_written_by_its_name(tmp_path):
    with files.replacing("file") as file:
        Path(file.name).write_text("by name")
    assert (Path("file").read_text(), left(tmp_path)) == ("by name", ["file"])


def test_names_may_be_as_long_as_the_system_allows(tmp_path):
    assert files.write_whole("n" * 255, "1").read_text() == "1"
    with pytest.raises(ValueError, match="cannot be written: File name too long"):
        files.write_whole("n" * 256, "1")


def test_links_and_what_is_no_file_are_not_written(tmp_path):
    Path("mine").write_text("mine")
    Path("link").symlink_to("mine")
    Path("dangling").symlink_to("nothing")
    os.mkfifo("fifo")
    for write in (files.write_whole, files.append_line):
        for name, reason in (
            ("link", "link is a symbolic link; name the file that it means"),
            ("dangling", "dangling is a symbolic link"),
            ("fifo", "fifo is a FIFO"),
            (".", r"\. is a folder"),
            ("/dev/null", "/dev/null is a device"),
        ):
            with pytest.raises(ValueError, match=reason):
                write(name, "x")
    with pytest.raises(ValueError, match="file cannot be written: Not a directory"):
        files.write_whole("mine/file", "x")
    assert Path("mine").read_text() == "mine"
    assert left(tmp_path) == ["dangling", "fifo", "link", "mine"]


def test_the_old_file_stays_when_the_body_fails(tmp_path):
    files.write_whole("file", "old")
    for error in (KeyError("a"), KeyboardInterrupt(), FileNotFoundError(2, "gone", "other")):
        with pytest.raises(type(error)), files.replacing("file") as file:
            file.write(b"new")
            raise error
    assert (Path("file").read_text(), left(tmp_path)) == ("old", ["file"])


def fail_at(monkeypatch, number, code):
    """The ``number``-th of what the system does to files fails; the calls made so far."""
    made = []

    def failing(name, do):
        def call(*arguments, **options):
            made.append(name)
            if len(made) == number:
                raise OSError(code, os.strerror(code))
            return do(*arguments, **options)

        return call

    for name in ("open", "write", "fsync", "replace", "fchmod", "pread"):
        monkeypatch.setattr(os, name, failing(name, getattr(os, name)))
    return made


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EIO])
def test_whatever_fails_leaves_a_whole_file_and_names_it(tmp_path, monkeypatch, code):
    number, done = 0, False
    while not done:
        number += 1
        files.write_whole("file", "old")
        with monkeypatch.context() as patch:
            made = fail_at(patch, number, code)
            try:
                files.write_whole("file", "new" * 10**5)
                done = True
            except ValueError as error:
                assert str(error) == f"file cannot be written: {os.strerror(code)}"
        # only the sync of the folder comes after the new file's taking the old one's place
        is_new = done or made == ["open", "open", "fchmod", "fsync", "replace", "fsync"]
        assert Path("file").read_text() == ("new" * 10**5 if is_new else "old")
        assert left(tmp_path) == ["file"]
    assert number == 7


def test_a_disk_that_fills_while_a_file_is_written(tmp_path, monkeypatch):
    """With a real limit: what the process may write to a file."""
    import resource
    import signal

    files.write_whole("file", "old")
    files.append_line("lines", "one")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for most in (0, 1, 4096, 2**20 - 1):
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
            with pytest.raises(ValueError, match="file cannot be written: File too large"):
                files.write_whole("file", bytes(2**20))
            with pytest.raises(ValueError, match="lines cannot be written: File too large"):
                files.append_line("lines", bytes(2**20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert (Path("file").read_text(), Path("lines").read_text()) == ("old", "one\n")
    assert left(tmp_path) == ["file", "lines"]


def test_lines_are_whole_whatever_fails(tmp_path, monkeypatch):
    number, done = 0, False
    while not done:
        number += 1
        Path("lines").write_text("one\n")
        with monkeypatch.context() as patch:
            fail_at(patch, number, errno.ENOSPC)
            try:
                files.append_line("lines", "two")
                done = True
            except ValueError as error:
                assert "lines cannot be written: No space left on device" in str(error)
        assert Path("lines").read_text() == ("one\ntwo\n" if done else "one\n")
    assert number == 5


def test_a_torn_line_is_closed_off(tmp_path):
    Path("lines").write_text("one\ntw")
    files.append_line("lines", "three")
    files.append_line("lines", b"four", sync=False)
    assert Path("lines").read_text() == "one\ntw\nthree\nfour\n"
