"""Every fault of a refit: what cannot be moved is refused on all ranks alike, what arrives wrong or
not at all is an error that names rank and tensor, the destination has no version until a later
refit has repaired it, and ``atomic`` keeps the old weights to the byte.

Corrupted bytes and changing sources are made by replacing gloo's exchange in one rank. Ranks that
die, stop or do not come are processes of their own: this file started as a program is one rank.
"""

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshwise import jobs as membership
from meshwise.reshard import live
from meshwise.reshard.holdings import HeldTensor, holdings
from meshwise.reshard.regions import replicated, sharded
from meshwise.reshard.transports.carriers import Gloo
from meshwise.reshard.weights import Refit, RefitError
from meshwise.spec import Model, WeightLayout
from tests.pace import paced

pytestmark = pytest.mark.dist
ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = paced(3.0)
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
    rank, ones, wide, one = ranks.rank, torch.ones, torch.ones(4, 5), torch.ones(5, 3)
    models = {
        "rows twice": ({"a": ones(2, 5), "b": ones(3, 5)}, {"a": wide[:2], "b": wide[1:]}),
        "columns twice": ({"a": ones(4, 2), "b": ones(4, 4)}, {"a": wide[:, :2], "b": wide[:, 1:]}),
        "source below": ({"a": wide[:, :2]}, {"a": wide[:, 1:3]}),
        "folded": ({"a": ones(3, 3)}, {"a": ones(9).as_strided((3, 3), (2, 1))}),
        "tied here only": ({"a": ones(5, 3), "b": ones(5, 3)}, {"a": one, "b": one}),
        "bare list": ([ones(5, 3)], {"a": ones(5, 3)}),
        "rounded integers": ({"a": ones(3, dtype=torch.int64)}, {"a": ones(3)}),
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
    plan, options = None, {"convert": kind == "rounded integers"}
    if kind == "tied, planned apart":
        source, destination = models["tied here only"]
        plan = {name: HeldTensor((5, 3), "fp32", replicated((5, 3), [0, 1])) for name in "ab"}
    elif kind == "half of what is tied":
        source, destination = (dict.fromkeys("ab", one) for _ in "12")
        options = {"only": ["b"]}
    elif kind == "within itself":  # the halves change places where they lie
        halves = {n: ones(2, 3) for n in "a"}
        source, destination = halves, halves
        plan = {"a": HeldTensor((4, 3), "fp32", sharded((4, 3), 0, [1, 0]))}
        options["source_plan"] = {"a": HeldTensor((4, 3), "fp32", sharded((4, 3), 0, [0, 1]))}
    elif kind == "planned otherwise than placed":
        line = DeviceMesh("cpu", [0, 1])
        destination = {"a": distribute_tensor(ones(4, 3), line, [Shard(0)])}
        source, plan = (
            {"a": ones(4, 3)},
            {"a": HeldTensor((4, 3), "fp32", sharded((4, 3), 0, [1, 0]))},
        )
    elif kind in plans:
        shape, layout = plans[kind]
        plan = {"a": HeldTensor(shape, "fp32", layout)}
        if kind == "not there":
            destination = {"c": ones(5, 3)}
        elif kind == "other dtype than planned":
            destination = {"a": ones(5, 3).double()}
        elif kind == "other shape than planned":
            source, destination = {"a": ones(4, 2)}, {"a": ones(2, 4)}
    with pytest.raises(ValueError) as caught:
        Refit(source, options.pop("source_plan", None), destination, plan, ranks=ranks, **options)
    return str(caught.value)


REFUSED = {
    "rows twice": ["destination a", "shares memory with destination b", "each its own"],
    "columns twice": ["destination a", "shares memory with destination b"],
    "source below": ["source a", "shares memory with destination a"],
    "folded": ["a is strided by (2, 1) in shape (3, 3)", "copy"],
    "tied here only": ["destination b: is one tensor with a, but the source has two", "untie"],
    "tied, planned apart": ["destination a: shares memory with destination b", "tie both"],
    "half of what is tied": ["destination b: is one tensor with a, which only = ['b'] leaves out"],
    "within itself": ["source a: shares memory with destination a, which holds something else"],
    "planned otherwise than placed": ["destination a", "(Shard(dim=0),)", "None for the plan"],
    "bare list": ["a module or tensors by name, not list"],
    "rounded integers": ["a: dtype int64 in the source, fp32", "convert=True is for bf16"],
    "shape": ["a", "(3, 2)", "(2, 3)"],
    "dtype": ["a", "fp32", "bf16", "convert"],
    "missing": ["layer.1", "layers.1"],
    "overlap": ["a", "stride"],
    "ranks differ": ["a", "(3,)", "(4,)", "rank 0", "rank 1"],
    "wrong world": ["rank", "2"],
    "other shape than planned": ["a", "(2, 4)", "(4, 2)"],
    "other dtype than planned": ["a", "float64", "fp32"],
    "not there": ["a", "missing"],
    "other plans": ["the plan = ", "on rank 1"],
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


def in_shared_memory(ranks):
    """Columns of one matrix, tied weights on either side, weights that both models are."""
    wide, frozen, first = torch.full((ROWS, 2 * COLUMNS), -1.0), value(7), value(2)
    other = value(3)
    source = {"left": value(0), "right": value(1), "in": first, "out": first, "frozen": frozen}
    untied = {"in": torch.zeros(ROWS, COLUMNS), "out": torch.zeros(ROWS, COLUMNS)}
    columns = {"left": wide[:, :COLUMNS], "right": wide[:, COLUMNS:], "frozen": frozen}
    tied = dict.fromkeys(("in", "out"), torch.zeros(ROWS, COLUMNS))
    for destination in (columns | untied, columns | tied):
        refit = Refit(source, None, destination, None, ranks=ranks, verify="full_tensor")
        first.copy_(other)
        refit()
        assert torch.equal(wide, torch.cat([value(0), value(1)], 1))
        assert torch.equal(destination["in"], other) and torch.equal(destination["out"], other)
        assert torch.equal(frozen, value(7))
        refit.close()
    return True


def test_memory_that_is_shared_as_meant_is_right(gloo_ranks):
    assert gloo_ranks(2, in_shared_memory) == [True] * 2


# Torch's own full_tensor as the judge.


@contextlib.contextmanager
def wrong_belief():
    """Shards are taken for those of the ranks in reverse, as if a mesh were the other way round."""
    usual = live._cut
    live._cut = lambda runs, parts: usual(runs, parts)[::-1]
    try:
        yield
    finally:
        live._cut = usual


def judged(ranks, options):
    """A planner that is wrong about the layout; a correct one; plain weights that differ."""
    said = {}
    for verify in ("full", "full_tensor"):
        with wrong_belief():
            line = DeviceMesh("cpu", range(2))
            source = {"w": distribute_tensor(value(1)[:4], line, [Shard(0)]), "b": value(2)}
            whole = {"w": torch.zeros(4, COLUMNS), "b": torch.zeros(ROWS, COLUMNS)}
            refit = Refit(source, None, whole, None, ranks=ranks, verify=verify, **options)
        try:
            refit()
            assert not torch.equal(whole["w"], value(1)[:4])  # silently wrong
        except RefitError as error:
            said[verify] = str(error)
            assert refit.version is None
            with pytest.raises(RefitError):  # what was wrong is not taken for sent
                refit()
        refit.close()
    right = Refit(source, None, whole, None, ranks=ranks, verify="full_tensor", **options)
    for version in (1, 2):
        assert right().version == version
        assert torch.equal(whole["w"], source["w"].full_tensor())
        source["w"].to_local().add_(1)
    if ranks.rank == 1:  # a tensor that is cut without DTensor, or a replica that is not one
        source["b"].add_(1)
    with pytest.raises(RefitError) as caught:
        right()
    assert right.version is None
    right.close()
    return [*said.values(), str(caught.value)]


@pytest.mark.parametrize("options", [{}, {"delta": True}])
def test_torchs_own_full_tensor_finds_what_the_planner_believes_wrongly(gloo_ranks, options):
    first, second = gloo_ranks(2, judged, options=options)
    assert first == second == [
        "by torch's full_tensor w: the destination on rank 0 is not the source on rank 0, w: the "
        "destination on rank 1 is not the source on rank 0; the destination has no version",
        "by torch's full_tensor b: the source on rank 1 is not the source on rank 0, b: the "
        "destination on rank 1 is not the source on rank 0; the destination has no version",
    ]  # fmt: skip


def judged_dtypes(ranks):
    """Every dtype, and dtypes that change, gathered by torch and hashed."""
    line = DeviceMesh("cpu", range(2))
    bits = torch.randint(0, 256, (7, 16), dtype=torch.uint8, generator=torch.manual_seed(1))
    kinds = [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.uint8]
    whole = {str(kind): bits.view(kind) for kind in kinds} | {"bool": bits > 99}
    cut = {name: DTensor.from_local(
        w.view(torch.uint8)[:4] if ranks.rank == 0 else w.view(torch.uint8)[4:], line, [Shard(0)],
        shape=w.view(torch.uint8).shape, stride=w.view(torch.uint8).stride(),
    ) for name, w in whole.items()}  # fmt: skip
    cut = {name: DTensor.from_local(
        t.to_local().view(whole[name].dtype), line, [Shard(0)], shape=whole[name].shape,
        stride=whole[name].stride(),
    ) for name, t in cut.items()}  # fmt: skip
    back = {name: torch.zeros_like(w) for name, w in whole.items()}
    Refit(cut, None, back, None, ranks=ranks, verify="full_tensor")()
    for name, tensor in back.items():
        assert torch.equal(tensor.view(torch.uint8), whole[name].view(torch.uint8)), name
    names = [str(kind) for kind in kinds[:2]]
    narrow = {name: torch.zeros_like(whole[name], dtype=torch.float16) for name in names}
    Refit({name: cut[name] for name in names}, None, narrow, None, ranks=ranks, convert=True,
          verify="full_tensor")()  # fmt: skip
    return True


def test_torch_gathers_every_dtype(gloo_ranks):
    assert gloo_ranks(2, judged_dtypes) == [True] * 2


def empty_part():
    """FSDP2 over tensor parallelism that has one column for two ranks."""
    mesh = made_mesh()
    layer = nn.Module()
    layer.w = nn.Parameter(distribute_tensor(value(1)[:4, :1].contiguous(), mesh["tp"], [Shard(1)]))
    fully_shard(layer, mesh=mesh["dp"])
    return {"w": layer.w}


@functools.cache
def made_mesh():
    return DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "tp"))


def not_judged(ranks):
    """What torch cannot gather is refused before anything moves, on all ranks."""
    line = DeviceMesh("cpu", range(2))
    cut = {"w": distribute_tensor(value(1)[:4], line, [Shard(0)])}
    plan = {"w": HeldTensor((4, COLUMNS), "fp32", sharded((4, COLUMNS), 0, [0, 1]))}
    copies = {"w": distribute_tensor(value(1)[:4], line, [Replicate()])}
    said = []
    for source, source_plan, columns, options in [
        ({"w": cut["w"].to_local()}, plan, COLUMNS, {}),
        (copies if ranks.rank == 0 else None, None, COLUMNS, {}),
        (cut, None, COLUMNS, {"atomic": True}),
        (empty_part(), None, 1, {}),
    ]:
        whole = {"w": torch.zeros(4, columns)}
        with pytest.raises(ValueError) as caught:
            Refit(source, source_plan, whole, None, ranks=ranks, verify="full_tensor", **options)
        said.append(str(caught.value))
    return said


def test_what_torch_cannot_gather_is_refused_by_name(gloo_ranks):
    first, second = gloo_ranks(2, not_judged)
    assert first == second == [
        "verify = 'full_tensor', use 'full': source w is (2, 3) of (4, 3) and no DTensor",
        "rank 0: verify = 'full_tensor', use 'full': source w is not on all 2 ranks of its mesh",
        "verify = 'full_tensor': compares what is served; needs atomic = False",
        "rank 1: verify = 'full_tensor', use 'full': source w has (0, 0) on this rank, its mesh "
        "says (4, 0)",
    ]  # fmt: skip


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
        place |= {"MESHWISE_SECRET": "only they know these 32 characters"}
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
        {
            name: HeldTensor(shape, "fp32", layout)
            for name, layout in zip("ab", layouts, strict=True)
        }
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
