"""Text of others: no control character, no credential, one line."""

import json
import sys
import time
import unicodedata
from pathlib import Path

import msgspec
import pytest

from meshwise import provenance, store, text
from meshwise.cli import app
from meshwise.pages import svg
from meshwise.spec import RunInfo
from meshwise.verbs import recording
from tests import sample_records as known

HOSTILE = "gpt\x1b[2J\x07\r\nerror: forged\x9b31m\u202egnp.\u2066\u200b\ufeff\x7f"


def is_plain(shown: str) -> bool:
    """By Unicode's own categories: no control, format, private or surrogate character."""
    return not any(unicodedata.category(one) in ("Cc", "Cf", "Cs") for one in shown)


def test_every_control_character_of_unicode_is_escaped():
    for point in range(0x10000):
        if unicodedata.category(chr(point)) in ("Cc", "Cs") or 0x2028 <= point <= 0x202E:
            shown = text.plain(f"a{chr(point)}b")
            assert is_plain(shown), hex(point)
            assert json.loads(f'"{shown}"') == f"a{chr(point)}b"
    assert text.plain("é – × 模型 😀") == "é – × 模型 😀"
    assert text.plain("a\nb\tc", keep="\n") == "a\nb\\tc"


def test_an_error_is_one_line_of_300_characters_with_its_prefix():
    assert text.one_line(f"a\n {HOSTILE}  b").count("\n") == 0
    long = text.one_line("begin " + "x" * 10_000 + " use --cluster")
    assert (
        len(f"error: {long}") == 300
        and long.startswith("begin x")
        and long.endswith("use --cluster")
    )
    assert text.one_line("x" * 293) == "x" * 293


def test_an_error_does_not_show_what_logs_in(capsys):
    assert text.one_line("data = 's3://me:hush@host/x': none") == "data = 's3://***@host/x': none"
    half = "x" * 150 + " https://me:" + "hush" * 30 + "@host/ is not there"  # where it is cut
    assert "hush" not in text.one_line(half)
    assert call("show", "https://me:hush@host/run") == 2
    assert "hush" not in capsys.readouterr().err


def test_a_long_text_is_masked_in_no_time():
    for one in ("x", "(", "a:=", "token", "a:b@", "://x@"):
        start = time.process_time()
        text.one_line(one * 10**6)
        text.masked("x" * 10**6)
        assert time.process_time() - start < 30, one  # quadratic time would be hours


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("https://someone:hush@host.org/x", "https://***@host.org/x"),
        ("https:/someone:hush@host.org/x", "https:/***@host.org/x"),
        ("https://hush@host.org/x@v1", "https://***@host.org/x@v1"),
        ("--proxy=http://:hush@host", "--proxy=http://***@host"),
        ("someone:hush@host:80", "***@host:80"),
        ("store=someone:hush@10.0.0.7", "store=***@10.0.0.7"),
        ("https://host/?token=hush&page=1", "https://host/?token=***&page=1"),
        ("HF_TOKEN=hush", "HF_TOKEN=***"),
        ("--api-key=hush", "--api-key=***"),
        ("git@host.org:owner/name", "git@host.org:owner/name"),
        ("--new-tokens=32", "--new-tokens=32"),
        ("runs/a:b@c", "runs/a:b@c"),
    ],
)
def test_what_logs_in_is_masked(given, shown):
    assert text.masked(given) == shown


def test_the_stored_command_has_no_credentials(monkeypatch):
    words = [
        "detect",
        "--store",
        "u:hush@host",
        "--auth-token",
        "hush",
        "--new-tokens",
        "32",
        "\x1b",
    ]
    monkeypatch.setattr(sys, "argv", ["/bin/meshwise", *words])
    assert recording.command("detect") == (
        "meshwise", "detect", "--store", "***@host", "--auth-token", "***", "--new-tokens", "32",
        "\\u001b",
    )  # fmt: skip


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        app.main(list(arguments))
    return ended.value.code


def test_names_never_reach_the_terminal_raw(tmp_path, monkeypatch, capfd):
    """Whatever verb shows a file whose every name is hostile."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    cluster = renamed(known.CLUSTER)
    plan = renamed(known.plan())
    store.write("cluster.toml", cluster)
    store.write("costs.json", renamed(known.COSTS))
    store.write("plan.json", plan)
    info = renamed(known.info("run", plan, "20260101T000100-run-gpt"), run_id="run", verb="run")
    known.write_run(Path("runs"), info, [known.step_sample(plan, [0.01] * 5, peak_bytes=4e9)])
    for words in (
        ["show", "cluster.toml"],
        ["show", "costs.json"],
        ["show", "plan.json"],
        ["show", "plan.json", "--json"],
        ["show", "runs/run"],
        ["show", "runs/run", "--json"],
        ["show", HOSTILE],
        ["report", "--json"],
        ["report"],
        ["run", "plan.json", "--nproc", "3"],
        ["plan", HOSTILE],
        ["compare", "runs/run", HOSTILE],
        [HOSTILE],
        ["detect", f"--{HOSTILE}"],
        ["measure", "import", HOSTILE],
    ):
        call(*words)
        told = capfd.readouterr()
        assert told.out or told.err, words
        for line in (told.out + told.err).split("\n"):
            assert is_plain(line), (words, line)
            assert not line.startswith("error: forged"), words
        assert all(len(line) <= 300 for line in told.err.splitlines()), words
    page = Path("report.html").read_text()
    assert all(is_plain(line) for line in page.split("\n"))


def renamed(record, **kept):
    """A record with every free text in it hostile."""
    data = msgspec.to_builtins(record)

    def hostile(value, key=""):
        if isinstance(value, dict):
            return {name: hostile(one, name) for name, one in value.items()}
        if isinstance(value, list):
            return [hostile(one, key) for one in value]
        return HOSTILE if isinstance(value, str) and key in ("name", "notes", "source") else value

    return msgspec.convert(hostile(data) | kept, type(record))


def test_a_figure_of_its_own_holds_no_control_character():
    found = svg.standalone(svg.Figure(f"<svg><text>{HOSTILE}</text></svg>", "caption"))
    assert all(is_plain(line) for line in found.split("\n"))


def test_a_run_that_ends_badly_says_why_whatever_the_reason_holds(tmp_path):
    info = known.info("run", known.plan(), "run")
    known.write_run(tmp_path, info, [])
    store.finish(tmp_path / "run", "failed", "half of a character: \ud800")
    ended = store.read(tmp_path / "run" / "run.json", RunInfo)
    assert (ended.status, ended.reason) == ("failed", "half of a character: \\ud800")


def test_settings_are_plain_text():
    assert provenance.settings({"NCCL_ALGO": "Ring\x1b\udc80"}) == {
        "NCCL_ALGO": "Ring\\u001b\\udc80"
    }
