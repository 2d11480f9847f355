"""Reads what other tools measured. ``read`` recognises a file by what is in it, not by its name."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path

from meshwise.probe.importers import (
    nccl_tests_json,
    nccl_tests_text,
    nccl_trace,
    param,
    primus,
    tables_all_to_all,
)
from meshwise.probe.importers.found import Found
from meshwise.spec import Cluster

__all__ = ["Found", "read"]

KNOWN = (
    "nccl-tests' text or JSON, PARAM comms' text or its CSV of batch, tables and dimension, "
    "Primus' CSVs, NCCL traces"
)


def read(path: Path | str, cluster: Cluster | None = None) -> Found:
    """What a file holds; ValueError, naming the file, for one that none of these tools wrote."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    name = path.name
    if not text.strip():
        raise ValueError(f"{name}: is empty; was the run cut off?")
    if text.lstrip()[0] in "[{":
        return _json(text, name)
    forms: list[tuple[re.Pattern[str], Callable[[str, str], Found]]] = [
        (nccl_tests_text.HEADER, nccl_tests_text.read_text),
        (re.compile(r"^\s*COMMS-RES", re.MULTILINE), param.read),
    ]
    for pattern, reader in forms:
        if pattern.search(text):
            return reader(text, name)
    if re.search(r"\w+: opCount [0-9a-f]+ sendbuff", text):
        return nccl_trace.read(text, name, cluster)
    columns = next(csv.reader([text.lstrip().splitlines()[0]]), [])
    if set(columns) >= tables_all_to_all.COLUMNS:
        return tables_all_to_all.read_csv(csv.DictReader(text.lstrip().splitlines()), name)
    form = primus.form_of(columns)
    if form is None:
        raise ValueError(f"{name}: not a result of a tool that is read here ({KNOWN})")
    return primus.read_csv(text.lstrip(), form, name)


def _json(text: str, name: str) -> Found:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: is not JSON: {error}; was the run cut off?") from None
    if isinstance(data, dict) and "results" in data and "config" in data:
        return nccl_tests_json.read_json(data, name)
    raise ValueError(f"{name}: is JSON, but not a report of nccl-tests; known are {KNOWN}")
