"""One causal attention shared by all ranks, forward and backward: which way of sharing is fastest?

torchrun --nproc-per-node 4 benchmarks/2026-11-21-long-attention/attention.py --out DIR

``schemes.py`` has the ways. Each is run once at each size on fresh inputs and compared with float64
attention by autograd; those that are right are then timed, all in turn in every round, because the
cards drift. Out: ``DIR/records.jsonl``: provenance, then a record as each scheme is checked, then
per size a record of each scheme with its raw times, and the devices' state before and after.
On CPUs (gloo) it runs tiny sizes, which prove the code and not the times.
"""

import argparse
import contextlib
import functools
import math
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from schemes import (
    Case,
    Lane,
    Pull,
    Scheme,
    Skip,
    Wire,
    alone,
    context_parallel,
    cpu_backward,
    cpu_forward,
    cudnn_backward,
    cudnn_forward,
    gather,
    ring,
    ulysses,
)
from torch import Tensor

from meshwise import provenance, ranks, stats, timing
from meshwise.units import GiB

LINK_BYTES_PER_S = 365e9  # NCCL send and receive, one direction, 4 H200
BACKWARD_FLOPS = 2.5  # over the forward's: five products for two
FULL = 32, 128, torch.bfloat16  # heads, head_dim, dtype
TINY = 16, 16, torch.float32


def schemes(
    case: Case, here: ranks.Ranks, group: Any, inline: Lane, beside: Lane, stack: Any
) -> dict[str, Callable[[], Scheme]]:
    """Every scheme by name, made when called; may raise Skip."""
    fp32, own = torch.float32, case.dtype
    rows = case.tokens // case.world
    slot_bytes = 2 * rows * case.heads * case.head_dim * fp32.itemsize  # dk and dv of one rank
    pull = functools.cache(lambda: Pull(here, slot_bytes))
    return {
        "floor": lambda: alone(case),
        "floor-bhsd": lambda: alone(case, heads_outside=True),
        "ulysses": lambda: ulysses(case, inline, Wire(here, group), 1),
        "ulysses-2": lambda: ulysses(case, beside, Wire(here, group), 2),
        "ulysses-4": lambda: ulysses(case, beside, Wire(here, group), 4),
        "ulysses-4-pull": lambda: ulysses(case, beside, pull(), 4),
        "ring-inline": lambda: ring(case, inline, Wire(here, group), fp32),
        "ring": lambda: ring(case, beside, Wire(here, group), fp32),
        "ring-bf16": lambda: ring(case, beside, Wire(here, group), own),
        "ring-pull": lambda: ring(case, beside, pull(), fp32),
        "gather-inline": lambda: gather(case, inline, Wire(here, group), 1, fp32),
        "gather-4": lambda: gather(case, beside, Wire(here, group), 4, fp32),
        "gather-4-bf16": lambda: gather(case, beside, Wire(here, group), 4, own),
        "context-parallel": lambda: context_parallel(case, stack),
    }


# ---- correctness


def order(layout: str, rank: int, case: Case) -> Tensor:
    """The positions in the sequence of a rank's rows."""
    positions = torch.arange(case.tokens, device=case.device)
    if layout == "zigzag":
        chunks = positions.chunk(2 * case.world)
        return torch.cat((chunks[rank], chunks[2 * case.world - 1 - rank]))
    return positions.chunk(case.world)[rank]


def dense(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, block: int = 2048) -> list[Tensor]:
    """One head in float64 by autograd: out, dq, dk, dv; every position sees itself and before."""
    q, grad = q.double(), grad.double()
    k, v = (x.double().requires_grad_() for x in (k, v))
    outs, dqs = [], []
    for start in range(0, len(q), block):
        rows = q[start : start + block].detach().requires_grad_()
        end = start + len(rows)
        scores = rows @ k[:end].T / math.sqrt(q.shape[1])
        seen = torch.ones(scores.shape, dtype=torch.bool, device=q.device).tril(start)
        out = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v[:end]
        out.backward(grad[start:end])
        outs.append(out.detach())
        dqs.append(rows.grad)
    return [torch.cat(outs), torch.cat(dqs), k.grad, v.grad]


def first_call(
    scheme: Scheme, case: Case, here: ranks.Ranks, seed: int
) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
    """Fresh inputs of all ranks; out, dq, dk and dv of this rank's rows; memory and bytes taken."""
    shape = (case.tokens, case.heads, case.head_dim)
    wholes = [timing.randn(shape, case.dtype, case.device, seed=4 * seed + i) for i in range(4)]
    mine = order(scheme.layout, case.rank, case)
    q, k, v, grad = (scheme.arrange(x[mine]) for x in wholes)
    before_bytes = peak_bytes(case.device, reset=True)
    received_bytes = scheme.wire.received_bytes if scheme.wire else 0
    saved = scheme.forward(q, k, v)
    found = [saved[0], *scheme.backward(grad, saved)]
    here.synchronize("the first call")
    taken: dict[str, Any] = {"extra_bytes": peak_bytes(case.device) - before_bytes}
    if scheme.wire:
        taken["extra_bytes"] += scheme.wire.slots_bytes  # torch's allocator does not know of them
        taken["received_bytes"] = scheme.wire.received_bytes - received_bytes
        taken["link_s"] = taken["received_bytes"] / LINK_BYTES_PER_S
    return wholes, [scheme.restore(x) for x in found], taken


def errors_of(
    layout: str, case: Case, here: ranks.Ranks, wholes: list[Tensor], found: list[Tensor], seed: int
) -> dict[str, float]:
    """Relative error norms of out, dq, dk and dv over all ranks.

    Each rank compares its share of the heads; of long sequences one head, because float64
    attention over 131,072 rows takes longer than all else here.
    """
    own = case.heads // case.world
    heads = range(own) if case.tokens <= 32768 else [(case.rank + seed) % own]
    complete = [whole_heads(x, layout, case) for x in found]
    squares = torch.zeros(2, 4, dtype=torch.float64, device=case.device)
    for head in heads:
        expected = dense(*(x[:, case.rank * own + head] for x in wholes))
        for i, (x, y) in enumerate(zip(complete, expected, strict=True)):
            squares[0, i] += (x[:, head].double() - y).square().sum()
            squares[1, i] += y.square().sum()
    total = torch.tensor(here.gather(squares.tolist())).sum(0)
    errors = (total[0] / total[1]).sqrt().tolist()
    return dict(zip(("out", "dq", "dk", "dv"), errors, strict=True))


def whole_heads(x: Tensor, layout: str, case: Case) -> Tensor:
    """From all heads of this rank's rows to this rank's heads of all rows, in sequence order."""
    send = x.detach().unflatten(1, (case.world, -1)).transpose(0, 1).contiguous()
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send)
    whole = send.new_empty(case.tokens, *send.shape[2:])
    for rank, rows in enumerate(received):
        whole[order(layout, rank, case)] = rows
    return whole


def peak_bytes(device: torch.device, reset: bool = False) -> int:
    if device.type != "cuda":
        return 0
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.max_memory_allocated(device)


# ---- the experiment


def attempt(here: ranks.Ranks, work: Callable[[], Any]) -> tuple[Any, str]:
    """(result, "") or, when it failed on any rank, what the first of them said; all ranks agree."""
    result, told = None, ""
    try:
        result = work()
    except Skip as reason:
        told = f"skipped: {reason}"
    except Exception as error:
        told = f"error on rank {here.rank}: {type(error).__name__}: {str(error).splitlines()[0]}"
    if told.startswith("error"):  # also seen when the others wait in a collective and time out
        print(told, file=sys.stderr, flush=True)
    return result, next((text for text in here.gather(told) if text), "")


def check(
    make: Callable[[], Scheme], case: Case, here: ranks.Ranks, seed: int, tolerance: float
) -> tuple[Any, str, dict[str, Any]]:
    """(scheme, what is wrong with it or "", record); the ranks agree after every step."""
    scheme, told = attempt(here, make)
    if told:
        return None, told, {}
    called, told = attempt(here, functools.partial(first_call, scheme, case, here, seed))
    if told or not scheme.layout:
        return scheme, told, {} if told else called[2]
    wholes, found, taken = called
    compare = functools.partial(errors_of, scheme.layout, case, here, wholes, found, seed)
    errors, told = attempt(here, compare)
    if not told and not all(error <= tolerance for error in errors.values()):
        told = f"wrong: an error above {tolerance:g}"
    return scheme, told, {**taken, "errors": errors or {}}


def time_rounds(
    ready: dict[str, Scheme], case: Case, here: ranks.Ranks, iterations: int, end_s: float
) -> dict[str, list[list[float]]]:
    """Per scheme, [forward, backward, both] of every round; schemes alternate within a round."""
    mark, elapsed_s = timing.clock(case.device)
    one = torch.zeros(1, device=case.device)
    rows = (case.tokens // case.world, case.heads, case.head_dim)
    drawn = [timing.randn(rows, case.dtype, case.device, seed=i) for i in range(4)]
    inputs = {name: [scheme.arrange(x) for x in drawn] for name, scheme in ready.items()}
    times: dict[str, list[list[float]]] = {name: [] for name in ready}
    for i in range(-1, iterations):  # the first is not counted
        marks = {}
        for name, scheme in ready.items():
            q, k, v, grad = inputs[name]
            dist.all_reduce(one)  # brings the ranks into step
            start = mark()
            saved = scheme.forward(q, k, v)
            middle = mark()
            scheme.backward(grad, saved)
            marks[name] = start, middle, mark()
            del saved
        here.synchronize("a round")
        if i >= 0:
            for name, (a, b, c) in marks.items():
                times[name].append([round(elapsed_s(*x), 7) for x in ((a, b), (b, c), (a, c))])
        if i >= 4 and here.gather(time.monotonic() > end_s)[0]:
            break
    return times


def slowest(rank_times_s: list[list[list[float]]], case: Case) -> dict[str, Any]:
    """Largest over ranks per iteration; medians with their 95 % intervals."""
    times = [[max(x) for x in zip(*i, strict=True)] for i in zip(*rank_times_s, strict=True)]
    found: dict[str, Any] = {"rank_times_s": rank_times_s}
    for i, what in enumerate(("forward", "backward", "both")):
        values = [x[i] for x in times]
        median, low, high = stats.median_interval(values)
        found[what] = {"median_s": median, "low_s": low, "high_s": high, "times_s": values}
    flops = 2 * case.tokens**2 * case.head_dim * case.heads * (1 + BACKWARD_FLOPS) / case.world
    found["tflops_per_gpu"] = flops / found["both"]["median_s"] / 1e12  # causal half counted
    return found


def run_size(
    tokens: int, here: ranks.Ranks, group: Any, lanes: tuple[Lane, Lane], options: Any, write: Any
) -> None:
    """All schemes at one number of tokens: check each, then time those that are right."""
    on_gpu = here.device.type == "cuda"
    kernels = (cudnn_forward, cudnn_backward) if on_gpu else (cpu_forward, cpu_backward)
    sizes = FULL if on_gpu else TINY
    case = Case(here.rank, here.world_size, tokens, *sizes, here.device, *kernels)
    tolerance = 1e-2 if on_gpu else 1e-5
    ready, records = {}, {}
    with contextlib.ExitStack() as stack:
        makers = schemes(case, here, group, *lanes, stack)
        if unknown := set(options.only or ()) - set(makers):
            raise SystemExit(f"--only {','.join(unknown)}: must be of {', '.join(makers)}")
        for seed, name in enumerate(options.only or makers):
            here.at(f"{name} at {tokens} tokens")
            started = time.monotonic()
            scheme, told, record = check(makers[name], case, here, seed, tolerance)
            records[name] = {"tokens": tokens, "scheme": name, "status": told or "ok"} | record
            if not told:
                ready[name] = scheme
            write({"checked": records[name]})
            shown = " ".join(f"{k} {x:.1e}" for k, x in record.get("errors", {}).items())
            took_s = time.monotonic() - started
            say(here, f"{tokens:>7} {name:17} {took_s:5.1f} s  {told or 'ok'}  {shown}")
        here.at(f"timing at {tokens} tokens")
        before = timing.device_states(here)
        rounds = functools.partial(
            time_rounds, ready, case, here, options.iterations, options.end_s
        )
        times, told = attempt(here, rounds)
        after = timing.device_states(here)
    gathered = here.gather(times)
    for name in ready:
        records[name] |= {"status": told} if told else slowest([x[name] for x in gathered], case)
    floor_s = records.get("floor", {}).get("both", {}).get("median_s")
    for record in records.values():
        if "both" in record and floor_s:
            record["floor_fraction"] = floor_s / record["both"]["median_s"]
        write(record)
    write({"tokens": tokens, "before": before, "after": after})
    say(here, table(records.values()))


def table(records: Any) -> str:
    names = ("forward", "backward", "both, ms", "95 % interval", "floor", "TFLOP/s", "extra GiB")
    lines = ["scheme           " + "".join(f"{name:>16}" for name in names)]
    for r in records:
        if "both" not in r:
            lines.append(f"{r['scheme']:17} {r['status']}")
            continue
        low, high = 1e3 * r["both"]["low_s"], 1e3 * r["both"]["high_s"]
        cells = [
            *(f"{1e3 * r[what]['median_s']:.2f}" for what in ("forward", "backward", "both")),
            f"{low:.2f}-{high:.2f}",
            f"{100 * r['floor_fraction']:.1f} %" if "floor_fraction" in r else "-",
            f"{r['tflops_per_gpu']:.1f}",
            f"{r['extra_bytes'] / GiB:.1f}",
        ]
        lines.append(f"{r['scheme']:17}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def say(here: ranks.Ranks, text: str) -> None:
    if here.rank == 0:
        print(text, flush=True)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", type=lambda x: x.split(","), help="scheme names, by comma")
    parser.add_argument("--tokens", default="32768,131072" if on_gpu else "256")
    parser.add_argument("--iterations", type=int, default=20 if on_gpu else 2)
    parser.add_argument("--seconds", type=float, default=130.0, help="no new round after these")
    options = parser.parse_args()
    # torch 2.13 has other names for two collectives; 2.11 has only these
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*deprecated")
    started = time.monotonic()
    options.end_s = started + options.seconds
    here = ranks.join()  # a collective that takes 30 s ends the run and names scheme and ranks
    group, lanes = None, (Lane(here.device, False), Lane(here.device, True))
    if on_gpu:  # transfers are to get SMs before the attention's next kernel does
        pg_options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        group = dist.new_group(backend="nccl", pg_options=pg_options)
    path = options.out / "records.jsonl"

    def write(record: dict[str, Any]) -> None:
        if here.rank == 0:
            with path.open("ab") as file:
                file.write(msgspec.json.encode(record) + b"\n")

    options.out.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True) if here.rank == 0 else None
    command = " ".join(["torchrun --nproc-per-node", str(here.world_size), *sys.argv])
    cudnn = torch.backends.cudnn.version() if on_gpu else None
    write({"command": command, "cudnn": cudnn, **provenance.collect()})
    for tokens in map(int, options.tokens.split(",")):
        run_size(tokens, here, group, lanes, options, write)
    say(here, f"{time.monotonic() - started:.0f} s in all")
    here.leave()


if __name__ == "__main__":
    main()
