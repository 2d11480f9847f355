"""Ways of sharing one causal attention among ranks, against one kernel pair and four transfers.

In: this rank's rows of q, k, v and of out's gradient, [tokens / ranks, heads, head_dim], laid out
``contiguous`` (one run of the sequence; Ulysses) or ``zigzag`` (chunks r and 2n-1-r of 2n; the
others). Out: the same rows of out, dq, dk, dv. Blocks' results are merged in fp32 by log-sum-exp:
l = logaddexp(l1, l2), o = e^(l1-l) o1 + e^(l2-l) o2. A block's backward is given the merged out and
log-sum-exp, so that its gradients add up to the exact ones. On CPUs the same code runs over gloo.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwise import ranks

aten = torch.ops.aten
ALL = slice(None)


class Skip(Exception):
    """This scheme cannot run here, and why."""


# ---- kernels: forward(q, k, v, causal) -> out, lse [heads, rows]; backward -> dq, dk, dv


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).unsqueeze(0)


def tokens_first(x: Tensor) -> Tensor:
    return x.squeeze(0).transpose(0, 1)


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        *map(heads_first, (q, k, v)),
        attn_bias=None,
        compute_log_sumexp=True,
        dropout_p=0.0,
        is_causal=causal,
        return_debug_mask=False,
    )
    return tokens_first(out), lse.reshape(q.shape[1], q.shape[0])


def cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> list[Tensor]:
    # torch finds a built plan by the strides of q, k and v alone: grad, out and lse must always
    # come in the layout that goes with q's, or a plan made for other strides would read them
    grad, out = (
        x if x.stride() == q.stride() else torch.empty_like(q).copy_(x) for x in (grad, out)
    )
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    grads = aten._scaled_dot_product_cudnn_attention_backward(
        *map(heads_first, (grad, q, k, v, out)),
        logsumexp=lse.contiguous().reshape(1, *lse.shape, 1),
        philox_seed=unused,
        philox_offset=unused,
        attn_bias=None,
        cum_seq_q=None,
        cum_seq_k=None,
        max_q=q.shape[0],
        max_k=k.shape[0],
        dropout_p=0.0,
        is_causal=causal,
    )
    return [tokens_first(x) for x in grads]


def cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *map(heads_first, (q, k, v)), is_causal=causal
    )
    return tokens_first(out), lse.squeeze(0)


def cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> list[Tensor]:
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *map(heads_first, (grad, q, k, v, out)), lse.unsqueeze(0), 0.0, causal
    )
    return [tokens_first(x) for x in grads]


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, first: bool) -> None:
    """Take one block's normalised ``part`` into fp32 ``out``; ``first``: these rows are unset."""
    if first:
        out.copy_(part)
        lse.copy_(part_lse)
        return
    total = torch.logaddexp(lse, part_lse)
    kept, added = ((x - total).exp().T.unsqueeze(-1) for x in (lse, part_lse))
    out.mul_(kept).addcmul_(part, added)
    lse.copy_(total)


# ---- transfers


class Wire:
    """The transfers that schemes need, by NCCL (gloo on CPUs), and the bytes a rank received."""

    def __init__(self, here: ranks.Ranks, group: Any) -> None:
        self.rank, self.world, self.group = here.rank, here.world_size, group
        self.received_bytes, self.slots_bytes = 0, 0

    def count(self, peers: int, x: Tensor) -> None:
        self.received_bytes += peers * x.numel() * x.element_size()

    def swap(self, x: Tensor) -> Tensor:
        """[ranks, ...]: slice p goes to rank p, slice s of the result came from rank s."""
        out = x.new_empty(x.shape)
        dist.all_to_all_single(out, x.contiguous(), group=self.group)
        self.count(self.world - 1, x[0])
        return out

    def shift(self, x: Tensor) -> Tensor:
        """To the next rank, from the one before."""
        out = x.new_empty(x.shape)
        send = dist.P2POp(dist.isend, x.contiguous(), (self.rank + 1) % self.world, self.group)
        receive = dist.P2POp(dist.irecv, out, (self.rank - 1) % self.world, self.group)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        self.count(1, x)
        return out

    def gather(self, x: Tensor, into: Tensor) -> None:
        """Every rank's x, into [ranks, ...]."""
        dist.all_gather_into_tensor(into.flatten(0, 1), x.contiguous(), group=self.group)
        self.count(self.world - 1, x)

    def reduce(self, x: Tensor) -> Tensor:
        """[ranks, ...]: the sum over ranks of this rank's slice."""
        out = x.new_empty(x.shape[1:])
        dist.reduce_scatter_tensor(out, x.flatten(0, 1), group=self.group)
        self.count(self.world - 1, out)
        return out


class Pull(Wire):
    """The same by copy engines: each rank pulls from its peers' symmetric memory, without SMs.

    Two slots in turn: a rank that passes the barrier of one transfer has seen every peer finish
    reading the transfer before it, so the slot before that may be overwritten.
    """

    def __init__(self, here: ranks.Ranks, slot_bytes: int) -> None:
        if here.device.type != "cuda":
            raise Skip("symmetric memory needs GPUs")
        import torch.distributed._symmetric_memory as symmetric  # private in 2.11, and the only way

        super().__init__(here, None)
        self.slot_bytes, self.slots_bytes, self.turn = slot_bytes, 2 * slot_bytes, 0
        memory = symmetric.empty(self.slots_bytes, dtype=torch.uint8, device=here.device)
        self.memory, self.handle = memory, symmetric.rendezvous(memory, dist.group.WORLD)

    def offer(self, x: Tensor) -> Callable[[int], Tensor]:
        """Lay x out for the peers; the function that gives any rank's offer."""
        assert x.numel() * x.element_size() <= self.slot_bytes
        self.turn = 1 - self.turn
        offset = self.turn * self.slot_bytes // x.element_size()
        at = functools.partial(
            self.handle.get_buffer, sizes=x.shape, dtype=x.dtype, storage_offset=offset
        )
        at(self.rank).copy_(x)
        self.handle.barrier(channel=0, timeout_ms=20_000)
        return at

    def swap(self, x: Tensor) -> Tensor:
        at, out = self.offer(x), x.new_empty(x.shape)
        for step in range(self.world):  # each rank starts at another peer
            peer = (self.rank + step) % self.world
            out[peer].copy_(at(peer)[self.rank])
        self.count(self.world - 1, x[0])
        return out

    def shift(self, x: Tensor) -> Tensor:
        self.count(1, x)
        return x.new_empty(x.shape).copy_(self.offer(x)((self.rank - 1) % self.world))

    def gather(self, x: Tensor, into: Tensor) -> None:
        at = self.offer(x)
        for step in range(self.world):
            peer = (self.rank + step) % self.world
            into[peer].copy_(at(peer))
        self.count(self.world - 1, x)


class Lane:
    """Where transfers run: on a stream beside the computation, or in line with it.

    ``run`` starts work after all that the computation has enqueued so far; the function it returns
    makes the computation wait for the result. Tensors made on the stream may be dropped as soon as
    their last use is enqueued, because the next ``run`` waits for that use.
    """

    def __init__(self, device: torch.device, beside: bool) -> None:
        on_stream = beside and device.type == "cuda"
        self.stream = torch.cuda.Stream(device, priority=-1) if on_stream else None

    def run(self, work: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        if self.stream is None:
            result = work(*args)
            return lambda: result
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result, done = work(*args), self.stream.record_event()
        return functools.partial(self._wait, result, done, args)

    def _wait(self, result: Any, done: torch.cuda.Event, args: Any) -> Any:
        """``args`` are held until here, because the stream may still read them."""
        torch.cuda.current_stream().wait_event(done)
        return result


def pipeline(
    lane: Lane,
    groups: int,
    load: Callable[[int], Any],
    compute: Callable[[int, Any], Any],
    store: Callable[[int, Any], None],
) -> None:
    """Groups of heads in turn: loads and stores on the lane, beside other groups' computing."""
    loads = [lane.run(load, g) for g in range(groups)]
    stores = [lane.run(store, g, compute(g, loaded())) for g, loaded in enumerate(loads)]
    for stored in stores:
        stored()


# ---- schemes


class Case(NamedTuple):
    """What a scheme works on, and who it is."""

    rank: int
    world: int
    tokens: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., list[Tensor]]


class Scheme(NamedTuple):
    """``forward(q, k, v)`` gives (out, ...); ``backward(grad, that)`` gives dq, dk, dv."""

    layout: str  # contiguous, zigzag, or "" when there is nothing to compare
    forward: Callable[..., tuple[Any, ...]]
    backward: Callable[..., Sequence[Tensor]]
    wire: Wire | None = None
    arrange: Callable[[Tensor], Tensor] = lambda x: x  # to the layout that forward takes, untimed
    restore: Callable[[Tensor], Tensor] = lambda x: x


def alone(case: Case, heads_outside: bool = False) -> Scheme:
    """The floor: this rank's share of heads over the whole sequence, and no transfers."""
    own = case.heads // case.world

    def arrange(x: Tensor) -> Tensor:  # same numbers, other shape: nothing is compared
        if heads_outside:
            return x.reshape(own, case.tokens, -1).transpose(0, 1)
        return x.reshape(case.tokens, own, -1)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        out, lse = case.forward(q, k, v, True)
        return out, lse, q, k, v

    def backward(grad: Tensor, saved: tuple[Tensor, ...]) -> list[Tensor]:
        out, lse, q, k, v = saved
        return case.backward(grad, q, k, v, out, lse, True)

    return Scheme("", forward, backward, arrange=arrange)


def ulysses(case: Case, lane: Lane, wire: Wire, groups: int) -> Scheme:
    """All-to-all from rows to heads, attention over the whole sequence, all-to-all back."""

    def part(x: Tensor, g: int) -> Tensor:
        """[rows, heads, dim] as [ranks, rows, heads of group g, dim]: a view."""
        return x.unflatten(1, (case.world, groups, -1))[:, :, g].transpose(0, 1)

    def load(g: int, *xs: Tensor) -> list[Tensor]:
        return [wire.swap(part(x, g)).flatten(0, 1) for x in xs]

    def store(into: Sequence[Tensor], g: int, found: Sequence[Tensor]) -> None:
        for x, y in zip(into, found, strict=True):
            part(x, g).copy_(wire.swap(y.unflatten(0, (case.world, -1))))

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
        out, kept = torch.empty_like(q), []

        def compute(g: int, qkv: list[Tensor]) -> list[Tensor]:
            kept.append((*qkv, *case.forward(*qkv, True)))
            return [kept[g][3]]

        pipeline(lane, groups, lambda g: load(g, q, k, v), compute, functools.partial(store, [out]))
        return out, kept

    def backward(grad: Tensor, saved: tuple[Any, ...]) -> list[Tensor]:
        grads = [torch.empty_like(grad) for _ in range(3)]

        def compute(g: int, loaded: list[Tensor]) -> list[Tensor]:
            return case.backward(loaded[0], *saved[1][g], True)

        pipeline(lane, groups, lambda g: load(g, grad), compute, functools.partial(store, grads))
        return grads

    return Scheme("contiguous", forward, backward, wire)


def ring(case: Case, lane: Lane, wire: Wire, travel: torch.dtype) -> Scheme:
    """K and V go round; in the backward their gradients follow them, summed in ``travel``."""
    rank, world, chunk = case.rank, case.world, case.tokens // (2 * case.world)

    def block(i: int) -> tuple[slice, slice]:
        """Rows of q and of the k, v that came i ranks far: both zigzag, so always half a square."""
        if i == 0:
            return ALL, ALL
        return (ALL, slice(chunk)) if i <= rank else (slice(chunk, None), ALL)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        out = torch.empty_like(q, dtype=torch.float32)
        lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
        kv = torch.stack((k, v))
        for i in range(world):
            coming = lane.run(wire.shift, kv) if i + 1 < world else None
            rows, keys = block(i)
            found = case.forward(q[rows], kv[0][keys], kv[1][keys], i == 0)
            merge(out[rows], lse[:, rows], *found, first=i == 0)
            kv = coming() if coming else kv
        return out.to(q.dtype), lse, q, k, v

    def backward(grad: Tensor, saved: tuple[Tensor, ...]) -> list[Tensor]:
        out, lse, q, k, v = saved
        dq, dkv, kv, summed = None, None, torch.stack((k, v)), None
        for i in range(world):
            coming = lane.run(wire.shift, kv) if i + 1 < world else None
            rows, keys = block(i)
            ours, theirs = (x[rows] for x in (grad, q)), (x[keys] for x in kv)
            found = case.backward(*ours, *theirs, out[rows], lse[:, rows], i == 0)
            if i == 0:
                dq, dkv = found[0].float(), torch.stack(found[1:]).to(travel)
            else:
                dkv = summed()
                for x, y in zip((dq[rows], *(x[keys] for x in dkv)), found, strict=True):
                    x += y
            summed = lane.run(wire.shift, dkv)
            kv = coming() if coming else kv
        return [dq.to(q.dtype), *(x.to(q.dtype) for x in summed())]

    return Scheme("zigzag", forward, backward, wire)


def gather(case: Case, lane: Lane, wire: Wire, groups: int, travel: torch.dtype) -> Scheme:
    """Gather K and V, attend own rows to what lies before them, reduce-scatter dK and dV.

    Gathered rows lie as [late chunks by rank | early chunks by rank]: late chunk r may see the late
    chunks of higher ranks and all early ones, which is one run of rows; early chunk r the early
    chunks of lower ranks, another. No copy is made, no masked block computed.
    """
    rank, world, chunk = case.rank, case.world, case.tokens // (2 * case.world)
    halves = (slice(chunk, None), slice(chunk))  # of a rank's own rows: late, early

    def span(start: int, end: int) -> slice:
        return slice(start * chunk, end * chunk)

    late, early = halves
    blocks = [  # rows, gathered rows, causal; causal ones first: together they set each row once
        (early, span(world + rank, world + rank + 1), True),
        (late, span(rank, rank + 1), True),
        (late, span(rank + 1, 2 * world), False),
        (early, span(world, world + rank), False),
    ][: 4 if rank else 3]  # rank 0's early chunk has nothing before it

    def of(g: int, *xs: Tensor) -> list[Tensor]:
        return [x.unflatten(1, (groups, -1))[:, g] for x in xs]

    def load(g: int, k: Tensor, v: Tensor) -> list[Tensor]:
        wholes = []
        for x in of(g, k, v):
            whole = x.new_empty(2, world, chunk, *x.shape[1:])
            for half, into in zip(halves, whole, strict=True):
                wire.gather(x[half], into)
            wholes.append(whole.flatten(0, 2))
        return wholes

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)

        def compute(g: int, kv: list[Tensor]) -> None:
            (mine,), (into,) = of(g, q), of(g, out)
            mine = mine.contiguous()
            total = torch.empty_like(mine, dtype=torch.float32)
            total_lse = lse.unflatten(0, (groups, -1))[g]
            for rows, keys, causal in blocks:
                found = case.forward(mine[rows], *(x[keys] for x in kv), causal)
                merge(total[rows], total_lse[:, rows], *found, first=causal)
            into.copy_(total)

        pipeline(lane, groups, lambda g: load(g, k, v), compute, lambda g, nothing: None)
        return out, lse, q, k, v

    def backward(grad: Tensor, saved: tuple[Tensor, ...]) -> list[Tensor]:
        out, lse, q, k, v = saved
        dq, dk, dv = (torch.empty_like(q) for _ in range(3))

        def compute(g: int, kv: list[Tensor]) -> list[Tensor]:
            mine, mine_grad, mine_out = (x.contiguous() for x in of(g, q, grad, out))
            own_lse = lse.unflatten(0, (groups, -1))[g]
            total = torch.zeros_like(mine, dtype=torch.float32)
            totals = [torch.zeros_like(x, dtype=travel) for x in kv]
            for rows, keys, causal in blocks:
                ours, theirs = (x[rows] for x in (mine_grad, mine)), (x[keys] for x in kv)
                found = case.backward(*ours, *theirs, mine_out[rows], own_lse[:, rows], causal)
                for x, y in zip((total[rows], *(x[keys] for x in totals)), found, strict=True):
                    x += y
            of(g, dq)[0].copy_(total)
            return totals

        def store(g: int, totals: list[Tensor]) -> None:
            for x, into in zip(totals, of(g, dk, dv), strict=True):
                for half, part in zip(halves, x.unflatten(0, (2, world, chunk)), strict=True):
                    into[half] = wire.reduce(part)

        pipeline(lane, groups, lambda g: load(g, k, v), compute, store)
        return [dq, dk, dv]

    return Scheme("zigzag", forward, backward, wire)


def context_parallel(case: Case, stack: contextlib.ExitStack) -> Scheme:
    """The rival: torch's own, which replaces F.scaled_dot_product_attention while it is open."""
    if case.device.type != "cuda":
        raise Skip("torch's context_parallel has no kernel for CPUs")
    from torch.distributed.tensor.experimental import context_parallel as opened
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = dist.device_mesh.init_device_mesh("cuda", (case.world,))
    rows = torch.empty(1, case.tokens, device=case.device)  # it wants a buffer to cut; ours are cut
    stack.enter_context(opened(mesh, buffers=[rows], buffer_seq_dims=[1]))

    def forward(*qkv: Tensor) -> tuple[Any, ...]:
        leaves = [x.detach().requires_grad_() for x in qkv]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*leaves, is_causal=True), leaves

    def backward(grad: Tensor, saved: tuple[Any, ...]) -> Sequence[Tensor]:
        return torch.autograd.grad(saved[0], saved[1], grad)

    arrange = lambda x: heads_first(x).contiguous()  # noqa: E731
    return Scheme("zigzag", forward, backward, arrange=arrange, restore=tokens_first)
