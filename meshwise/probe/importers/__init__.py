"""Read what other tools measured. ``read`` recognises a file by its contents, not by its name."""

import re
from pathlib import Path

from meshwise import files
from meshwise.probe.importers import (
    csv_table,
    nccl_tests_json,
    nccl_tests_text,
    nccl_trace,
    param,
    primus,
)
from meshwise.probe.importers.found import Found, line_at
from meshwise.spec import Cluster, Collective

__all__ = ["Found", "calls", "read"]

KNOWN = (
    "nccl-tests' text or JSON, PARAM comms' text or its CSV of batch, tables and dimension, "
    "Primus' CSVs, NCCL traces"
)
MOST_BYTES = 2**25  # reading holds several copies of a trace, which may be long
FORMS = (param.FORM, *primus.FORMS)
_PARAM = re.compile(r"^[ \t]*COMMS-RES", re.MULTILINE)


def read(path: Path | str, cluster: Cluster | None = None) -> Found:
    """Read a file. Raise a ValueError of one line, which begins with the file's name, if none of
    these tools wrote it."""
    path = Path(path)
    data = files.read_bytes(path, at_most=MOST_BYTES)
    try:
        return _read(_text(data), path.name, cluster)
    except ValueError as error:
        told = str(error)
    except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError) as error:
        told = f"holds what its tool does not write ({error!r}); was it edited or cut off?"
    raise ValueError(f"{path.name}: {' '.join(told.split())[:2000]}")


def calls(path: Path | str) -> tuple[list[list[nccl_trace.Traced]], bool]:
    """List the calls of each rank in an NCCL trace. Of another tool's log list the messages, each
    once, and say False: how often a training sends them is not known."""
    text = files.read_bytes(path, at_most=MOST_BYTES).decode(errors="replace")
    if found := nccl_trace.by_rank(text):
        return found, True
    ops = dict.fromkeys(sample.case.op for sample in read(path).samples)
    timed = [nccl_trace.call_of(op) for op in ops if isinstance(op, Collective)]
    if not timed:
        raise ValueError(f"{Path(path).name}: has no messages to compare with those of a model")
    return [list(dict.fromkeys(timed))], False


def _text(data: bytes) -> str:
    zeros = sorted((data[:80:2].count(0), data[1:80:2].count(0)))  # at even and odd places
    if data[:2] in (b"\xff\xfe", b"\xfe\xff") or (zeros[0] == 0 and zeros[1] > 20):
        raise ValueError("is UTF-16; save it as UTF-8 text")
    text = data.decode("utf-8-sig", errors="replace")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read(text: str, name: str, cluster: Cluster | None) -> Found:
    if not text.strip():
        raise ValueError("is empty; was the run cut off?")
    tests, param_rows = nccl_tests_text.HEADER.search(text), _PARAM.search(text)
    if tests and param_rows:
        first, second = (line_at(text, match.start()) for match in (tests, param_rows))
        raise ValueError(
            f"has a table of nccl-tests at {first} and one of PARAM at {second}; split the file"
        )
    if tests:
        return nccl_tests_text.read_text(text, name)
    if param_rows:
        return param.read(text)
    if nccl_trace.MARK in text:
        return nccl_trace.read(text, cluster)
    if text.lstrip()[0] in "[{":
        return _json(text, name)
    return _csv(text, name)


def _json(text: str, name: str) -> Found:
    try:
        data = files.parse_json(text, name)
    except ValueError as error:
        told = str(error).removeprefix(f"{name}: ")
        raise ValueError(f"{told}; was the run cut off?") from None
    if isinstance(data, dict) and "results" in data and "config" in data:
        return nccl_tests_json.read_json(data, name)
    raise ValueError(f"is JSON, but not a report of nccl-tests; known are {KNOWN}")


def _csv(text: str, name: str) -> Found:
    header, first = text.strip().split("\n")[0], list(csv_table.headers(text, FORMS))
    if len(first) > 1:
        raise ValueError(f"{first[1]} is a second header: several files in one; split it")
    if form := csv_table.form_of(csv_table.columns_of(header), FORMS):
        return csv_table.read(text, form, name)
    for separator, word in ((";", "semicolons"), ("\t", "tabs")):
        if csv_table.form_of(csv_table.columns_of(header, separator), FORMS):
            raise ValueError(f"its values are separated by {word}; save it with commas between")
    missing = csv_table.lacking(csv_table.columns_of(header), FORMS)
    raise ValueError(missing or f"not a result that measure import can read ({KNOWN})")
