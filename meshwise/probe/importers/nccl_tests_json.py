"""The JSON report of nccl-tests (``-J``, version 3), as tables.

Its ``env`` holds the whole environment, secrets included: it is never looked at. A process lists
its first device only. Missing numbers are null, booleans are the words true and false.
"""

from typing import Any

from meshwise.probe.importers.found import Found
from meshwise.probe.importers.nccl_tests import Line, Section, found_of
from meshwise.spec.run import Regime


def read_json(data: dict[str, Any], name: str) -> Found:
    """``data``: the parsed file; ``name`` is the file's, for messages."""
    try:
        config, results = data["config"], data["results"]
        program = str((results[0] if results else {}).get("experiment_name") or "")
        program = program or str(data["args"][0]).rpartition("/")[2]
        per_process = int(config["nthreads"]) * int(config["ngpus"])
        ranks = tuple(
            (int(d["rank"]) + i, int(d.get("group", 0)), str(d["hostname"]), str(d["device_info"]))
            for d in config["devices"]
            for i in range(per_process)
        )
        blocking = str(config.get("blocking_collectives")) == "true"
        regime: Regime = (
            "graph" if int(config["graph"]) else "blocking" if blocking else "pipelined"
        )
        lines = [_json_line(result, f"result {i}") for i, result in enumerate(results, 1)]
        average = float(data["average_bus_bandwidth"]["bandwidth"])
        version = str(data.get("nccl_version", ""))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: not the JSON of nccl-tests version 3: {error!r}") from None
    if not lines:
        raise ValueError(f"{name}: holds no results; was the run cut off?")
    return found_of([Section(program, ranks, regime, lines, average, "", version)], name)


def _json_line(result: dict[str, Any], where: str) -> Line:
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
    size, count = int(result["size"]), int(result["count"])
    return Line(where, size, count, str(result["type"]), redop, root, values)
