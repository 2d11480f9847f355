"""Pulls from peers' memory, with threads for ranks: their addresses are one another's.

What CUDA does between processes (handles, devices that meet) is replaced; tests/gpu has the rest.
"""

import threading
from types import SimpleNamespace

import msgspec
import pytest
import torch

from meshwise.ranks import Ranks
from meshwise.reshard import holdings as held
from meshwise.reshard import weights
from meshwise.reshard.regions import replicated
from meshwise.reshard.transports import direct
from meshwise.reshard.transports.copies import DTYPES
from meshwise.reshard.transports.peers import Handle
from meshwise.reshard.weights import Refit, RefitError
from meshwise.spec import Decoder, WeightLayout
from tests.pace import paced

MODEL = Decoder(
    hidden=64, layers=2, heads=8, kv_heads=4, head_dim=8, ffn=160, vocab=100, max_seq_len=64
)


class Together:
    """What N threads share: a barrier, and what each said last."""

    def __init__(self, n: int) -> None:
        self.n, self.said = n, [None] * n
        self.gate = threading.Barrier(n, timeout=paced(20))

    def gather(self, rank: int, value):
        self.said[rank] = value
        self.gate.wait()
        found = list(self.said)
        self.gate.wait()
        return found


class Rank(SimpleNamespace):
    """As much of ``meshwise.ranks.Ranks`` as a refit asks for."""

    device = torch.device("cpu")

    def gather(self, value):
        told = self.threads.gather(self.rank, msgspec.json.encode(value))
        return [msgspec.json.decode(each) for each in told]

    together = Ranks.together

    def barrier(self, what=""):
        self.threads.gate.wait()

    def explain(self, error):
        return error

    def at(self, name):
        pass

    def synchronize(self, *_, **__):
        pass


class Meeting:
    def __init__(self, ranks, peers, others) -> None:
        self.ranks = ranks
        self.value, self.total = (
            torch.zeros(1, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
        )
        self.stop = torch.zeros(1, dtype=torch.int32)

    def meet(self):
        values = self.ranks.threads.gather(self.ranks.rank, int(self.value))
        self.total.fill_(sum(values))


class Peers:
    def address(self, shared):
        return shared.offset

    def close(self):
        pass

    release = close


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    monkeypatch.setattr(direct, "Meeting", Meeting)
    monkeypatch.setattr(direct, "Peers", Peers)
    monkeypatch.setattr(direct, "share", lambda tensor: Handle("", tensor.data_ptr()))


def on_threads(n: int, work) -> list:
    """``work(rank)`` on n threads; the first error is raised."""
    together, results, errors = Together(n), [None] * n, []

    def run(i: int) -> None:
        here = Rank(rank=i, world_size=n, others=[r for r in range(n) if r != i], threads=together)
        try:
            results[i] = work(here)
        except BaseException as error:  # pytest's are no Exceptions
            errors.append(error)
            if not isinstance(error, RefitError):
                together.gate.abort()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return results


def plans(n: int, source: str = "bf16", destination: str = "bf16"):
    train = WeightLayout(tp=2, dp=n // 2, order="megatron", dtype=source, vocab_multiple=16)
    serve = WeightLayout(tp=n, order="engine", dtype=destination, vocab_multiple=8)
    return held.holdings(MODEL, train), held.holdings(MODEL, serve)


def whole(plan, seed: int) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(t.shape, generator=generator).to(DTYPES[t.dtype])
        for name, t in plan.items()
    }


def own(plan, rank: int, fill: float) -> dict:
    return {
        name: torch.full(shape, fill, dtype=DTYPES[dtype])
        for name, (shape, dtype) in held.buffers(plan, rank).items()
    }


def each_piece(plan, rank: int, buffers: dict):
    """(tensor's name, its box as slices, the same place in a buffer)."""
    for name, tensor in plan.items():
        for piece in tensor.layout:
            if piece.rank == rank:
                local = piece.local(piece.box)
                at = tuple(map(slice, piece.box.low, piece.box.high))
                yield name, at, buffers[piece.buffer or name][tuple(map(slice, *local))]


def write(plan, rank: int, buffers: dict, values: dict) -> None:
    for name, at, place in each_piece(plan, rank, buffers):
        place.copy_(values[name][at])


def is_all(plan, rank: int, buffers: dict, values: dict) -> bool:
    return all(
        torch.equal(p, values[n][at].to(p.dtype)) for n, at, p in each_piece(plan, rank, buffers)
    )


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("options", [{}, {"verify": "full"}, {"verify": "off"}, {"atomic": True}])
def test_every_element_is_pulled_from_where_it_lies(n, options):
    a, b = plans(n)

    def work(here):
        source, destination = own(a, here.rank, 0.0), own(b, here.rank, -7.0)
        refit = Refit(source, a, destination, b, ranks=here, method="ipc", **options)
        for seed in (1, 2):
            write(a, here.rank, source, whole(a, seed))
            moved = refit()
            assert moved.version == seed == refit.version
            assert is_all(b, here.rank, destination, whole(a, seed))
        refit.close()
        return moved.received_bytes

    received = on_threads(n, work)
    assert sum(received) > 0


def test_only_tiles_that_changed_are_pulled():
    a, b = plans(4)

    def work(here):
        source, destination = own(a, here.rank, 0.0), own(b, here.rank, -7.0)
        values, received = whole(a, 1), []
        write(a, here.rank, source, values)
        refit = Refit(source, a, destination, b, ranks=here, method="ipc", delta=True)
        received.append(refit().received_bytes)
        received.append(refit().received_bytes)
        values["layers.1.down.weight"][:3] += 1
        write(a, here.rank, source, values)
        received.append(refit().received_bytes)
        assert is_all(b, here.rank, destination, values)
        return received

    first, again, changed = map(sum, zip(*on_threads(4, work), strict=True))
    assert first > changed > again == 0


def test_dtypes_are_converted_on_the_way():
    a, b = plans(2, "fp32", "bf16")

    def work(here):
        source, destination = own(a, here.rank, 0.0), own(b, here.rank, -7.0)
        write(a, here.rank, source, whole(a, 3))
        Refit(source, a, destination, b, ranks=here, method="ipc", convert=True, verify="full")()
        assert is_all(b, here.rank, destination, whole(a, 3))

    on_threads(2, work)


@pytest.mark.parametrize("atomic", [False, True])
def test_a_word_that_arrives_wrong_leaves_no_version_or_the_old_weights(atomic, monkeypatch):
    a, b = plans(4)

    def work(here):
        source, destination = own(a, here.rank, 0.0), own(b, here.rank, -7.0)
        write(a, here.rank, source, whole(a, 1))
        refit = Refit(source, a, destination, b, ranks=here, method="ipc", atomic=atomic)
        refit()
        stage = refit.transport.stages[0]
        write(a, here.rank, source, whole(a, 2))
        pull = stage.pull

        def careless():
            pull()
            if here.rank == 2:
                stage.received[0] += 1  # as a hash of other words would be

        monkeypatch.setattr(stage, "pull", careless)
        with pytest.raises(RefitError, match=r"rank 2: .* arrived other than sent"):
            refit()
        assert refit.version == (1 if atomic else None)
        if atomic:
            assert is_all(b, here.rank, destination, whole(a, 1))
        monkeypatch.setattr(stage, "pull", pull)
        assert refit().version == 2
        assert is_all(b, here.rank, destination, whole(a, 2))

    on_threads(4, work)


def test_a_source_that_changes_meanwhile_shows_if_memory_is_read_again():
    a, b = plans(2)

    def work(here):
        source, destination = own(a, here.rank, 0.0), own(b, here.rank, -7.0)
        refit = Refit(source, a, destination, b, ranks=here, method="ipc", verify="full")
        stage = refit.transport.stages[0]
        pull = stage.pull

        def pull_and_train():
            pull()
            here.barrier()  # all have pulled
            for tensor in source.values():
                tensor.add_(1)

        stage.pull = pull_and_train
        with pytest.raises(RefitError, match="arrived other than sent"):
            refit()
        assert refit.version is None

    on_threads(2, work)


def test_where_nothing_travels_copies_within_a_rank_are_verified_too():
    whole_model = held.holdings(MODEL, WeightLayout(dp=2, order="megatron"))
    cut = held.holdings(MODEL, WeightLayout(tp=2, order="engine"))

    def work(here):
        source, destination = own(whole_model, here.rank, 0.0), own(cut, here.rank, -7.0)
        write(whole_model, here.rank, source, whole(whole_model, 1))
        refit = Refit(
            source, whole_model, destination, cut, ranks=here, method="ipc", verify="full"
        )
        assert refit().received_bytes == 0
        assert is_all(cut, here.rank, destination, whole(whole_model, 1))
        stage = refit.transport.stages[0]
        local = stage.local

        def copy_and_spoil():
            local()
            if here.rank == 0:
                destination["model.norm.weight"][3] = 5

        stage.local = copy_and_spoil
        with pytest.raises(RefitError, match="rank 0: "):
            refit()

    on_threads(2, work)


def test_a_tensor_that_was_replaced_stops_all_ranks_before_anything_is_written():
    a, b = plans(4)

    def work(here):
        source, destination = own(a, here.rank, 0.0), own(b, here.rank, -7.0)
        write(a, here.rank, source, whole(a, 1))
        refit = Refit(source, a, destination, b, ranks=here, method="ipc")
        refit()
        write(a, here.rank, source, whole(a, 2))
        if here.rank == 3:
            source[next(iter(source))] = torch.zeros(1)
        with pytest.raises(RefitError, match=r"rank 3: source .* was replaced .* has version 1"):
            refit()
        assert is_all(b, here.rank, destination, whole(a, 1)) and refit.version == 1
        refit.close()
        with pytest.raises(RuntimeError, match="this Refit is closed; make a new Refit"):
            refit()

    on_threads(4, work)


def refused(n: int, make, match: str) -> None:
    def work(here):
        with pytest.raises(ValueError, match=match):
            make(here)

    on_threads(n, work)


def test_what_cannot_be_is_refused_by_name_on_all_ranks():
    a, b = plans(2)

    def shared(here):
        base = torch.zeros(96)
        plan = {"w": held.HeldTensor((64,), "fp32", replicated((64,), [0, 1]))}
        Refit({"w": base[:64]}, plan, {"w": base[32:]}, plan, ranks=here)

    refused(2, shared, "source w: shares memory with destination w")
    refused(
        2,
        lambda here: Refit(own(a, here.rank, 0), WeightLayout(tp=2), None, b, ranks=here),
        "not WeightLayout; of a WeightLayout make them",
    )
    refused(
        2,
        lambda here: Refit(None, {}, None, {}, ranks=here, verify="Hash"),
        "verify = 'Hash': must be one of off, hash, full",
    )
    refused(
        2,
        lambda here: Refit(None, {}, None, {}, ranks=here, cap_bytes="1GiB"),
        "cap_bytes = '1GiB': must be a number of bytes",
    )
    refused(
        2,
        lambda here: Refit(None, {}, None, {}, ranks=here, delta=here.rank == 1),
        "delta = True on rank 1, False on rank 0: give all ranks the same",
    )


def test_tables_that_do_not_fit_under_the_cap_are_refused():
    a, b = plans(2)

    def make(here):
        Refit(
            own(a, here.rank, 0), a, own(b, here.rank, 0), b, ranks=here, method="ipc", cap_bytes=64
        )

    refused(2, make, r"cap_bytes = 64: tables and hashes need \d+ bytes")


@pytest.mark.parametrize("method", ["ipc", "nvshmem"])
def test_memory_of_other_hosts_is_not_reached(method):
    class Told:
        def gather(self, value):
            return [value, "elsewhere"]

    with pytest.raises(ValueError, match=rf"^method = '{method}': .* ranks are on 2; use nccl$"):
        weights._method(method, Told())
