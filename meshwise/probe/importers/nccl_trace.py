"""Calls of collectives in the logs of NCCL and RCCL (NCCL_DEBUG=INFO or TRACE, SUBSYS=COLL).

In: lines such as ``host:86092:86620 [4] NCCL INFO ReduceScatter: opCount ce3 sendbuff 0x7f..
recvbuff 0x7f.. acc (nil) count 106956800 datatype 9 op 4 root 0 comm 0x.. [nranks=8] stream 0x..``.
They may be cut off after ``root``; RCCL adds ``acc``. Out: ``Traced``s. ``count`` is in elements:
those a rank sends for AllGather and keeps for ReduceScatter, else those of the message. Datatypes
and operations have their numbers of nccl.h.

A trace has no times. ``read`` makes samples without times, which say how often a call was made.
"""

import re
from collections import Counter
from typing import NamedTuple

from meshwise.probe.importers.found import (
    KINDS,
    Found,
    kind_named,
    line_at,
    lines_of,
    listed,
    warning,
)
from meshwise.spec import DTYPE_BYTES, Case, Cluster, Collective, Sample
from meshwise.spec.op import WHOLE

MARK = ": opCount "
_PROCESS = r"(?<!\d)(?P<pid>\d{1,10}):\d{1,10} \[(?P<device>\d{1,4})\]"
_POINTER = r"(?:0x[0-9a-fA-F]{1,16}|\(nil\))"
CALL = re.compile(  # bounded repetitions: else a long word takes quadratic time
    rf"{_PROCESS}[^\n]{{0,80}}?NCCL \w{{1,20}} (?P<kind>\w{{1,40}}){MARK}"
    rf"[0-9a-f]{{1,16}} sendbuff (?P<send>{_POINTER}) "
    rf"recvbuff (?P<receive>{_POINTER}) "
    r"(?:acc \S{1,40} )?count (?P<count>\d{1,18}) "
    r"datatype (?P<datatype>\d{1,4}) op \d{1,4} root \d{1,10}(?!\d)"
    r"(?: comm (?P<comm>0x[0-9a-f]{1,16}))?(?:[^\n]{0,80}?\[nranks=(?P<ranks>\d{1,7})\])?"
)
_INIT = re.compile(  # of SUBSYS=INIT: ``comm 0x55d0 rank 0 nranks 8 cudaDev 0 ...``
    rf"{_PROCESS}[^\n]{{0,160}}?comm (?P<comm>0x[0-9a-f]{{1,16}}) rank \d{{1,7}} "
    r"nranks (?P<ranks>\d{1,7})",
    re.IGNORECASE,
)
_ADDRESS = re.compile("0x[0-9a-fA-F]+")
DATATYPES = (
    "int8", "uint8", "int32", "uint32", "int64", "uint64", "fp16", "fp32", "fp64", "bf16",
    "fp8", "fp8",
)  # fmt: skip
ITEM_BYTES = {"int32": 4, "uint32": 4, "int64": 8, "uint64": 8, **DTYPE_BYTES}


class Traced(NamedTuple):
    """One call. ``device``: the process's GPU. ``num_ranks``: the communicator's, 0 if cut off."""

    device: int
    pid: int
    kind: str
    count: int  # type: ignore[assignment]  # not tuple's method
    datatype: str
    in_place: bool
    comm: str
    num_ranks: int


def calls(text: str) -> list[Traced]:
    """List the calls of a log whose lines reach at least to ``root``."""
    return [_call(match) for match in CALL.finditer(text)]


def by_rank(text: str) -> list[list[Traced]]:
    """List the calls of each rank in a log, without the receiving halves of messages. A rank is a
    process of a host, and a device."""
    found: dict[tuple[str, int, int], list[Traced]] = {}
    for match in CALL.finditer(text):
        host, call = text[text.rfind("\n", 0, match.start()) + 1 : match.start()], _call(match)
        if call.kind != "receive":
            found.setdefault((host.rpartition(" ")[2], call.pid, call.device), []).append(call)
    return list(found.values())


def call_of(op: Collective) -> Traced:
    """Return the call of an operation, in or out of place."""
    parts = 1 if op.kind in WHOLE else op.group_size
    count = op.size_bytes // parts // DTYPE_BYTES[op.dtype]
    return Traced(0, 0, op.kind, count, op.dtype, False, "", op.group_size)


def torn(text: str) -> list[str]:
    """List the lines with calls that cannot be read."""
    return [
        where
        for where, line in lines_of(text)
        if line.count(MARK) > sum(1 for _ in CALL.finditer(line))
    ]


def _call(match: re.Match[str]) -> Traced:
    datatype, kind = int(match["datatype"]), match["kind"]
    named = DATATYPES[datatype] if datatype < len(DATATYPES) else f"datatype {datatype}"
    call = Traced(
        device=int(match["device"]),
        pid=int(match["pid"]),
        kind="receive" if kind == "Recv" else kind_named(kind) or kind,
        count=int(match["count"]),
        datatype=named,
        in_place=False,
        comm=match["comm"] or "",
        num_ranks=int(match["ranks"] or 0),
    )
    return call._replace(in_place=_in_place(call, match["send"], match["receive"]))


def _in_place(call: Traced, sent: str, received: str) -> bool:
    """Whether the smaller buffer is the rank's part of the larger one."""
    send, receive = (0 if text == "(nil)" else int(text, 16) for text in (sent, received))
    if not send or not receive:
        return False
    apart = send - receive if call.kind == "all_gather" else receive - send
    part = call.count * ITEM_BYTES.get(call.datatype, 1)
    if call.kind not in ("all_gather", "reduce_scatter") or not part:
        return apart == 0
    place, rest = divmod(apart, part)
    return rest == 0 and 0 <= place < (call.num_ranks or call.device + 1)


def read(text: str, cluster: Cluster | None) -> Found:
    """Return the distinct calls of a log. If a line is cut off before its communicator's size, take
    it from the rest of the log or from ``cluster``."""
    found, lost = calls(text), torn(text)
    if not found:
        raise ValueError(f"{len(lost)} calls of collectives, all cut off before the root")
    warnings = warning(lost, "lines of calls cannot be read")
    sizes = _sizes(text, found)
    found = [
        call._replace(num_ranks=call.num_ranks or sizes.get((call.pid, call.comm), 0))
        for call in found
    ]
    largest = max([*sizes.values(), *(call.num_ranks for call in found)])
    if unknown := sum(not call.num_ranks for call in found):
        taken, why = _taken(found, largest, cluster)
        found = [call._replace(num_ranks=call.num_ranks or taken) for call in found]
        warnings.append(
            f"{unknown} calls do not say how many ranks took part: taken as {taken}, {why}"
        )
    world = max([call.num_ranks for call in found] + [cluster.num_devices if cluster else largest])
    counted: Counter[Case | str] = Counter(_case(call, world) for call in found)
    samples = tuple(
        Sample(
            case_id=case.id,
            case=case,
            status="skipped",
            reason="a trace holds no times",
            metrics={"calls": float(count)},
        )
        for case, count in counted.items()
        if isinstance(case, Case)
    )
    left_out = {what: count for what, count in counted.items() if isinstance(what, str)}
    if left_out:
        kinds = listed([f"{count} of {what}" for what, count in left_out.items()])
        warnings.append(f"{sum(left_out.values())} calls left out: {kinds}")
    if not samples:
        raise ValueError(f"no call has a counterpart here: {warnings[-1]}")
    return Found(
        tool="NCCL trace",
        size_kind="count of elements, of a rank for all_gather and reduce_scatter; ours is the "
        "whole message in bytes",
        time_kind="none",
        world_size=world,
        samples=samples,
        warnings=tuple(warnings),
        facts={"calls": len(found), "processes": len({call.pid for call in found})},
    )


def _sizes(text: str, found: list[Traced]) -> dict[tuple[int, str], int]:
    """Return the number of ranks of each process' communicators."""
    sizes: dict[tuple[int, str], int] = {}
    silent = {(call.pid, call.comm) for call in found if not call.num_ranks}
    for match in _INIT.finditer(text):
        key, size = (int(match["pid"]), match["comm"]), int(match["ranks"])
        if key in silent and sizes.get(key, size) != size:  # made twice, or another job's
            raise ValueError(
                f"comm {match['comm']} of process {key[0]} has {sizes[key]} ranks, and {size} at "
                f"{line_at(text, match.start())}, and calls that do not say which; split the file "
                "there"
            )
        sizes[key] = size
    return sizes


def _taken(found: list[Traced], largest: int, cluster: Cluster | None) -> tuple[int, str]:
    """Choose the number of ranks of calls whose lines do not say it, and give the reason."""
    if largest > 1:
        return largest, "the largest communicator in the log"
    if cluster is not None:
        return cluster.num_devices, "the devices of the cluster"
    seen = len({(call.pid, call.device) for call in found})
    if seen < 2:
        raise ValueError("does not say how many ranks took part; give --cluster")
    return seen, (
        "so many processes made calls; of more ranks the messages are larger: give --cluster then"
    )


def _case(call: Traced, world: int) -> Case | str:
    """Return the call as a case, or its description if no record fits."""
    if call.datatype not in ("fp16", "fp32", "fp64", "bf16", "fp8"):
        return f"{call.kind} of {call.datatype}"
    if call.kind in ("all_to_all_v", "send_recv") or call.kind not in KINDS.values():
        return call.kind  # half of a message, or unknown splits
    ranks = call.num_ranks
    parts = 1 if call.kind in WHOLE else ranks
    op = Collective(
        kind=call.kind,  # type: ignore[arg-type]
        size_bytes=call.count * parts * ITEM_BYTES.get(call.datatype, 1),
        group_size=2 if call.kind == "send" else ranks,
        dtype=call.datatype,  # type: ignore[arg-type]
        in_place=call.in_place,
    )
    return Case(op=op, regime="pipelined", world_size=world)


def without_host(text: str) -> str:
    """Return only the calls of a log's lines, without the host's name before them and without
    addresses of memory: communicators are numbered, and buffers only tell whether they are one."""
    numbers = {"": ""}  # of communicators; a line may be cut off before its own
    return "".join(f"{_without_addresses(match, numbers)}\n" for match in CALL.finditer(text))


def _without_addresses(match: re.Match[str], numbers: dict[str, str]) -> str:
    call, part = _call(match), "0x1"  # the smaller buffer lies before the larger one, or in it
    whole = part if call.in_place else "0x2"
    send, receive = (part, whole) if call.kind == "all_gather" else (whole, part)
    comm = numbers.setdefault(match["comm"] or "", hex(len(numbers)))
    places = match.start("send"), match.start("receive"), match.start("comm")
    known = dict(zip(places, (send, receive, comm), strict=True))
    return _ADDRESS.sub(lambda one: known.get(match.start() + one.start(), "0x0"), match[0])
