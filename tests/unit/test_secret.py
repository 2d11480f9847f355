"""The secret of jobs that meet: who may read it, where it comes from, that nobody is told."""

import os
import stat
import subprocess
import sys

import pytest

from meshwise import secret

WORD = "0123456789abcdef" * 2


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.delenv(secret.FILE, raising=False)
    monkeypatch.delenv(secret.VALUE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def written(path, text=WORD, mode=0o600):
    path.write_text(text)
    path.chmod(mode)
    return path


def test_the_argument_wins_over_the_variables(home, monkeypatch):
    monkeypatch.setenv(secret.VALUE, "v" * 32)
    assert secret.read() == b"v" * 32
    assert secret.read(written(home / "a", WORD + "\n")) == WORD.encode()
    monkeypatch.delenv(secret.VALUE)
    monkeypatch.setenv(secret.FILE, str(written(home / "b", "b" * 40)))
    assert secret.read() == b"b" * 40
    monkeypatch.setenv(secret.VALUE, "v" * 32)
    with pytest.raises(ValueError, match="both set: give one"):
        secret.read()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644, 0o666])
def test_a_file_that_others_could_open_is_refused(home, mode):
    with pytest.raises(ValueError, match="is open to others: chmod 600"):
        secret.read(written(home / "a", mode=mode))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(home):
    os.chown(path := written(home / "a"), 65534, 65534)
    with pytest.raises(ValueError, match="belongs to another user"):
        secret.read(path)


def test_what_is_no_file_is_refused_and_not_waited_for(home):
    os.mkfifo(home / "pipe", 0o600)
    for name, said in [
        ("pipe", "no regular file"),
        (".", "regular file"),
        ("none", "No such file"),
    ]:
        with pytest.raises(ValueError, match=said):
            secret.read(home / name)


@pytest.mark.parametrize("text", ["", "short", " " * 40, "x" * 31, "x" * 5000])
def test_a_secret_of_the_wrong_length_is_refused_and_not_shown(home, text):
    with pytest.raises(ValueError, match="openssl rand") as error:
        secret.read(written(home / "a", text))
    assert text.strip() not in str(error.value) or not text.strip()


def test_the_own_secret_is_made_once_and_for_its_user_alone(home):
    made = secret.read()
    assert made == secret.read() and len(made) == 64
    folder = home / ".meshwise"
    assert [path.name for path in folder.iterdir()] == ["secret"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "secret").stat().st_mode) == 0o600


def test_processes_that_make_it_at_once_have_one(home):
    code = "from meshwise import secret; print(secret.read().decode())"
    order = [sys.executable, "-c", code]
    started = [subprocess.Popen(order, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    assert len({process.communicate(timeout=120)[0] for process in started}) == 1


def test_a_folder_or_file_put_there_by_another_is_refused(home):
    folder = home / ".meshwise"
    folder.mkdir(mode=0o700)
    (folder / "secret").symlink_to(written(home / "a"))
    with pytest.raises(ValueError, match="cannot be read"):
        secret.read()
    (folder / "secret").unlink()
    folder.chmod(0o777)
    with pytest.raises(ValueError, match="others can write"):
        secret.read()
    folder.rmdir()
    (home / "elsewhere").mkdir()
    folder.symlink_to(home / "elsewhere")
    with pytest.raises(ValueError, match="no folder of this user"):
        secret.read()


def test_no_home_says_what_to_set(home, monkeypatch):
    monkeypatch.setenv("HOME", str(home / "gone" / "further"))
    with pytest.raises(ValueError, match=secret.FILE):
        secret.read()
