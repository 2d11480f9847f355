"""Case lists, who is called slow, and how often wrongly: by hand counts and simulated machines."""

import io
import itertools
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from meshwise.options.measure import HealthOptions
from meshwise.pages import health, outliers, table
from meshwise.pages.health import findings, verdict
from meshwise.probe.cases import health as cases
from meshwise.probe.cases.scope import Scope
from meshwise.spec import (
    Case,
    Cluster,
    Collective,
    DeviceState,
    Elementwise,
    Gemm,
    RunInfo,
    Sample,
    Tier,
)
from tests import sample_records as known

CPU_RUNS = Path(__file__).parents[1] / "data" / "health" / "gloo_4_ranks_2_cores.json"
MiB = 2**20


def host(gpus: int, hosts: int = 1) -> Cluster:
    """H200-like: 1 PFLOP/s, 4 TB/s, 450 GB/s through a switch, 50 GB/s between hosts."""
    tiers = [Tier(name="nvlink", num_devices=gpus, bytes_per_s=450e9)]
    if hosts > 1:
        tiers.append(Tier(name="network", num_devices=gpus * hosts, bytes_per_s=50e9))
    return msgspec.structs.replace(
        known.CLUSTER, num_devices_per_host=gpus, num_hosts=hosts, tiers=tuple(tiers)
    )


def info(cluster: Cluster, **changes) -> RunInfo:
    found = msgspec.structs.replace(known.info(), cluster=cluster, world_size=cluster.num_devices)
    return msgspec.structs.replace(found, **changes)


def of_cases(cluster: Cluster, **options) -> list[Case]:
    return cases.cases(Scope(cluster, cluster.num_devices, "bf16"), HealthOptions(**options))


class Machine:
    """Draws health runs of a machine whose chips differ and whose iterations are noisy.

    ``gpu_factor[rank]`` and ``pair_factor[a, b]`` multiply times: the faults.
    """

    def __init__(self, gpus: int, seed: int) -> None:
        self.cluster = host(gpus)
        self.info = info(self.cluster)
        self.rng = np.random.default_rng(seed)
        self.chip = 1 + 0.02 * self.rng.standard_normal(gpus)  # sigma 2 %, as long as it lives
        self.jitter = np.full(gpus, 0.01)  # sigma of iterations
        self.gpu_factor = np.ones(gpus)
        self.host_factor = np.ones(gpus)
        self.pair_factor: dict[tuple[int, ...], float] = {}
        self.throttle: dict[int, tuple[str, ...]] = {}

    def run(self) -> list[Sample]:
        return [self.sample(case) for case in of_cases(self.cluster)]

    def sample(self, case: Case) -> Sample:
        ranks = self.middle_s(case)
        noise = self.jitter[:, None] * self.rng.standard_normal((len(ranks), 20))
        times = ranks[:, None] * (1 + noise)
        states = tuple(
            DeviceState(rank=rank, sm_clock_mhz=1900, throttle=self.throttle.get(rank, ()))
            for rank in range(len(ranks))
        )
        return Sample(
            case_id=case.id,
            case=case,
            status="ok",
            times_s=tuple(times.max(axis=0).tolist()),
            rank_times_s=tuple(tuple(own) for own in times.tolist()),
            after=states,
        )

    def middle_s(self, case: Case) -> np.ndarray:
        op, n = case.op, self.cluster.num_devices
        drift = 1 + 0.004 * self.rng.standard_normal(n)  # from run to run
        if isinstance(op, Gemm):
            rate = 700e12 if case.regime == "sustained" else 795e12
            return op.flops / rate * self.chip * self.gpu_factor * drift
        if isinstance(op, Elementwise) and op.kind == "copy":
            return op.bytes / 3.4e12 * drift * self.gpu_factor
        if isinstance(op, Elementwise):
            far = 1 + 0.3 * (np.arange(n) >= n // 2)  # the other socket
            return op.read_bytes / 55e9 * far * drift * self.host_factor
        assert isinstance(op, Collective)
        if op.kind == "send":
            rate = self.rng.uniform(366e9, 394e9) / self.pair_factor.get(op.ranks, 1.0)
            times = np.full(n, 2e-6)
            times[list(op.ranks)] = op.size_bytes / rate
            return times
        launch_s = 25e-6 * (1 + 0.05 * self.rng.standard_normal())
        return np.full(n, launch_s + op.bytes / 340e9 * drift[0])


def faults(found: list[health.HealthFinding]) -> list[tuple[str, str]]:
    return [(finding.what, finding.where) for finding in found if finding.severity == "fault"]


def test_a_wrong_result_is_a_fault_of_its_own():
    machine = Machine(4, seed=1)
    *samples, last = machine.run()
    assert faults(findings(machine.info, [*samples, last])) == []
    wrong = Sample(
        case_id=last.case_id, case=last.case, status="error",
        reason="wrong elements: 7 on rank 2", metrics={"wrong": 7.0},
    )  # fmt: skip
    found = findings(machine.info, [*samples, wrong])
    assert [(one.what, one.severity) for one in found] == [("wrong result", "fault")]
    assert "wrong elements: 7 on rank 2" in found[0].evidence
    assert verdict(found) == "1 fault"


# ---- which cases


def test_a_host_of_four_gpus_has_twenty_one_cases_none_twice():
    found = of_cases(host(4))
    assert len({case.id for case in found}) == len(found) == 2 + 3 + 4 + 4 * 3
    pairs = [c.op.ranks for c in found if isinstance(c.op, Collective) and c.op.kind == "send"]
    assert set(pairs) == {(a, b) for a in range(4) for b in range(4) if a != b}
    assert all(case.world_size == 4 for case in found)


def test_quick_keeps_the_ring_of_neighbours_and_drops_the_long_product():
    found = of_cases(host(4), quick=True)
    assert {case.regime for case in found} == {"warm"}
    pairs = {c.op.ranks for c in found if isinstance(c.op, Collective) and c.op.kind == "send"}
    ring = {(0, 1), (1, 2), (2, 3), (0, 3)}
    assert pairs == ring | {(b, a) for a, b in ring}


def test_pairs_of_two_hosts_are_of_equal_place():
    found = of_cases(host(2, hosts=2))
    pairs = {c.op.ranks for c in found if isinstance(c.op, Collective) and c.op.kind == "send"}
    there = {(0, 1), (2, 3), (0, 2), (1, 3)}
    assert pairs == there | {(b, a) for a, b in there}


def test_one_device_has_no_collectives_and_a_cpu_no_copies_from_the_host():
    alone = of_cases(host(1))
    assert not any(isinstance(case.op, Collective) for case in alone)
    on_cpu = cases.cases(Scope(known.CPUS, 2, "fp32"), HealthOptions())
    kinds = {c.op.kind for c in on_cpu if isinstance(c.op, Elementwise | Collective)}
    assert kinds == {"copy", "all_reduce", "all_gather", "send_recv", "send"}


def test_sizes_divide_among_three_ranks():
    for case in of_cases(host(3)):
        if isinstance(case.op, Collective) and case.op.kind != "send":
            assert case.op.size_bytes % (3 * 2) == 0


# ---- the rule


def test_quarters_follow_the_order_of_measurement():
    assert outliers.quarters([1, 2, 3, 4, 5, 6, 7, 8]) == [1.5, 3.5, 5.5, 7.5]
    assert outliers.quarters([3, 5]) == [3, 3, 5, 5]


def test_six_robust_sigma_by_hand():
    # deviations of eight quarters from 100: 0 0 1 1 1 1 2 2 %; their median 1 %, sigma 1.4826 %
    noisy = [100.0, 100.0, 99.0, 101.0, 99.0, 101.0, 98.0, 102.0]
    assert outliers.scatter(np.array([noisy])) == pytest.approx(0.014826)
    series = {"a": [100.0] * 4, "b": [98.0] * 4, "c": [102.0] * 4, "d": [115.0] * 4}
    # a, b, c about 100: |deviations| 0, 2, 2 %; limit 6 x 1.4826 x 2 % = 17.8 % > 15 %
    assert outliers.than_peers(series, 0.08) == {}
    found = outliers.than_peers(series | {"d": [118.0] * 4}, 0.08)
    assert found["d"] == pytest.approx((0.18, 0.177912, 100.0))


def test_a_key_that_is_slow_for_a_part_of_its_time_only_is_not_slow():
    passing = [2.0] * 15 + [1.0] * 5
    series = {rank: [1.0] * 20 for rank in range(3)} | {3: passing}
    assert outliers.than_peers(series, 0.08) == {}
    assert set(outliers.than_peers(series | {3: [2.0] * 20}, 0.08)) == {3}


def test_the_spread_of_several_baselines_widens_the_limit():
    run = {"a": [1.10] * 8}
    assert outliers.than_before(run, [{"a": [1.0] * 8}], 0.03)["a"].excess == pytest.approx(0.10)
    # the runs spread over 4 %: up to 12 % is within what this machine does
    past = [{"a": [level] * 8} for level in (0.98, 1.0, 1.02)]
    assert outliers.than_before(run, past, 0.03) == {}
    slower = outliers.than_before({"a": [1.13] * 8}, past, 0.03)
    assert slower["a"] == pytest.approx((0.13, 0.12, 1.0))


# ---- how often it is wrong


@pytest.mark.parametrize(("gpus", "runs"), [(2, 250), (4, 250), (8, 50)])
def test_at_most_one_clean_run_in_fifty_is_called_faulty(gpus, runs):
    alarms = [faults(findings(m.info, m.run())) for m in (Machine(gpus, s) for s in range(runs))]
    assert sum(map(bool, alarms)) <= runs / 50


def test_at_most_one_clean_run_in_fifty_is_worse_than_a_clean_baseline():
    alarms = 0
    for seed in range(200):
        machine = Machine(4, seed)
        baseline = machine.run() + (machine.run() if seed % 2 else [])
        alarms += bool(faults(findings(machine.info, machine.run(), baseline)))
    assert alarms <= 4


def test_ranks_on_shared_cores_are_not_called_faulty():
    ops = {
        "gemm": Gemm(m=512, n=512, k=512, dtype="fp32"),
        "copy": Elementwise(kind="copy", read_bytes=16 * MiB, write_bytes=16 * MiB),
    }
    cluster = msgspec.structs.replace(
        known.CPUS, num_devices_per_host=4, tiers=(Tier(name="shared memory", num_devices=4),)
    )
    runs = []
    for measured in json.loads(CPU_RUNS.read_text()):
        samples = []
        for name, ranks_us in measured.items():
            case = Case(op=ops[name], world_size=4)
            ranks = [[time_us / 1e6 for time_us in own] for own in ranks_us]
            samples.append(sample(case, ranks))
        runs.append(samples)
    assert len(runs) == 12
    assert [faults(findings(info(cluster), run)) for run in runs] == [[]] * 12
    later = [faults(findings(info(cluster), b, a)) for a, b in itertools.pairwise(runs)]
    assert later == [[]] * 11


# ---- what it finds


def sample(case: Case, ranks, **fields) -> Sample:  # type: ignore[no-untyped-def]
    return Sample(
        case_id=case.id,
        case=case,
        status="ok",
        times_s=tuple(map(max, zip(*ranks, strict=True))),
        rank_times_s=tuple(map(tuple, ranks)),
        **fields,
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_gpu_that_shares_its_processor_is_named(seed):
    machine = Machine(4, seed)
    culprit = seed % 4
    # 30 to 50 % slower, 1/0.7 to 1/0.5 of the time, the other program coming and going
    machine.gpu_factor[culprit] = 1 / machine.rng.uniform(0.5, 0.7)
    machine.jitter[culprit] = 0.1
    assert faults(findings(machine.info, machine.run())) == [("slow gpu", f"GPU {culprit}")]


@pytest.mark.parametrize("seed", range(20))
def test_a_pair_through_the_host_is_named_once(seed):
    machine = Machine(4, seed)
    through_host = 380 / machine.rng.uniform(20, 50)
    machine.pair_factor = {(1, 3): through_host, (3, 1): through_host * 1.2}
    assert faults(findings(machine.info, machine.run())) == [("slow link", "GPU 1 <-> GPU 3")]


def test_one_slow_direction_is_an_asymmetric_pair():
    machine = Machine(4, 0)
    machine.pair_factor = {(2, 0): 1.5}
    (found,) = findings(machine.info, machine.run())
    assert (found.what, found.where) == ("asymmetric pair", "GPU 2 -> GPU 0")
    two = Machine(2, 0)
    two.pair_factor = {(1, 0): 1.5}
    assert faults(findings(two.info, two.run())) == [("asymmetric pair", "GPU 1 -> GPU 0")]


def test_a_gpu_with_all_its_links_slow_is_one_fault():
    machine = Machine(4, 0)
    for rank in (0, 1, 3):
        machine.pair_factor |= {(rank, 2): 3.0, (2, rank): 3.0}
    assert faults(findings(machine.info, machine.run())) == [("slow link", "GPU 2 <-> all others")]


def test_half_the_lanes_to_the_host_are_found_but_not_the_other_socket():
    machine = Machine(8, 0)
    assert findings(machine.info, machine.run()) == []  # the far ones take 1.3 times as long
    machine.host_factor[5] = 2.0
    assert faults(findings(machine.info, machine.run())) == [("slow link", "GPU 5 <-> host")]


def test_throttling_is_a_fault_unless_it_is_the_power_cap():
    machine = Machine(4, 0)
    machine.throttle = dict.fromkeys(range(4), ("power cap",))
    assert findings(machine.info, machine.run()) == []
    machine.throttle[2] = ("power cap", "hardware thermal slowdown")
    (found,) = findings(machine.info, machine.run())
    assert (found.what, found.where) == ("throttling", "GPU 2")
    assert found.evidence == "hardware thermal slowdown at 21 of 21 readings, 1900 MHz"


def test_of_two_gpus_both_are_named_until_a_baseline_tells():
    machine = Machine(2, 0)
    healthy = machine.run()
    machine.gpu_factor[1] = 1.5
    (found,) = findings(machine.info, machine.run())
    assert (found.what, found.where) == ("slow gpu", "GPU 0, GPU 1")
    assert found.evidence.startswith("GPU 1: gemm 8192x8192x8192 bf16: ")
    named = faults(findings(machine.info, machine.run(), healthy))
    assert named == [("slow gpu", "GPU 0, GPU 1"), ("worse than baseline", "GPU 1")]
    machine.gpu_factor[1] = 3.0  # 265 of 1000 TFLOP/s
    assert ("below specification", "GPU 1") in faults(findings(machine.info, machine.run()))


def test_a_whole_machine_that_became_slower_needs_a_baseline_to_be_seen():
    machine = Machine(4, 0)
    healthy = [machine.run(), machine.run(), machine.run()]
    machine.gpu_factor[:] = 1.15
    slower = machine.run()
    assert findings(machine.info, slower) == []
    (found,) = findings(machine.info, slower, [one for run in healthy for one in run])
    assert (found.what, found.where) == ("worse than baseline", "4 of 4 GPUs")
    assert "the median of 3 baselines" in found.evidence


def test_all_pairs_through_the_host_are_below_specification():
    machine = Machine(4, 0)
    machine.pair_factor = {(a, b): 10.0 for a in range(4) for b in range(4) if a != b}
    (found,) = findings(machine.info, machine.run())  # 38 GB/s; a mesh would give 450/3
    assert (found.what, found.where) == ("below specification", "12 of 12 pairs")
    machine.pair_factor = dict.fromkeys(machine.pair_factor, 3.0)  # 127 GB/s: as a mesh of four
    assert findings(machine.info, machine.run()) == []


def test_links_whose_rate_was_measured_are_held_against_their_data_sheet():
    machine = Machine(4, 0)
    machine.pair_factor = {(a, b): 10.0 for a in range(4) for b in range(4) if a != b}
    measured = Tier(
        name="nvlink", num_devices=4, bytes_per_s=38e9, source="measured", sheet_bytes_per_s=450e9
    )
    cluster = msgspec.structs.replace(machine.cluster, tiers=(measured,))
    (found,) = findings(info(cluster), machine.run())
    assert (found.what, found.where) == ("below specification", "12 of 12 pairs")


def test_what_a_slow_link_does_to_collectives_is_a_note():
    machine = Machine(4, 0)
    machine.pair_factor = {(0, 1): 10.0, (1, 0): 10.0}
    case = Case(op=ALL_REDUCE, world_size=4)
    slow = sample(case, [[ALL_REDUCE.bytes / 60e9] * 20] * 4)
    run = [slow if one.case_id == case.id else one for one in machine.run()]
    found = findings(machine.info, run)
    assert faults(found) == [("slow link", "GPU 0 <-> GPU 1")]
    assert found[-1][:2] == ("below specification", "all GPUs")
    assert found[-1].severity == "note" and "60.0 GB/s is 13 % of 450 GB/s" in found[-1].evidence


# ---- busbw above the link


ALL_REDUCE = Collective(
    kind="all_reduce", size_bytes=256 * MiB, group_size=4, dtype="bf16", in_place=True
)


def of_rate(op: Collective, busbw: float, world_size: int) -> list[Sample]:
    return [sample(Case(op=op, world_size=world_size), [[op.bytes / busbw] * 8] * world_size)]


def test_busbw_above_the_link_is_explained_by_reduction_in_the_switch():
    # algbw = 480 / 1.5 = 320, (n+1)/n of it = 400
    (found,) = findings(info(host(4)), of_rate(ALL_REDUCE, 480e9, 4))
    assert (found.what, found.severity) == ("busbw above link", "note")
    assert "480 GB/s is above 450 GB/s" in found.evidence
    assert found.evidence.endswith("algbw (n+1)/n = 400 GB/s")
    assert verdict([found]) == "healthy"


def test_busbw_that_no_algorithm_explains_accuses_the_cluster_file():
    gather = msgspec.structs.replace(ALL_REDUCE, kind="all_gather", in_place=False)
    for op, busbw in ((ALL_REDUCE, 560e9), (gather, 480e9)):  # 560 / 1.5 x 1.25 = 467
        (found,) = findings(info(host(4)), of_rate(op, busbw, 4))
        assert found.severity == "note" and "cluster file" in found.evidence


def test_busbw_over_hosts_is_shared_by_their_network_cards():
    # four hosts of eight B200: 377.34 x 3/31 = 36.5 GB/s a card (ml-engineering's 4 GiB all-reduce)
    op = msgspec.structs.replace(ALL_REDUCE, group_size=32)
    (found,) = findings(info(host(8, hosts=4)), of_rate(op, 377.34e9, 32))
    assert found.evidence.endswith("busbw (k-1)/(n-1) = 36.5 GB/s")


# ---- what could not be measured


def test_a_hung_pair_is_a_fault_and_a_skipped_case_is_none():
    machine = Machine(4, 0)
    run = machine.run()
    pair = next(i for i, one in enumerate(run) if getattr(one.case.op, "ranks", ()) == (1, 2))
    reason = "rank 2 did not arrive"
    lost = {"times_s": (), "rank_times_s": (), "reason": reason}
    run[pair] = msgspec.structs.replace(run[pair], status="hung", **lost)
    (found,) = findings(machine.info, run)
    assert (found.what, found.where) == ("failed", "GPU 1 -> GPU 2") and reason in found.evidence
    run[pair] = msgspec.structs.replace(run[pair], status="skipped", **lost)
    assert findings(machine.info, run) == []


def test_a_run_that_measured_nothing_is_not_healthy_and_half_a_run_says_so():
    assert verdict(findings(info(host(4)), [])) == "1 fault"
    machine = Machine(4, 0)
    half = msgspec.structs.replace(machine.info, status="partial", reason="budget")
    (found,) = findings(half, machine.run())
    assert (found.what, found.severity) == ("incomplete", "note")


def test_a_baseline_of_another_size_is_refused():
    machine, other = Machine(4, 0), Machine(2, 0)
    with pytest.raises(ValueError, match="the baseline shares no case"):
        findings(machine.info, machine.run(), other.run())


# ---- the page


def by_hand() -> tuple[RunInfo, list[Sample], list[Sample]]:
    """Four GPUs without noise. GPU 2 at half its rate and too hot, GPU 0 and 3 linked through the
    host, NVLS; the baseline without these faults and 1 % faster."""
    cluster = host(4)

    def run(faulty: bool) -> list[Sample]:
        return [one_by_hand(case, faulty) for case in of_cases(cluster)]

    return info(cluster), run(True), run(False)


def one_by_hand(case: Case, faulty: bool) -> Sample:
    op = case.op
    work = op.read_bytes if getattr(op, "kind", "") in ("h2d", "d2h") else op.flops or op.bytes
    rates = {"copy": 3.2e12, "h2d": 50e9, "d2h": 40e9, "send": 380e9, "send_recv": 300e9}
    rates |= {"all_gather": 320e9, "all_reduce": 480e9, "": 800e12}
    seconds = [work / rates[getattr(op, "kind", "")]] * 4
    hot = DeviceState(rank=2, sm_clock_mhz=990, power_w=410, temperature_c=91)
    cool = [DeviceState(rank=r, sm_clock_mhz=1905, power_w=690, temperature_c=60) for r in range(4)]
    cool = [msgspec.structs.replace(state, throttle=("power cap",)) for state in cool]
    if faulty and isinstance(op, Gemm):
        seconds[2] *= 2
        cool[2] = msgspec.structs.replace(hot, throttle=("hardware thermal slowdown",))
    if isinstance(op, Collective) and op.size_bytes == cases.SMALL_BYTES:
        seconds = [24e-6] * 4
    if isinstance(op, Collective) and set(op.ranks) == {0, 3} and faulty:
        seconds = [op.size_bytes / 25e9] * 4
    scale = 1.0 if faulty else 1 / 1.01
    return sample(case, [[scale * own] * 8 for own in seconds], after=tuple(cool))


def test_the_tables_are_as_recorded(golden):
    stream = io.StringIO()
    table.write(health.tables(*by_hand()), stream)
    assert max(map(len, stream.getvalue().splitlines())) <= table.WIDTH
    golden("health.txt", stream.getvalue())


def test_the_findings_of_that_page_by_hand():
    found = findings(*by_hand())
    assert verdict(found) == "3 faults"
    assert {finding[:2] for finding in found} == {
        ("throttling", "GPU 2"),
        ("slow gpu", "GPU 2"),
        ("slow link", "GPU 0 <-> GPU 3"),
        ("busbw above link", "all GPUs"),
    }
    slow = next(finding for finding in found if finding.what == "slow gpu")
    assert "400 TFLOP/s, the others 800 TFLOP/s (+100 % time, limit 8 %)" in slow.evidence
    assert "at 990 MHz, the others 1905 MHz" in slow.evidence
