"""Published training steps: their layouts, and the step as their systems ran it.

A plan prices what Meshwise runs. Megatron-LM and DeepSpeed ran other kernels then. ``as_run_s``
counts the difference from first principles, at the rates of the data sheet. Nothing is fitted to
the published times. What is counted is in benchmarks/2026-11-28-published/README.md.
"""

import csv
import itertools
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from msgspec.structs import replace

from meshwise import machine, search, store
from meshwise.prices import on_hosts, unmeasured
from meshwise.prices.datasheet import Datasheet
from meshwise.search.pipeline import BUBBLE
from meshwise.search.predict import TRANSFER
from meshwise.search.simulate import COPIES, SLOWED, WAITING
from meshwise.search.space import divisors
from meshwise.search.within import ANY, Space
from meshwise.spec import (
    AnyModel,
    Attention,
    Candidate,
    Cluster,
    Collective,
    Costs,
    Elementwise,
    Gemm,
    Layout,
    Model,
    Op,
    Prediction,
    Workload,
)
from meshwise.suites import layouts as alpa
from meshwise.suites import source as suites
from meshwise.suites.case import BenchmarkCase, LoadSolutionParallelArgs

ROWS = list(csv.DictReader((Path(__file__).parents[1] / "data/published/steps.csv").open()))
A100 = store.read(Path(str(machine.shipped()["dgx-a100-80gb"])), Cluster)
SEQ = 2048
# Alpa's plans that lose more than a tenth, otherwise: every stage cut by images, not by channel;
# and a first stage with as large a share of the layers as of the devices.
OTHERWISE: dict[str, dict[str, Any]] = {
    "wresnet-2b, 8 GPUs": {"meshes": (), "dp": 4, "microbatch_size": 16},
    "wresnet-4b, 16 GPUs": {"layers": (4, 4, 8)},
    "wresnet-13b, 64 GPUs": {"meshes": (), "dp": 8, "microbatch_size": 5},
}
OPTIMIZER = "optimizer"
OURS = 40  # bytes a parameter of our optimizer: clipping 12, AdamW 28


class Step(NamedTuple):
    """A published step: its table, model and layout, and the seconds that it took."""

    source: str
    model: Model
    workload: Workload
    layout: Layout
    costs: Costs
    iter_s: float

    @property
    def flops(self) -> float:
        """FLOPs of the model, by Megatron-LM's count: nothing that is computed again."""
        of, vocab = self.model, 51_200
        more = 1 + SEQ / 6 / of.hidden + vocab / 12 / of.layers / of.hidden
        return 72 * self.workload.tokens * of.layers * of.hidden**2 * more

    @property
    def mfu(self) -> float:
        peak = A100.device.peak_flops["bf16"] * self.layout.num_devices
        return self.flops / self.iter_s / peak

    @property
    def name(self) -> str:
        again = self.layout.recompute if self.layout.recompute == "full" else "selective"
        return f"{self.source}, {self.model.name}, {self.layout.num_devices} GPUs, {again}"


def step_of(row: dict[str, str]) -> Step:
    """Read a row. Selective recomputation repeats what a flash kernel never keeps, so its layout
    recomputes nothing here; with it went sequence parallelism."""
    gpus, hidden, tp, pp, batch, size, stages = (
        int(row[name])
        for name in ("gpus", "hidden", "tp", "pp", "global_batch", "microbatch", "stages_per_rank")
    )
    dp, is_selective = gpus // tp // pp, row["recompute"] == "selective"
    layout = Layout(
        pp=pp, dp=dp, tp=tp, zero=int(row["zero"]), sequence_parallel=is_selective,
        microbatch_size=size, num_microbatches=batch // dp // size, stages_per_rank=stages,
        schedule="none" if pp == 1 else "interleaved_1f1b" if stages > 1 else "1f1b",
        recompute="none" if is_selective else "full",
    )  # fmt: skip
    model = Model(
        name=row["model"], hidden=hidden, layers=int(row["layers"]), heads=int(row["heads"]),
        ffn=4 * hidden, max_seq_len=SEQ,
    )  # fmt: skip
    workload = Workload(global_batch_size=batch, seq_len=SEQ)
    costs = unmeasured(on_hosts(A100, gpus // A100.num_devices_per_host))
    return Step(row["source"], model, workload, layout, costs, float(row["iter_s"]))


def predicted(step: Step) -> Prediction:
    """Return what a plan by data sheet says of a step. Raises if the layout is not legal."""
    return search.given(step.model, step.workload, step.costs, step.layout).prediction


def mfu_s(step: Step, steps: Iterable[Step]) -> float:
    """Return the seconds of a step by a constant MFU: the mean of its table's other rows."""
    others = [each.mfu for each in steps if each.source == step.source and each is not step]
    return step.iter_s * step.mfu / mean(others)


class Compared(NamedTuple):
    """A published layout, our best of each of some spaces, and our best of all."""

    theirs: Candidate
    like: list[Candidate]
    best: Candidate

    def times_ours(self) -> list[float]:
        """Return the seconds of theirs over ours, of each space and of all."""
        of = [each.prediction.step_time_s for each in (*self.like, self.best)]
        return [self.theirs.prediction.step_time_s / time_s for time_s in of]


def likely(layout: Layout) -> list[Space]:
    """Return the layouts that do what a published one does: its ZeRO, recomputation, sequence
    parallelism and schedule, with any degrees and microbatches; then those that also interleave.
    ZeRO-3 was without a model cut."""
    if layout.zero:
        return [Space(pp=1, tp=1, zero=layout.zero, recompute="full")]
    own = Space(
        uniform=True, zero=0, sequence_parallel=layout.sequence_parallel,
        recompute=layout.recompute, schedule="1f1b" if layout.pp == 1 else layout.schedule,
    )  # fmt: skip
    return [own, replace(own, schedule="interleaved_1f1b")]


def compared(
    model: AnyModel,
    workload: Workload,
    costs: Costs,
    layouts: Iterable[Layout],
    spaces: Iterable[Space],
) -> Compared:
    """Compare the fastest of some published layouts with what we find in spaces and in all. A
    device has what theirs needs by our count, if that is more than it has."""
    priced = [
        Candidate(layout=each, prediction=search.given(model, workload, costs, each).prediction)
        for each in layouts
    ]
    limit = costs.cluster.usable_bytes
    fit = [each for each in priced if each.prediction.peak_memory_bytes <= limit]
    theirs = min(fit or priced, key=lambda each: each.prediction.step_time_s)
    device, more = costs.cluster.device, theirs.prediction.peak_memory_bytes - limit
    if more > 0:
        device = replace(device, memory_bytes=device.memory_bytes + math.ceil(more))
        costs = replace(costs, cluster=replace(costs.cluster, device=device))
    about, count = (model, workload, costs), theirs.layout.num_devices

    def ours(space: Space) -> Candidate:
        try:
            plan = search.find(*about, num_devices=count, top=1, within=space)
        except search.NoLayout:  # none of the space fits but theirs
            return theirs
        return Candidate(layout=plan.layout, prediction=plan.prediction)

    *like, best = [ours(space) for space in (*spaces, ANY)]
    return Compared(theirs, like, best)


def found_by_alpa() -> Iterator[
    tuple[str, tuple[AnyModel, Workload, Costs, list[Layout], list[Space]]]
]:
    """Yield the plans that Alpa's search found for p3.16xlarge, as ``compared`` takes them. A case
    that pins no batch dim does not say what its solver chose inside a mesh: any (dp, tp) may be."""
    host = store.read(Path(str(machine.shipped()["p3.16xlarge"])), Cluster)
    for family in ("gpt", "moe", "wresnet"):
        for gpus, (case,) in suites.suites()[f"{family}.perf_test_auto"].items():
            costs = unmeasured(on_hosts(host, -(-gpus // host.num_devices_per_host)))
            if alpa.dtype(case) == "fp32":
                costs = replace(costs, dtype="fp32")
            options = [alpa.layout(each, gpus) for each in _inside(case)]
            options += [replace(each, zero=3) for each in options if each.zero]
            space = Space(
                recompute="full", schedule="1f1b", num_microbatches=case.num_micro_batches
            )
            about = alpa.model(case), alpa.workload(case), costs
            yield f"{about[0].name}, {gpus} GPUs", (*about, options, [space])


def _inside(case: BenchmarkCase) -> Iterator[BenchmarkCase]:
    """Yield the case with every logical mesh of the stages that pin no batch dim; such stages of
    one size have the same."""
    args = case.parallel_args
    assert isinstance(args, LoadSolutionParallelArgs)
    stages = [
        *zip(args.submesh_logical_shapes, args.submesh_autosharding_option_dicts, strict=True)
    ]
    sizes = sorted({math.prod(shape) for shape, pinned in stages if not pinned})
    for chosen in itertools.product(*map(divisors, sizes)):
        tp = dict(zip(sizes, chosen, strict=True))
        meshes = [
            (dp, op) if pinned else (dp * op // tp[dp * op], tp[dp * op])
            for (dp, op), pinned in stages
        ]
        yield case._replace(parallel_args=args._replace(submesh_logical_shapes=meshes))


def as_run_s(step: Step, predicted: Prediction) -> dict[str, float]:
    """Return the seconds of a step as it was run, by the count that each difference is from."""
    parts = {part.name: part.value for part in predicted.time_parts}
    layout, then = step.layout, _Then(step)
    turns = layout.num_microbatches * step.model.layers // layout.pp
    waits = parts.get(BUBBLE, 0.0)
    stretch = predicted.step_time_s / (predicted.step_time_s - waits)  # with the bubble
    of_data = parts.get(WAITING, 0.0) + parts.get(SLOWED, 0.0)
    found = {
        "attention": turns * then.attention_s() * stretch,
        "dropout": turns * then.dropout_s() * stretch,
        "gradients added up": (turns * then.added_up_s() - parts[COPIES]) * stretch,
        "messages beside products": -turns * then.hidden_s() * stretch,
        "messages between stages": (then.between_s() - parts.get(TRANSFER, 0.0)) * stretch,
        "optimizer": parts[OPTIMIZER] * then.more_bytes() / OURS,
        "sums over data ranks": then.sums_s(of_data) - of_data,
    }
    return {"plan": predicted.step_time_s, **found}


class _Then:
    """Seconds of one layer and microbatch on one rank, or of a step, as systems ran it then."""

    def __init__(self, step: Step) -> None:
        self.layout, self.model = step.layout, step.model
        self.sheet = Datasheet(step.costs.cluster)
        self.is_2022 = step.source == "selective table"  # Megatron-LM 3.0
        self.passes = 2 if self.layout.recompute == "full" else 1  # forward
        self.tokens = self.layout.microbatch_size * SEQ
        self.stream_bytes = 2 * self.tokens * self.model.hidden
        self.weights = 12 * self.model.hidden**2 // self.layout.tp  # of a layer

    def s(self, ops: Iterable[Op]) -> float:
        return sum(self.sheet.time_s(op)[0] for op in ops)

    def moved_s(self, read: int, written: int) -> float:
        return self.s([Elementwise(kind="copy", read_bytes=read, write_bytes=written)])

    def attention_s(self) -> float:
        """Products, softmax and dropout as kernels that read and write all pairs of query and key,
        forward again for backward in any case; less the flash kernels that were priced."""
        heads, dim = self.model.heads // self.layout.tp, self.model.head_dim
        each = self.layout.microbatch_size * heads
        scores = Gemm(m=each * SEQ, n=SEQ, k=dim, groups=each, batched=True)
        values = Gemm(m=each * SEQ, n=dim, k=SEQ, groups=each, batched=True)
        pairs = each * SEQ**2
        softmax_s, dropout_s = (
            self.moved_s(2 * pairs, 2 * pairs),
            self.moved_s(2 * pairs, 3 * pairs),
        )
        forward_s = self.s([scores, values]) + softmax_s + dropout_s
        backward_s = self.s([scores, values, values, values])
        backward_s += self.moved_s(3 * pairs, 2 * pairs) + self.moved_s(4 * pairs, 2 * pairs)
        flash = [
            Attention(
                batch=self.layout.microbatch_size, q_len=SEQ, kv_len=SEQ, heads=heads,
                kv_heads=heads, head_dim=dim, direction=direction,
            )
            for direction in ("forward", "backward")
        ]  # fmt: skip
        priced_s = self.passes * self.s(flash[:1]) + self.s(flash[1:])
        return (2 * forward_s + backward_s - priced_s) * self.sheet.known.block.ratio

    def dropout_s(self) -> float:
        """Two dropouts of the stream: a mask of a byte more in a fused kernel, and a kernel in
        backward that reads gradient and mask."""
        elements = self.stream_bytes // 2
        if self.layout.sequence_parallel:
            elements //= self.layout.tp
        return 2 * (
            self.passes * self.moved_s(0, elements) + self.moved_s(3 * elements, 2 * elements)
        )

    def added_up_s(self) -> float:
        """In 2021 each microbatch added its gradients to those before in 16 bits; in 2022 products
        did so, within the time of their FLOPs."""
        if self.is_2022 or self.layout.num_microbatches == 1:
            return 0.0
        return self.moved_s(4 * self.weights, 2 * self.weights)

    def hidden_s(self) -> float:
        """Seconds that 2022 hid of two messages in backward, behind the weight gradients of qkv and
        up. With sequence parallelism two more gathers run behind products then."""
        if not self.is_2022:
            return 0.0
        kind = "reduce_scatter" if self.layout.sequence_parallel else "all_reduce"
        hidden, beside = self.model.hidden, self.sheet.known.beside
        message = Collective(kind=kind, size_bytes=self.stream_bytes, group_size=self.layout.tp)
        message_s, saved_s = self.s([message]), 0.0
        slows = (1 - beside.products) / beside.collective  # seconds of products a second alone
        for wide in (3, 4):
            product_s = self.s([
                Gemm(m=hidden, n=wide * hidden // self.layout.tp, k=self.tokens, trans_a=True)
            ])  # fmt: skip
            most_s = product_s * (1 - (1 - beside.collective) / beside.products)
            saved_s += min(message_s * (1 - slows), most_s)
        return saved_s - 2 * slows * message_s * self.layout.sequence_parallel

    def between_s(self) -> float:
        """Messages between stages, which nothing hid: of a slice on each tp rank, gathered by the
        receiver unless the stream is sharded. Interleaved, one exchange goes both ways."""
        layout = self.layout
        if layout.pp == 1:
            return 0.0
        sent = Collective(
            kind="send_recv", size_bytes=self.stream_bytes // layout.tp, group_size=2,
            group_stride=layout.dp * layout.tp,
        )  # fmt: skip
        gather = Collective(kind="all_gather", size_bytes=self.stream_bytes, group_size=layout.tp)
        gather_s = 0.0 if layout.sequence_parallel else self.s([gather])
        sends = layout.stages_per_rank if layout.stages_per_rank > 1 else 2
        gathers = 2 * layout.stages_per_rank
        return layout.num_microbatches * (sends * self.s([sent]) + gathers * gather_s)

    def more_bytes(self) -> int:
        """Bytes a parameter that the optimizer moved beside ours: weights copied to 16 bits (6);
        in 2021 gradients copied to 32 bits (6) and checked and unscaled (8); without a pipeline
        torch's buckets (8)."""
        return 6 if self.is_2022 else 6 + 6 + 8 + 8 * (self.layout.pp == 1)

    def sums_s(self, priced_s: float) -> float:
        """Sums of 16-bit gradients. Without a pipeline torch hid them as plans do, in half of the
        time of 32 bits; else they came last, flattened, divided and copied back."""
        layout = self.layout
        if layout.dp == 1 or layout.pp == 1:
            return priced_s / 2
        size = 2 * self.weights * self.model.layers // layout.pp
        op = Collective(
            kind="all_reduce", size_bytes=size, group_size=layout.dp, group_stride=layout.tp,
            in_place=True,
        )  # fmt: skip
        return self.s([op]) + 3 * self.moved_s(size, size)
