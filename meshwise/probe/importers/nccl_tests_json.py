"""The JSON report of nccl-tests (``-J``, version 3), as tables.

Its ``env`` holds the whole environment with all secrets, so it is never read. A process lists only
its first device. Missing numbers are null, booleans are the words true and false.
"""

from functools import partial
from typing import Any

from meshwise.probe.importers.found import UNREAD, Doubts, Found, is_number, readable, short, whole
from meshwise.probe.importers.nccl_tests import PLACES, PRINTED, Line, Ranks, Section, read
from meshwise.spec import Regime


def read_json(data: dict[str, Any], name: str) -> Found:
    """Read a report. ``data``: the parsed file. ``name``: the file's."""
    doubts = Doubts()
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
        rows = ((f"result {number}", result) for number, result in enumerate(results, 1))
        lines = [line for line in readable(rows, partial(_line, doubts), doubts) if line.values]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"not the JSON of nccl-tests version 3: {error!r}") from None
    average = float(printed) if is_number(printed) else None
    section = Section(program, ranks, regime, lines, average, "", version)
    return read([section], name, doubts)


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


def _line(doubts: Doubts, where: str, result: dict[str, Any]) -> Line:
    values = {}
    for in_place, key in ((False, "out_of_place"), (True, "in_place")):
        if (half := result.get(key)) is not None:
            wrong = "N/A" if half["nwrong"] is None else str(half["nwrong"])
            time = half.get("time", half.get("cpu_time"))
            times_us = (result.get(f"{key}_per_iter") or {}).get("times_us", [])
            printed = {
                "time": str(time),
                "algbw": str(half["alg_bw"]),
                "busbw": str(half["bus_bw"]),
                "#wrong": wrong,
                "times_us": " ".join(map(str, times_us)),
            }
            if bad := next((k for k in PRINTED if not is_number(printed[k])), ""):
                place = f"{where} {PLACES[in_place]}"
                doubts[UNREAD].append(f"{place}: {bad} = {short(printed[bad])}")
            else:
                values[in_place] = printed
    redop, root = str(result.get("redop") or ""), int(str(result.get("root") or -1))
    size, count = whole(str(result["size"]), "size"), whole(str(result["count"]), "count")
    return Line(where, size, count, str(result["type"]), redop, root, values)
