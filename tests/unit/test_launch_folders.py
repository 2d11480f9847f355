"""Folders of a job: the temporary one, gone with its process; compiled code, where nobody else can
place any."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from meshwise.launch import cache, scratch

HOLDS = """
import sys, time
from meshwise.launch import scratch
with scratch.folder() as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in (cache.INDUCTOR, cache.TRITON):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def mode(path: str | Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_a_temporary_folder_is_ours_alone_and_goes_with_its_body(tmp_path: Path) -> None:
    with scratch.folder() as folder:
        (folder / "something").touch()
        assert folder.parent == tmp_path and mode(folder) == 0o700
    assert not list(tmp_path.glob("meshwise-*"))


def test_folders_of_the_dead_are_swept_and_none_of_the_living(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDS],
        env=os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    theirs = Path(other.stdout.readline().strip())
    (theirs / "logs").mkdir()
    begun = tmp_path / "meshwise-begun"  # its maker died before it held the lock
    begun.mkdir(mode=0o700)
    runs = tmp_path / "meshwise-runs"  # the user's, for results to come
    runs.mkdir(mode=0o755)
    foreign = tmp_path / "meshwise-notes"
    foreign.mkdir()
    (foreign / "notes.txt").touch()
    link = tmp_path / "meshwise-link"
    link.symlink_to(foreign)
    try:
        with scratch.folder() as mine:
            scratch.sweep()
            assert mine.exists() and theirs.exists() and not begun.exists() and runs.exists()
    finally:
        other.kill()
        other.wait()
        other.stdout.close()
    assert (theirs / "logs").exists()
    with scratch.folder():
        assert not theirs.exists()
        assert (foreign / "notes.txt").exists() and link.is_symlink()


def test_a_folder_that_is_swept_before_it_is_locked_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def swept_at_once(prefix: str) -> str:
        made.append(tmp_path / f"{prefix}{len(made)}")
        made[-1].mkdir(mode=0o700)
        if len(made) == 1:
            scratch.sweep()
        return str(made[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", swept_at_once)
    with scratch.folder() as folder:
        assert folder == made[1] and not made[0].exists()


def test_compiled_code_is_kept_in_folders_of_this_user_alone(tmp_path: Path) -> None:
    found = cache.variables(tmp_path)
    assert found == {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache/meshwise/inductor"),
        "TRITON_CACHE_DIR": str(tmp_path / "cache/meshwise/triton"),
    }
    assert [mode(folder) for folder in found.values()] == [0o700, 0o700]
    assert cache.variables(tmp_path) == found  # the second time they are there


def _link(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir()
    folder.symlink_to(folder.parent / "elsewhere")


def _open_to_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def _open_to_readers(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o755)


@pytest.mark.parametrize(
    ("make", "why"),
    [(_link, "is a link"), (_open_to_all, "has mode 0777"), (_open_to_readers, "has mode 0755")],
)
@pytest.mark.parametrize("place", ["cache/meshwise", "cache/meshwise/inductor"])
def test_a_folder_in_which_others_could_place_code_is_refused(
    tmp_path: Path, place: str, make, why: str
) -> None:
    path = tmp_path / place
    path.parent.mkdir(mode=0o700, parents=True)
    make(path)
    with pytest.raises(ValueError, match=f"{place} {why}: others could place code there"):
        cache.variables(tmp_path)


def test_so_is_one_beneath_a_folder_where_anybody_may_rename_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared))
    with pytest.raises(ValueError, match="shared has mode 0777"):
        cache.variables(tmp_path)
    shared.chmod(0o1777)  # as /tmp
    assert str(shared) in cache.variables(tmp_path)[cache.INDUCTOR]


def test_a_link_above_it_is_followed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever made the link may have it mean another folder afterwards."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "link"))
    found = cache.variables(tmp_path)
    assert found[cache.INDUCTOR] == str(tmp_path / "mine/meshwise/inductor")


COMPILES = """
import os, torch
import meshwise
meshwise.apply(meshwise.Layout(), torch.nn.Sequential(torch.nn.Linear(2, 2)), lowering="compiled")
from torch._inductor.runtime.cache_dir_utils import cache_dir
print(os.environ["TRITON_CACHE_DIR"], cache_dir())
"""


def test_a_program_that_calls_apply_compiles_there_too(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILES],
        env=os.environ
        | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0", "TMPDIR": str(tmp_path)}
        | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    ours = tmp_path / "cache/meshwise"
    assert done.stdout.split() == [str(ours / "triton"), str(ours / "inductor")], done.stderr
    assert not list(tmp_path.glob("meshwise-*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_and_one_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = tmp_path / "torchinductor_me"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 12345, 12345)
    monkeypatch.setenv(cache.INDUCTOR, str(theirs))
    with pytest.raises(ValueError, match="torchinductor_me belongs to user 12345"):
        cache.variables(tmp_path)


def test_a_folder_that_the_user_named_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "scratch"
    named.mkdir()
    named.chmod(0o775)
    monkeypatch.setenv(cache.TRITON, str(named))
    assert cache.variables(tmp_path)[cache.TRITON] == str(named)
    named.chmod(0o777)
    with pytest.raises(ValueError, match="scratch has mode 0777"):
        cache.variables(tmp_path)


def test_without_a_home_that_can_be_written_compiled_code_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cache.variables(tmp_path / "job")[cache.TRITON] == str(tmp_path / "job/triton")
    assert "compiled code is not kept" in caplog.text
