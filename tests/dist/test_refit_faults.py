"""Every fault of a refit: what cannot be moved is refused on all ranks alike, what arrives wrong or
not at all is an error that names rank and tensor, the destination has no version until a later
refit has repaired it, and ``atomic`` keeps the old weights to the byte.

Corrupted bytes and changing sources are made by replacing gloo's exchange in one rank. Ranks that
die, stop or do not come are processes of their own: this file started as a program is one rank.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshwise import jobs as membership
from meshwise.reshard.holdings import Tensor, holdings
from meshwise.reshard.regions import replicated, sharded
from meshwise.reshard.transports.carriers import Gloo
from meshwise.reshard.weights import Refit, RefitError
from meshwise.spec import Model, WeightLayout

pytestmark = pytest.mark.dist
ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 3.0
ROWS, COLUMNS = 5, 3  # which two ranks cannot share evenly


def value(version):
    return torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS) + 100 * version


class Pair:
    """Two tensors, ``a`` and ``b``, cut by rows on the source's side, whole on the other."""

    def __init__(self, ranks, **options):
        line = DeviceMesh("cpu", range(ranks.world_size))
        self.source = {name: distribute_tensor(value(0), line, [Shard(0)]) for name in "ab"}
        self.destination = {name: torch.full((ROWS, COLUMNS), -1.0) for name in "ab"}
        self.refit = Refit(self.source, None, self.destination, None, ranks=ranks, **options)
        self.renew(1)

    def renew(self, version):
        for tensor in self.source.values():
            whole = value(version)
            mine = distribute_tensor(whole, tensor.device_mesh, [Shard(0)]).to_local()
            tensor.to_local().copy_(mine)

    def has(self, version):
        return all(torch.equal(tensor, value(version)) for tensor in self.destination.values())


@contextlib.contextmanager
def exchanges():
    """A list; what is put in it is called with what was sent from and received into, behind each
    exchange of this rank's refits that are made inside."""
    usual, changes = Gloo._exchange, []

    def changed(carrier, source, sends, into, receives):
        usual(carrier, source, sends, into, receives)
        for change in changes:
            change(source, into)

    Gloo._exchange = changed
    try:
        yield changes
    finally:
        Gloo._exchange = usual


# What cannot be moved: (source, destination) of one rank's tensors, or plans, and what is said.


def refused(ranks, kind):
    rank, ones = ranks.rank, torch.ones
    models = {
        "shape": ({"a": ones(3, 2)}, {"a": ones(2, 3)}),
        "dtype": ({"a": ones(3)}, {"a": ones(3, dtype=torch.bfloat16)}),
        "missing": ({"layers.1": ones(3)}, {"layers.1": ones(3), "layer.1": ones(3)}),
        "overlap": ({"a": ones(3, 2)}, {"a": ones(3, 1).expand(3, 2)}),
        "ranks differ": ({"a": ones(3 + rank)}, {"a": ones(3)}),
    }
    plans = {
        "wrong world": ((5, 3), sharded((5, 3), 0, [0, 1, 2])),
        "other shape than planned": ((4, 2), replicated((4, 2), [0, 1])),
        "other dtype than planned": ((5, 3), replicated((5, 3), [0, 1])),
        "not there": ((5, 3), replicated((5, 3), [0, 1])),
        "other plans": ((5, 3), replicated((5, 3), [rank])),
    }
    source, destination = models.get(kind, ({"a": ones(5, 3)}, {"a": ones(5, 3)}))
    plan = None
    if kind in plans:
        shape, layout = plans[kind]
        plan = {"a": Tensor(shape, "fp32", layout)}
        if kind == "not there":
            destination = {"c": ones(5, 3)}
        elif kind == "other dtype than planned":
            destination = {"a": ones(5, 3).double()}
        elif kind == "other shape than planned":
            source, destination = {"a": ones(4, 2)}, {"a": ones(2, 4)}
    with pytest.raises(ValueError) as caught:
        Refit(source, None, destination, plan, ranks=ranks)
    return str(caught.value)


REFUSED = {
    "shape": ["a", "(3, 2)", "(2, 3)"],
    "dtype": ["a", "fp32", "bf16", "convert"],
    "missing": ["layer.1", "layers.1"],
    "overlap": ["a", "stride"],
    "ranks differ": ["a", "(3,)", "(4,)", "rank 0", "rank 1"],
    "wrong world": ["rank", "2"],
    "other shape than planned": ["a", "(2, 4)", "(4, 2)"],
    "other dtype than planned": ["a", "float64", "fp32"],
    "not there": ["a", "missing"],
    "other plans": ["rank 1 planned another transfer than rank 0"],
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_moved_is_refused_on_all_ranks_alike(gloo_ranks, kind):
    first, second = gloo_ranks(2, refused, kind=kind)
    assert first == second and "\n" not in first
    assert [part for part in REFUSED[kind] if part not in first] == []


def test_dims_that_a_degree_does_not_divide_are_refused_by_name():
    model = Model(hidden=24, layers=1, heads=3, ffn=40, vocab=11, max_seq_len=4)
    with pytest.raises(ValueError, match=r"tp = 2.* heads = 3"):
        holdings(model, WeightLayout(tp=2))


def spared(ranks):
    wide = torch.full((COLUMNS, ROWS), -1.0)
    models = {"a": value(1), "b": value(1), "extra": value(1)}, {"a": wide.T}
    refit = Refit(models[0], None, models[1], None, ranks=ranks)
    refit()
    narrow = {"b": torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16)}
    Refit(models[0], None, narrow, None, ranks=ranks, convert=True)()
    assert torch.equal(wide.T, value(1)) and torch.equal(narrow["b"], value(1).bfloat16())
    return list(refit.transfer.unused)


def test_other_strides_are_followed_and_what_is_not_asked_for_is_told(gloo_ranks):
    assert gloo_ranks(2, spared) == [["b", "extra"]] * 2


# What goes wrong underway, on one rank; and what the next refit makes of it.


def corrupted(ranks, verify, atomic):
    def flip(_, into):
        if into.dtype == torch.uint8 and ranks.rank == 1:
            into[5] ^= 1

    with exchanges() as changes:
        pair = Pair(ranks, verify=verify, atomic=atomic)
    pair.refit()
    assert pair.has(1) and pair.refit.version == 1
    pair.renew(2)
    changes.append(flip)
    with pytest.raises(RefitError) as caught:
        pair.refit()
    assert pair.refit.version == (1 if atomic else None)
    assert pair.has(1) == atomic and not (ranks.rank == 1 and pair.has(2))
    changes.clear()
    pair.refit()
    assert pair.has(2) and pair.refit.version == 2
    return str(caught.value)


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("verify", ["hash", "full"])
def test_a_corrupted_byte_is_found_named_and_repaired(gloo_ranks, verify, atomic):
    first, second = gloo_ranks(2, corrupted, verify=verify, atomic=atomic)
    assert first == second
    assert first.startswith("rank 1: ") and "from rank 0" in first and "rank 0: " not in first
    assert " a " in f" {first} " or " b " in f" {first} "


def mutated(ranks):
    def write(source, _):
        if source.dtype == torch.uint8 and ranks.rank == 0:
            pair.source["b"].to_local()[0, 0] += 1

    with exchanges() as changes:
        pair = Pair(ranks, verify="full")
    pair.refit()
    changes.append(write)
    with pytest.raises(RefitError) as caught:
        pair.refit()
    assert pair.refit.version is None
    changes.clear()
    pair.renew(3)
    pair.refit()
    assert pair.has(3)
    return str(caught.value)


def test_a_source_that_changes_during_the_refit_is_found_by_full_verification(gloo_ranks):
    first, second = gloo_ranks(2, mutated)
    assert first == second and "rank 1: b from rank 0" in first and "a from" not in first


def replaced(ranks, side):
    pair = Pair(ranks)
    pair.refit()
    pair.renew(2)
    model = getattr(pair, side)
    if ranks.rank == 1:
        model["b"] = model["b"].clone()
    with pytest.raises(RefitError) as caught:
        pair.refit()
    assert pair.refit.version == 1  # nothing was written
    again = Refit(pair.source, None, pair.destination, None, ranks=ranks)
    again()
    assert pair.has(2) and again.version == 1
    return str(caught.value)


@pytest.mark.parametrize("side", ["source", "destination"])
def test_storage_replaced_between_refits_is_named(gloo_ranks, side):
    first, second = gloo_ranks(2, replaced, side=side)
    assert first == second and first.startswith(f"rank 1: {side} b was replaced")


# What ranks do to themselves, each a process.


@pytest.fixture
def start():
    """``start(fault, jobs)`` starts a process a job; whatever is left of it is ended."""
    started = []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def process(job, fault):
        place = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        place |= {"CUDA_VISIBLE_DEVICES": "", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        found = subprocess.Popen(
            [sys.executable, __file__, f"127.0.0.1:{port}", job, fault],
            env=os.environ | place,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(found)
        return found

    yield process
    for process in started:
        process.kill()
        process.communicate()


JOBS = ["trainer", "server", "other"]
FAULTS = ["killed", "stopped", "never calls", "killed early", "never joins"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lost_rank_is_named_with_what_is_not_whole_and_a_new_one_repairs(start, fault):
    faulty = start("server", fault)
    others = [start(job, "") for job in ("trainer", "other")]
    for process in others:
        lost = json.loads(process.stdout.readline())
        assert lost["error"] in ("TimeoutError", "RuntimeError")
        assert "server rank 0 (" in lost["said"]
        assert not any(f"{job} rank 0 (" in lost["said"] for job in ("trainer", "other"))
        assert lost["version"] is None
        if fault in ("killed", "stopped", "never calls"):
            assert lost["said"].endswith("not whole here: a")
    faulty.kill()
    again = start("server", "comes again")
    for process in (*others, again):
        assert json.loads(process.stdout.readline()) == {"version": 1, "whole": True}


def _rank(address, job, fault):
    """All hold a part of ``a``, the trainer all of ``b``; both are gathered in each."""
    joined = membership.join_at(address, job, JOBS, timeout_s=TIMEOUT_S)
    n, shape = joined.world_size, (ROWS, COLUMNS)
    parts = value(1).tensor_split(n)
    cut = sharded(shape, 0, range(n), sizes=[len(part) for part in parts])
    plans = [
        {name: Tensor(shape, "fp32", layout) for name, layout in zip("ab", layouts, strict=True)}
        for layouts in ((cut, replicated(shape, [0])), [replicated(shape, range(n))] * 2)
    ]
    source = {"a": parts[joined.rank].clone(), "b": value(1)}
    destination = {name: torch.full(shape, -1.0) for name in "ab"}
    refit, changes = None, []

    def made():
        return Refit(source, plans[0], destination, plans[1], ranks=joined)

    try:
        if fault == "never joins":
            signal.pause()
        if fault == "killed early":
            os.kill(os.getpid(), signal.SIGKILL)
        with exchanges() as changes:
            refit = made()
        if fault == "comes again":
            raise TimeoutError
        refit()
        if fault == "never calls":
            signal.pause()
        if fault in ("killed", "stopped"):
            number = signal.SIGKILL if fault == "killed" else signal.SIGSTOP
            changes.append(lambda *_: os.kill(os.getpid(), number))
        refit()
    except (TimeoutError, RuntimeError) as error:
        if fault != "comes again":
            said = {"error": type(error).__name__, "said": str(error)}
            print(json.dumps(said | {"version": refit and refit.version}), flush=True)
            for tensor in destination.values():
                tensor.fill_(-1.0)
            joined = membership.join_at(address, job, JOBS, timeout_s=TIMEOUT_S)
            refit = made()
    refit()
    whole = all(torch.equal(tensor, value(1)) for tensor in destination.values())
    print(json.dumps({"version": refit.version, "whole": whole}), flush=True)
    joined.leave()


if __name__ == "__main__":
    _rank(*sys.argv[1:])
    os._exit(0)
