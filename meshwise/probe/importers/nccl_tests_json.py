"""The JSON report of nccl-tests (``-J``, version 3), as tables.

Its ``env`` holds the whole environment with all secrets, so it is never read. A process lists only
its first device. Missing numbers are null, booleans are the words true and false.
"""

from typing import Any

from meshwise.probe.importers.found import Found, is_number, refusal, short, whole
from meshwise.probe.importers.nccl_tests import Line, Ranks, Section, read
from meshwise.spec import Regime


def read_json(data: dict[str, Any], name: str) -> Found:
    """Read a report. ``data``: the parsed file. ``name``: the file's, for messages."""
    try:
        config, results = data["config"], data["results"]
        program = str((results[0] if results else {}).get("experiment_name") or "")
        program = program or str(data["args"][0]).rpartition("/")[2]
        ranks = _ranks(config)
        blocking = str(config.get("blocking_collectives")) == "true"
        graph = whole(str(config["graph"]), "graph")
        regime: Regime = "graph" if graph else "blocking" if blocking else "pipelined"
        printed = str(data["average_bus_bandwidth"]["bandwidth"])
        version = str(data.get("nccl_version", ""))
        lines, unread = _lines(results)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: not the JSON of nccl-tests version 3: {error!r}") from None
    if not lines:
        raise refusal(name, unread)
    average = float(printed) if is_number(printed) else None
    section = Section(program, ranks, regime, lines, average, "", version, tuple(unread))
    return read([section], name)


def _ranks(config: dict[str, Any]) -> Ranks:
    per_process = whole(str(config["nthreads"]), "nthreads", 1)
    per_process *= whole(str(config["ngpus"]), "ngpus", 1)
    if per_process > 1024:
        raise ValueError(f"nthreads * ngpus = {per_process}: must be <= 1024")
    return tuple(
        (int(d["rank"]) + i, int(d.get("group", 0)), str(d["hostname"]), str(d["device_info"]))
        for d in config["devices"]
        for i in range(per_process)
    )


def _lines(results: list[dict[str, Any]]) -> tuple[list[Line], list[str]]:
    """Return the results, and which results or placements cannot be read, and why."""
    lines, unread = [], []
    for number, result in enumerate(results, 1):
        where = f"result {number}"
        try:
            line = _line(result, where)
        except KeyError as error:
            unread.append(f"{where}: {error} is missing")
            continue
        except (AttributeError, TypeError, ValueError) as error:
            unread.append(f"{where}: {short(str(error))}")
            continue
        values = {}
        for in_place, half in line.values.items():
            bad = [key for key in ("time", "algbw", "busbw") if not is_number(half[key])]
            if bad:
                placed = "in place" if in_place else "out of place"
                unread.append(f"{where} {placed}: {bad[0]} = {short(half[bad[0]])}")
            else:
                values[in_place] = half
        if values:
            lines.append(line._replace(values=values))
    return lines, unread


def _line(result: dict[str, Any], where: str) -> Line:
    values = {}
    for in_place, key in ((False, "out_of_place"), (True, "in_place")):
        if (half := result.get(key)) is not None:
            wrong = "N/A" if half["nwrong"] is None else str(half["nwrong"])
            time = half.get("time", half.get("cpu_time"))
            times_us = (result.get(f"{key}_per_iter") or {}).get("times_us", [])
            values[in_place] = {
                "time": str(time),
                "algbw": str(half["alg_bw"]),
                "busbw": str(half["bus_bw"]),
                "#wrong": wrong,
                "times_us": " ".join(map(str, times_us)),
            }
    redop, root = str(result.get("redop") or ""), int(str(result.get("root") or -1))
    size, count = whole(str(result["size"]), "size"), whole(str(result["count"]), "count")
    return Line(where, size, count, str(result["type"]), redop, root, values)
