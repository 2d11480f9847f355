"""The timing loop, alone and on three ranks.

Each rank runs this file as ``python -m tests.dist.test_timing <request.json>``.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from meshwise import ranks as ranks_module
from meshwise import timing
from meshwise.launch import local, order, worker
from meshwise.ranks import Ranks
from meshwise.spec import Record

HERE = "tests.dist.test_timing"
pytestmark = pytest.mark.dist
ALONE = ranks_module.alone()
EMPTY: dict[str, Any] = {"sm_clock_mhz": None, "power_w": None}


class Request(Record, kw_only=True):
    folder: str


def measured(ranks: Ranks, request: bytes) -> None:
    """Every measurement of this file that needs several ranks, in one job."""
    found: dict[str, Any] = {}
    uneven = timing.measure(
        [lambda: time.sleep(0.002 * (1 + ranks.rank))],
        ranks=ranks,
        regime="warm",
        distributed=False,
        max_iterations=8,
        relative_interval=0.0,
    )
    found["uneven"] = uneven._asdict()
    buffer = torch.ones(256)
    reduce = timing.measure(
        [lambda: dist.all_reduce(buffer)],
        ranks=ranks,
        regime="cold",
        distributed=True,
        max_seconds=0.2,
        max_iterations=30,
        relative_interval=1e-6,
    )
    found["reduce"] = reduce._asdict()

    def too_large() -> None:
        if ranks.rank == 2:
            torch.empty(10**15)

    try:
        timing.measure([too_large], ranks=ranks, regime="warm", distributed=False)
    except torch.OutOfMemoryError as error:
        found["oom"] = str(error)
    everyone = ranks.gather(found)
    if ranks.rank == 0:
        folder = Path(msgspec.json.decode(request, type=Request).folder)
        (folder / "found.json").write_bytes(msgspec.json.encode(everyone))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("timing")
    told = order.WorkOrder(
        target=f"{HERE}:measured",
        request=msgspec.Raw(msgspec.json.encode(Request(folder=str(folder)))),
        threads=1,
    )
    local.start(told, 3, worker=("-m", HERE))
    everyone: list[dict[str, Any]] = msgspec.json.decode((folder / "found.json").read_bytes())
    return everyone


def test_times_are_the_largest_over_ranks_and_alike_on_all(found: list[dict[str, Any]]) -> None:
    for name in ("uneven", "reduce"):
        mine = found[0][name]
        assert all(other[name] == mine for other in found)
        assert [max(iteration) for iteration in zip(*mine["rank_times_s"], strict=True)] == (
            mine["times_s"]
        )
        assert [state["rank"] for state in mine["before"]] == [0, 1, 2]
        assert mine["after"][0]["power_w"] is None  # a CPU has no such reading
    uneven = found[0]["uneven"]
    assert len(uneven["times_s"]) == 8
    for rank, own in enumerate(uneven["rank_times_s"]):
        assert all(t >= 0.002 * (1 + rank) for t in own)


def test_memory_that_runs_out_on_one_rank_is_raised_on_all(found: list[dict[str, Any]]) -> None:
    for mine in found:
        assert mine["oom"].startswith("rank 2: ")


def test_warm_repeats_one_call_and_cold_rotates_all() -> None:
    for regime, used in (("warm", {"a"}), ("cold", {"a", "b"})):
        seen: list[str] = []
        prepared: list[int] = []
        timed = timing.measure(
            [lambda seen=seen: seen.append("a"), lambda seen=seen: seen.append("b")],
            ranks=ALONE,
            regime=regime,
            distributed=False,
            max_iterations=6,
            relative_interval=0.0,
            prepare=lambda seen=seen, prepared=prepared: prepared.append(len(seen)),
        )
        assert len(timed.times_s) == 6
        assert timed.rank_times_s == (timed.times_s,)
        assert set(seen) == used
        assert prepared == list(range(len(seen)))  # once before each call, untimed ones too


def test_an_iteration_is_not_charged_for_its_preparation() -> None:
    timed = timing.measure(
        [lambda: None],
        ranks=ALONE,
        regime="warm",
        distributed=False,
        max_iterations=5,
        prepare=lambda: time.sleep(0.01),
    )
    assert max(timed.times_s) < 0.01


def test_a_regime_that_cannot_be_is_refused() -> None:
    rest: Any = {"ranks": ALONE, "distributed": False}
    with pytest.raises(ValueError, match="regime = 'graph': needs a CUDA device"):
        timing.measure([lambda: None], regime="graph", **rest)
    with pytest.raises(ValueError, match="regime = 'hot': must be one of cold, warm, graph"):
        timing.measure([lambda: None], regime="hot", **rest)


@pytest.fixture
def tick(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """The host's clock stands still but for ``tick(seconds)``."""
    now = [100.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def tick(seconds: float) -> None:
        now[0] += seconds

    return tick


def test_pipelined_calls_share_the_time_of_their_batch(tick: Callable[[float], None]) -> None:
    calls = []

    def call() -> None:
        calls.append(0)
        tick(0.019 if len(calls) % 20 == 1 else 0.001)  # what the first waits for, all share

    timed = timing.measure(
        [call], ranks=ALONE, regime="pipelined", distributed=True, batch=20, max_iterations=7,
        relative_interval=-1.0,
    )  # fmt: skip
    assert timed.times_s == pytest.approx([0.038 / 20] * 7)
    assert len(calls) % 20 == 0 and len(calls) >= 7 * 20


def test_a_blocking_call_lasts_until_the_device_is_done(
    tick: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def synchronize(_: Ranks, what: str, *__: object, poll_s: float = 1.0) -> None:
        if what == "a call":
            assert poll_s == 0  # a pause would be in the time
            tick(0.005)

    monkeypatch.setattr(Ranks, "synchronize", synchronize)
    options: Any = {"ranks": ALONE, "distributed": True, "max_iterations": 5}
    blocking = timing.measure([lambda: tick(0.001)], regime="blocking", **options)
    warm = timing.measure([lambda: tick(0.001)], regime="warm", **options)
    assert blocking.times_s == pytest.approx([0.006] * 5)
    assert warm.times_s == pytest.approx([0.001] * 5)


def test_sustained_work_has_no_pause_and_lasts_as_long_as_asked(
    tick: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of a tenth of a second, each timed whole; what the device says is kept if it says."""
    calls: list[int] = []
    said = iter([{"sm_clock_mhz": 1980 - i, "power_w": 600.5 + i} for i in range(99)])
    states = {"known": lambda _: {"rank": 0, **next(said)}, "unknown": lambda _: {"rank": 0}}

    def call() -> None:
        calls.append(0)
        tick(1 / 64)

    for known, state in states.items():
        calls.clear()
        monkeypatch.setattr(timing.provenance, "device_state", lambda r, s=state: EMPTY | s(r))
        timed = timing.measure(
            [call, pytest.fail], ranks=ALONE, regime="sustained", distributed=False,
            max_seconds=120 / 64,
        )  # fmt: skip
        assert timed.times_s == (1 / 64,) * 20
        assert len(calls) == 3 + 20 * 6  # a warm-up, then chunks of 6/64 s
        assert timed.rank_times_s == (timed.times_s,)
        metrics = {
            "sm_clock_mhz": tuple(1979.0 - i for i in range(20)),  # the first was before
            "power_w": tuple(601.5 + i for i in range(20)),
        }
        assert timed.metrics == (metrics if known == "known" else {})


def test_a_long_call_is_sustained_twice_at_least(tick: Callable[[float], None]) -> None:
    timed = timing.measure(
        [lambda: tick(30.0)], ranks=ALONE, regime="sustained", distributed=False, max_seconds=10.0
    )
    assert timed.times_s == (30.0, 30.0)


def test_over_the_ranks_the_lowest_clock_and_the_highest_power_count() -> None:
    one = [{"sm_clock_mhz": 1900, "power_w": 500.0}, {"sm_clock_mhz": 1800, "power_w": None}]
    two = [{"sm_clock_mhz": 1950, "power_w": 700.0}, {"sm_clock_mhz": 1700, "power_w": 650.0}]
    assert timing._extremes([one, two]) == {"sm_clock_mhz": (1900.0, 1700.0)}
    one[1]["power_w"] = 690.0
    assert timing._extremes([one, two])["power_w"] == (700.0, 690.0)


def test_a_narrow_interval_does_not_end_before_the_fewest_iterations(
    tick: Callable[[float], None],
) -> None:
    for fewest, timed in ((1, 5), (20, 20), (100, 30)):
        found = timing.measure(
            [lambda: tick(1e-3)], ranks=ALONE, regime="warm", distributed=False,
            max_iterations=30, min_iterations=fewest,
        )  # fmt: skip
        assert len(found.times_s) in range(timed, timed + 10) and len(found.times_s) <= 30
    stop = timing.Stop(
        max_iterations=100, max_seconds=1.0, relative_interval=0.02, min_iterations=20
    )
    assert stop.next_chunk([1e-3] * 19, 0.02) == 10
    assert stop.next_chunk([1e-3] * 20, 0.02) == 0
    assert stop.next_chunk([0.3] * 5, 1.5) == 0  # but the time that it may take is a limit


@pytest.mark.parametrize(
    ("times_s", "elapsed_s", "size"),
    [
        ([], 0.0, 2),
        ([0.1, 0.1], 0.2, 3),  # five at least
        ([3.0, 3.1], 6.1, 0),  # but two when one is longer than the allowance
        ([0.1] * 5, 0.5, 0),  # narrow enough
        ([0.1, 0.2, 0.1, 0.2, 0.1], 0.7, 3),  # as many as the rest of the second affords
        ([0.1, 0.2, 0.1, 0.2, 0.1], 1.1, 0),  # the second is over
        ([1e-5, 2e-5] * 20, 0.1, 10),  # one chunk
        ([1e-5, 2e-5] * 49, 0.1, 2),  # never more than max_iterations
    ],
)
def test_when_to_stop(times_s: list[float], elapsed_s: float, size: int) -> None:
    stop = timing.Stop(max_iterations=100, max_seconds=1.0, relative_interval=0.02)
    assert stop.next_chunk(times_s, elapsed_s) == size


def test_random_numbers_are_normal_and_repeat() -> None:
    first = timing.randn((400, 500), torch.float32, "cpu", seed=7)
    assert torch.equal(first, timing.randn((400, 500), torch.float32, "cpu", seed=7))
    assert not torch.equal(first, timing.randn((400, 500), torch.float32, "cpu", seed=8))
    assert abs(first.mean().item()) < 0.01 and abs(first.std().item() - 1) < 0.01
    assert timing.randn((8,), torch.float8_e4m3fn, "cpu").dtype == torch.float8_e4m3fn


if __name__ == "__main__":
    worker.main(*sys.argv[1:], package="tests")
