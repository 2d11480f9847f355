"""What does each way of moving weights between four GPUs reach of what their links give?

torchrun --nproc-per-node 4 benchmarks/2026-11-21-moving-weights/move.py --out DIR
    [--patterns NAME,NAME] [--only PREFIX,PREFIX] [--rounds 20]

A pattern is a Llama model in two layouts (``plans.py``); ``meshwise.reshard`` says which index
ranges go from whom to whom. A variant is a way to move them (``ways.py``):

    slices       NCCL: one send and one receive a slice, all in one batch
    packed       slices copied into one flat buffer a peer, one message each, copied out again
    all-to-all   the same by all_to_all_single with split sizes
    buckets-N    packed N MiB at a time into two slots: packing, sending and unpacking overlap
    pull-NxS     such slots in symmetric memory; receivers pull by copy engine on S streams
    pull-N-sm    the same, but the unpacking kernels read the peer's slot themselves
    source       the weights lie in symmetric memory: slices are pulled as they are, contiguous
                 ones by copy engine, strided ones by kernels
    source-2d    the same, strided ones by copy engine as well (cudaMemcpy2DAsync)
    *-turns      peers in an order in which no sender serves two at once
    *-peers      a stream a peer

All variants of a pattern fill the same destination, copies within a rank included, and are timed
in turns. A call starts on idle devices that have just met; its time is the slowest rank's. Before
and after it is timed each is checked to the last word, with new source values, the destination
overwritten and one rank late. On a CPU the models are tiny and times mean nothing.
Out: ``results.jsonl``: versions and devices, a record for every pattern and variant, the end.
"""

import argparse
import gc
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import plans
import torch
import torch.distributed as dist
import ways
from plans import LINK, WORD, WORLD, Job, MiB, window
from ways import Here, Lanes, Symmetric, Variant, Weights

from meshwise import provenance, timing
from meshwise.ranks import Ranks, join
from meshwise.reshard.regions import Layout
from meshwise.stats import median_interval

BUDGET_S, FEWEST = 15.0, 5  # of timing a pattern; rounds whatever the budget
BARRIER_MS = 10_000  # then the barrier's kernel traps, so that a lost rank hangs nobody
LOST = r"CUDA.error|device-side|timed out|timeout|closed by peer|reset by peer"


# ---- weights in memory, filled by a rule, so that every word of a destination is known --------


def carved(flat: torch.Tensor, layouts: list[Layout], rank: int) -> Weights:
    """A rank's weights, one behind the other in ``flat``."""
    weights, at = {}, 0
    for number, shape in plans.held(layouts, rank).items():
        size = torch.Size(shape).numel()
        weights[number] = flat[at : at + size].view(shape)
        at += size
    return weights


def contents(
    job: Job, layouts: list[Layout], weights: Weights, rank: int, salt: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(part of a weight, what it must hold); no word occurs twice, nor under another salt."""
    for number, tensor in weights.items():
        for piece in (p for p in layouts[number] if p.rank == rank):
            place = torch.zeros((), dtype=torch.int64, device=tensor.device)
            for *ends, size in zip(*piece.box, job.pattern.weights[number].shape, strict=True):
                place = place[..., None] * size + torch.arange(*ends, device=tensor.device)
            place += (number << 36) + (salt << 48)
            right = place * -7046029254386353131  # odd, so that no two become one
            yield tensor[window(piece.local(piece.box))], right


# ---- variants ---------------------------------------------------------------------------------

Builders = dict[str, Callable[[], Variant]]


def variants(here: Here) -> Builders:
    sizes = here.job.pattern.buckets
    name = {size: f"{size // MiB}" if size >= MiB else f"{size}B" for size in sizes}
    middle = sizes[1]
    return {
        "slices": partial(ways.slices, here),
        "packed": partial(ways.buckets, here, None),
        "all-to-all": partial(ways.all_to_all, here),
        **{f"buckets-{name[s]}": partial(ways.buckets, here, s) for s in sizes[:3]},
        **{f"pull-{name[s]}x1": partial(ways.pull, here, s, 1) for s in sizes},
        **{f"pull-{name[middle]}x{n}": partial(ways.pull, here, middle, n) for n in (2, 4)},
        f"pull-{name[middle]}-sm": partial(ways.pull, here, middle, 0),
        f"pull-{name[middle]}-turns": partial(ways.pull, here, middle, 1, in_turns=True),
        f"pull-{name[middle]}-peers": partial(ways.pull, here, middle, None),
        "source": partial(ways.source, here, False),
        "source-2d": partial(ways.source, here, True),
        "source-turns": partial(ways.source, here, False, in_turns=True),
        "source-peers": partial(ways.source, here, False, peers_apart=True),
    }


def parts(here: Here) -> Builders:
    """What the ways are made of, each alone: packing by word size, one large message or copy."""
    rank, device, table = here.rank, here.ranks.device, here.job.table
    size = 128 * MiB if device.type == "cuda" else 1024
    have, want = here.empty(size), here.empty(size)

    def ring(source: torch.Tensor, call: ways.Call, receivers: int) -> Variant:
        """Ranks below ``receivers`` get ``source`` of the rank before."""

        def prepare() -> None:
            torch.arange(size * rank, size * (rank + 1), out=source)
            want.fill_(-1)

        def wrong() -> int:
            start = size * ((rank - 1) % WORLD)
            right = torch.arange(start, start + size, device=device)
            return int((want != right).sum()) if rank < receivers else 0

        return Variant(call, nbytes=want.nbytes, prepare=prepare, wrong=wrong)

    def copies(end: int, dtype: torch.dtype) -> Variant:
        by_rank = [
            [s for pair in table if pair[end] == r for s in table[pair]] for r in range(WORLD)
        ]
        tensors = [t.view(dtype) for t in (here.writes if end else here.reads)(by_rank[rank])]
        views = ways.sliced(here.empty(plans.words(by_rank[rank])).view(dtype), tensors)
        pairs = zip(tensors, views, strict=True) if end else zip(views, tensors, strict=True)
        return Variant(ways.copier([*pairs]), nbytes=2 * WORD * max(map(plans.words, by_rank)))

    def send(receivers: int) -> Variant:
        sends = [((rank + 1) % WORLD, have)] if (rank + 1) % WORLD < receivers else []
        receives = [((rank - 1) % WORLD, want)] if rank < receivers else []
        return ring(have, partial(ways.exchange, sends, receives), receivers)

    def pull(receivers: int) -> Variant:
        far = [slots[:size] for slots in here.symm().slots]
        copies = [(want, far[(rank - 1) % WORLD])] if rank < receivers else []
        return ring(far[rank], partial(ways.one_by_one, copies), receivers)

    def meet() -> Variant:
        return Variant(partial(here.symm().meet, 0), nbytes=0)

    def within() -> Variant:
        return Variant(here.copy_local(), nbytes=2 * WORD * max(map(plans.words, here.job.local)))

    return {
        "part-pack-2B": partial(copies, 0, torch.bfloat16),
        "part-pack-8B": partial(copies, 0, torch.int64),
        "part-pack-16B": partial(copies, 0, torch.complex128),
        "part-unpack-8B": partial(copies, 1, torch.int64),
        "part-local": within,
        "part-send-all": partial(send, WORLD),
        "part-send-one": partial(send, 1),
        "part-pull-all": partial(pull, WORLD),
        "part-pull-one": partial(pull, 1),
        "part-meet-nccl": lambda: Variant(
            partial(dist.all_reduce, here.empty(1).zero_()), nbytes=0
        ),
        "part-meet-symmetric": meet,
    }


# ---- checking and timing ----------------------------------------------------------------------

T = TypeVar("T")


def together(ranks: Ranks, work: Callable[[], T]) -> tuple[T | None, str]:
    """The result of ``work``, or why it failed on some rank; all ranks learn it alike."""
    result, reason = None, ""
    try:
        result = work()
        ranks.synchronize()
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        reason = f"{type(error).__name__}: {first}"
    return result, "; ".join(sorted({found for found in ranks.gather(reason) if found}))


def verify(here: Here, variant: Variant, salt: int) -> str:
    """What is wrong with a variant; nothing if every word is where it belongs."""
    job, rank = here.job, here.rank
    late = here.ranks.device.type == "cuda" and rank == salt % WORLD

    def prepare() -> None:
        if variant.prepare:
            variant.prepare()
        for weights in [here.have, *([here.far[rank]] if here.far else [])]:
            for part, right in contents(job, job.source, weights, rank, salt):
                part.copy_(right)
        for tensor in here.want.values():
            tensor.fill_(-1)

    def call() -> None:
        if late:
            torch.cuda._sleep(2**24)  # some 10 ms; who does not wait for this rank reads old words
        variant.call()

    def wrong() -> int:
        if variant.nbytes is not None:
            return variant.wrong() if variant.wrong else 0
        found = contents(job, job.destination, here.want, rank, salt)
        return int(sum((part != right).sum() for part, right in found))

    for work in (prepare, call):
        _, reason = together(here.ranks, work)
        if reason:
            return reason
    count, reason = together(here.ranks, wrong)
    total = sum(here.ranks.gather(count or 0))
    return reason or (f"{total} words are wrong" if total else "")


class Once(NamedTuple):
    time_s: float
    issued_s: float  # until the host had launched everything
    allocated_bytes: int


def once(ranks: Ranks, call: ways.Call, token: torch.Tensor) -> Once:
    on_cuda, held = ranks.device.type == "cuda", 0
    ranks.synchronize()
    ranks.barrier()
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        dist.all_reduce(token)  # the devices meet; the host's barrier is good to 0.1 ms only
    mark, elapsed_s = timing.clock(ranks.device)
    start, begun = mark(), time.perf_counter()
    call()
    issued_s, end = time.perf_counter() - begun, mark()
    ranks.synchronize()
    allocated = torch.cuda.max_memory_allocated() - held if on_cuda else 0
    return Once(elapsed_s(start, end), issued_s, allocated)


def run(here: Here, builders: Builders, rounds: int) -> Iterator[dict[str, Any]]:
    """Build and check all variants, time them in turns, check again; a record for each."""
    ranks, built = here.ranks, dict[str, Variant]()
    reasons = dict.fromkeys(builders, "not tried: a variant before it lost a device or a rank")
    for salt, (name, build) in enumerate(builders.items()):
        ranks.at(name)
        variant, reasons[name] = together(ranks, build)
        if variant and not reasons[name]:
            reasons[name] = verify(here, variant, salt)
            built |= {} if reasons[name] else {name: variant}
        if re.search(LOST, reasons[name], re.IGNORECASE):
            for name, reason in reasons.items():
                yield {"variant": name, "status": "error", "reason": reason or "right, not timed"}
            return
    token = here.empty(1).zero_()
    found: dict[str, list[Once]] = {name: [] for name in built}
    started = time.perf_counter()
    for i in range(rounds):
        if i >= FEWEST and ranks.gather(time.perf_counter() - started)[0] > BUDGET_S:
            break
        gc.collect()
        gc.disable()
        for name, variant in built.items():
            ranks.at(name)
            found[name].append(once(ranks, variant.call, token))
        gc.enable()
    for salt, (name, variant) in enumerate(built.items()):
        reasons[name] = verify(here, variant, len(builders) + salt)
    for name, reason in reasons.items():
        status = "error" if reason else "ok"
        for sign, kind in (("words are wrong", "wrong"), ("NotImplementedError", "skipped")):
            status = kind if sign in reason else status
        times = summary(here, built[name], found[name]) if status == "ok" else {}
        yield {"variant": name, "status": status, "reason": reason, **times}


def summary(here: Here, variant: Variant, found: list[Once]) -> dict[str, Any]:
    """Times, and what they are of the link and of the job's own floor; a part has its rate only."""
    job, gather = here.job, here.ranks.gather
    rank_times_s = gather([round(f.time_s, 8) for f in found])
    median_s, low_s, high_s = median_interval(
        [max(times) for times in zip(*rank_times_s, strict=True)]
    )
    extra = variant.extra_bytes + max(f.allocated_bytes for f in found)
    result = {
        "median_s": median_s,
        "low_s": low_s,
        "high_s": high_s,
        "issued_s": max(gather(median_interval([f.issued_s for f in found])[0])),
        "extra_bytes": max(gather(extra)),
        "rank_times_s": rank_times_s,
    }
    if variant.nbytes is not None:
        return result | {"bytes": variant.nbytes, "bytes_per_s": variant.nbytes / median_s}
    rate = job.received_bytes / median_s
    of = {"of_link": rate / LINK, "of_floor": job.floor_s / median_s, "floor_s": job.floor_s}
    return result | {"bytes": job.received_bytes, "bytes_per_s": rate} | of


# ---- setting up and reporting -----------------------------------------------------------------


def symmetric(ranks: Ranks, jobs: list[Job]) -> Symmetric:
    """Symmetric memory for all jobs, of the default back end, CUDA."""
    if ranks.device.type != "cuda":
        raise NotImplementedError("symmetric memory needs CUDA devices")
    import torch.distributed._symmetric_memory as memory  # an alpha interface, here only

    world = dist.group.WORLD
    assert world is not None
    slots = 2 * (max(max(job.pattern.buckets) for job in jobs) + MiB) // WORD  # and some rows
    sources = max(plans.held_words(job.source, rank) for job in jobs for rank in range(WORLD))
    by_rank, handles = [], []
    for size in (max(slots, 128 * MiB), sources):
        tensor = memory.empty(size, dtype=torch.int64, device=ranks.device)
        handles.append(memory.rendezvous(tensor, world))
        # not get_buffer: that leaves out where in its allocation the tensor lies
        peers = [handles[-1].get_remote_tensor(r, tensor.shape, tensor.dtype) for r in range(WORLD)]
        by_rank.append([tensor if r == ranks.rank else peers[r] for r in range(WORLD)])
    meet = partial(handles[0].barrier, timeout_ms=BARRIER_MS)
    meet(0)
    ranks.synchronize()
    return Symmetric(by_rank[0], by_rank[1], meet)


def settle(ranks: Ranks, lanes: Lanes, job: Job, symm: Symmetric | None) -> Here:
    """This rank's weights of a job, and where the peers' lie."""
    rank = ranks.rank
    sources = enumerate(symm.sources if symm else [])
    far = {peer: carved(flat, job.source, peer) for peer, flat in sources}
    have, want = (
        carved(
            torch.empty(plans.held_words(x, rank), dtype=torch.int64, device=ranks.device), x, rank
        )
        for x in (job.source, job.destination)
    )
    return Here(ranks, lanes, job, have, want, far, symm)


def line(record: dict[str, Any]) -> str:
    start = f"{record['pattern']:10s} {record['variant']:14s} "
    if record["status"] != "ok":
        return f"{start}{record['status']}: {record['reason']}"
    median, low, high, host = (
        f"{1e3 * record[key]:.3f}" for key in ("median_s", "low_s", "high_s", "issued_s")
    )
    text = f"{start}{median:>8s} ms ({low}-{high}) host {host}"
    if record["bytes"]:
        text += f" {record['bytes_per_s'] / 1e9:.1f} GB/s"
    if "of_link" in record:
        text += f" {record['of_link']:.1%} link {record['of_floor']:.1%} floor"
    return f"{text} +{record['extra_bytes'] / MiB:.0f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--patterns", default="")
    parser.add_argument("--only", default="", help="variants whose names start so")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    started = time.perf_counter()
    ranks = join()
    if ranks.world_size != WORLD:
        raise ValueError(f"--nproc-per-node {ranks.world_size}: the patterns are for {WORLD} ranks")
    chosen = plans.patterns(tiny=ranks.device.type == "cpu")
    wanted = args.patterns.split(",") if args.patterns else [*chosen]
    if not chosen.keys() >= set(wanted):
        parser.error(f"--patterns {args.patterns}: choose from {', '.join(chosen)}")
    jobs = {name: plans.plan(chosen[name]) for name in wanted}
    first = ranks.rank == 0

    def say(text: str) -> None:
        if first:
            print(f"[{time.perf_counter() - started:5.1f} s] {text}", flush=True)

    def keep(record: dict[str, Any]) -> None:
        if first:
            with (args.out / "results.jsonl").open("ab") as file:
                file.write(msgspec.json.encode(record) + b"\n")

    if first:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "results.jsonl").unlink(missing_ok=True)
    before = timing.device_states(ranks)
    symm, lacking = together(ranks, partial(symmetric, ranks, [*jobs.values()]))
    say(f"symmetric memory: {lacking or 'ok'}")
    keep(
        {
            "command": sys.argv,
            **provenance.collect(nproc=WORLD),
            "symmetric_memory": {"lacking": lacking},
            "before": before,
        }
    )
    lanes = Lanes(ranks.device)
    for number, (name, job) in enumerate(jobs.items()):
        floor = f"{1e3 * job.floor_s:.3f} ms at least"
        say(f"{name}: {job.received_bytes:,} bytes into one rank, {floor}")
        here = settle(ranks, lanes, job, None if lacking else symm)
        builders = variants(here) | (parts(here) if number == 0 else {})
        prefixes = tuple(args.only.split(","))
        chosen_builders = {n: b for n, b in builders.items() if n.startswith(prefixes)}
        for record in run(here, chosen_builders, args.rounds):
            record = {"pattern": name, **record}
            say(line(record))
            keep(record)
            if re.search(LOST, record["reason"], re.IGNORECASE):
                sys.exit(1)
        del here, builders, chosen_builders
    keep({"after": timing.device_states(ranks), "seconds": time.perf_counter() - started})
    ranks.leave()


if __name__ == "__main__":
    main()
