"""The inter-operator search against plain enumeration of all divisions."""

import itertools
import math
import random
import sys

import msgspec
import numpy as np
import pytest

from meshwise import search
from meshwise.prices import Prices
from meshwise.prices.datasheet import unmeasured
from meshwise.search import inter_op, inter_op_stages, progress, space
from meshwise.search.inter_op import Problem, StageTable, divide
from meshwise.search.within import ANY, Space
from meshwise.spec import (
    Attention,
    Cluster,
    Collective,
    Cuts,
    Elementwise,
    Layout,
    Model,
    Workload,
)
from meshwise.spec.layout import Way
from meshwise.verbs import files

GIB = 2**30


def any_table(chance, layers, sizes):
    """Ways with random prices for each start and stop; some cannot be. Some layers are alike."""
    devices = [chance.choice(sizes) for _ in range(chance.randint(1, 6))]
    kind = np.full((layers, layers + 1), -1)
    names, alike = {}, chance.random() < 0.3
    for start, stop in itertools.combinations(range(layers + 1), 2):
        key = (stop - start, start == 0, stop == layers) if alike else (start, stop)
        kind[start, stop] = names.setdefault(key, len(names))
    counts = [int(np.subtract(*np.argwhere(kind == at)[0][::-1])) for at in names.values()]

    def of_stages(least, most):
        return np.asarray(
            [[chance.randint(least, most) * n for n in counts] for _ in devices], float
        )

    pace_s, again = of_stages(1, 12), np.asarray([[chance.randint(0, 3)] for _ in devices])
    pace_s[[chance.random() < 0.05 for _ in devices], chance.randrange(len(counts))] = np.inf
    return StageTable(
        devices=np.asarray(devices),
        hops_s=np.asarray([[chance.randint(0, 2), chance.randint(0, 6)] for _ in devices]),
        kind=kind,
        layers=np.asarray(counts),
        once_s=pace_s + of_stages(0, 3),
        pace_s=pace_s,
        late_s=of_stages(0, 4),
        tied_s=of_stages(0, 3) * np.asarray([stop == layers for _, stop in names_of(kind)]),
        resident=of_stages(0, 8),
        held=of_stages(2, 6),
        slower_s=np.broadcast_to(again, pace_s.shape),
        spared=np.broadcast_to(np.minimum(again, 2), pace_s.shape),
    )


def names_of(kind):
    """Where the first stage of each kind starts and stops."""
    return [tuple(np.argwhere(kind == at)[0]) for at in range(kind.max() + 1)]


def step_s(problem, stages):
    """The seconds of a step, written out: over every stage that ends last, and every slowest stage
    from it on. ``stages``: once, pace, late, tied, microbatches in flight, of each."""
    once = [of[0] / problem.turns for of in stages]
    found = [0.0]
    for ends, slow in itertools.combinations_with_replacement(range(len(stages)), 2):
        _, pace_s, _, _, flying = stages[slow]
        ahead = flying - 1 if problem.turns == 1 else 0
        until_s = sum(once[ends : slow + 1])
        until_s += (problem.num_microbatches - 1 / problem.turns) * pace_s
        until_s += max(0, sum(once[slow + 1 :]) - ahead * pace_s / 3)
        found.append(sum(once[:ends]) / 3 + until_s + stages[ends][2])
        if ends == 0:
            found.append(until_s + stages[-1][3])
    return max(found)


def any_problem(chance, layers, devices):
    count, turns = chance.randint(1, 8), chance.choice([1, 1, 2])
    most = chance.randint(1, min(layers, devices))
    in_flight = [min(count, behind + 1) for behind in range(min(layers, devices))]
    if turns > 1:
        in_flight = [(2 * behind + 1 + most) / 2 for behind in range(most)]
    return Problem(
        num_devices=devices,
        per_host=chance.choice([devices, 2, 3, 4]),
        num_microbatches=count,
        in_flight=in_flight,
        limit_bytes=chance.choice([20.0, 60.0, 120.0, 1e9]),
        turns=turns,
        exactly=turns > 1,
    )


def every_division(table, problem):
    """Yield the time of every way to cut the layers into stages, with every way and mesh for each,
    that fits: by recursion from the first stage."""
    layers = table.kind.shape[0]

    def on(start, first, chosen):
        if start == layers or first == problem.num_devices:
            if start == layers and first == problem.num_devices:
                yield chosen
            return
        for stop in range(start + problem.turns, layers + 1):
            for way, devices in enumerate(table.devices.tolist()):
                last = first + devices - 1
                if last >= problem.num_devices:
                    continue
                hosts = {device // problem.per_host for device in range(first, last + 1)}
                whole = first % problem.per_host == 0 and devices == len(hosts) * problem.per_host
                if len(hosts) == 1 or whole:
                    yield from on(stop, last + 1, [*chosen, (way, start, stop)])

    for stages in on(0, 0, []):
        ends = np.cumsum([table.devices[way] for way, _, _ in stages]).tolist()
        if len(stages) > len(problem.in_flight) or (
            problem.exactly and len(stages) != len(problem.in_flight)
        ):
            continue
        priced = []
        for number, (way, start, stop) in enumerate(stages):
            flying = problem.in_flight[len(stages) - 1 - number]
            of = way, table.kind[start, stop]
            for again in range(stop - start + 1):
                held = table.held[of] - again * table.spared[of]
                if table.resident[of] + flying * held <= problem.limit_bytes:
                    break
            else:
                break
            more_s = again * table.slower_s[of]
            sent_s = hop_s(table, problem, way, ends[number])
            seconds = table.once_s[of] + more_s + sent_s, table.pace_s[of] + more_s + sent_s
            priced.append((*seconds, table.late_s[of], table.tied_s[of], flying))
        else:
            if all(math.isfinite(pace_s) for _, pace_s, *_ in priced):
                yield step_s(problem, priced)


def hop_s(table, problem, way, end):
    """Seconds between a stage that ends before device ``end`` and the next."""
    if end == problem.num_devices:
        return 0
    return problem.turns * table.hops_s[way, 1 if end % problem.per_host == 0 else 0]


def check(seed):
    chance = random.Random(seed)
    layers, devices = chance.randint(1, 6), chance.randint(1, 8)
    if chance.random() < 0.1:
        layers = chance.randint(7, 8)
    table = any_table(chance, layers, [n for n in (1, 1, 2, 3, 4, 8) if n <= devices])
    problem = any_problem(chance, layers, devices)
    least_s = min(every_division(table, problem), default=math.inf)
    found = divide(table, problem)
    if not found or not math.isfinite(least_s):
        assert not found and not math.isfinite(least_s)
        return False
    assert found[0].time_s == pytest.approx(least_s, rel=1e-12)
    for division in found:
        verify(table, problem, division)
    assert not divide(table, problem, least_s * (1 - 1e-9))
    assert divide(table, problem, least_s * (1 + 1e-9))[0].time_s == found[0].time_s
    return True


def verify(table, problem, division):
    """The stages of a division follow each other, fill the devices, fit, and take its time."""
    stages = division.stages
    priced, at, end = [], 0, 0
    for number, (way, start, stop, again) in enumerate(stages):
        assert start == at < stop
        at = stop
        flying = problem.in_flight[len(stages) - 1 - number]
        of = way, table.kind[start, stop]
        held = table.held[of] - again * table.spared[of]
        assert table.resident[of] + flying * held <= problem.limit_bytes
        assert 0 <= again <= stop - start
        more_s = again * table.slower_s[of]
        end += table.devices[way]
        sent_s = hop_s(table, problem, way, end)
        seconds = table.once_s[of] + more_s + sent_s, table.pace_s[of] + more_s + sent_s
        priced.append((*seconds, table.late_s[of], table.tied_s[of], flying))
    assert at == table.kind.shape[0]
    assert sum(table.devices[stage.way] for stage in stages) == problem.num_devices
    assert division.time_s == pytest.approx(step_s(problem, priced))


@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 1000), marks=pytest.mark.whole)], ids=str
)
def test_the_division_is_the_best_of_all(seeds):
    assert sum(map(check, seeds)) > len(seeds) / 3


def every_pipeline(model, workload, devices, words=("selective", "full")):
    """1F1B on these devices: all meshes, layer counts, ZeRO, sequence parallelism, and any number
    of layers of each stage computed again in one of these ways."""
    for rows in (n for n in range(1, workload.global_batch_size + 1)):
        if workload.global_batch_size % rows:
            continue
        for sizes, counts in itertools.product(compositions(devices), compositions(model.layers)):
            if len(sizes) != len(counts) or len(sizes) == 1:
                continue
            of_stages = [
                [
                    (dp, size // dp, zero, sp, word, again)
                    for dp in range(1, size + 1)
                    if size % dp == 0 and rows % dp == 0 and model.heads % (size // dp) == 0
                    for zero in (range(4) if dp > 1 else [0])
                    for sp in ([False, True] if dp < size else [False])
                    for word, again in [
                        ("none", 0), *itertools.product(words, range(1, count + 1)),
                    ]
                ]
                for size, count in zip(sizes, counts, strict=True)
            ]  # fmt: skip
            for chosen in itertools.product(*of_stages):
                yield Layout(
                    pp=len(sizes), schedule="1f1b", layers=counts, microbatch_size=rows,
                    num_microbatches=workload.global_batch_size // rows,
                    meshes=tuple((dp, tp) for dp, tp, *_ in chosen),
                    ways=tuple(
                        Way(
                            zero=zero or None,
                            cuts=Cuts(stream="seq") if sp else None,
                            recompute=word if again else None,
                            recompute_layers=again or None,
                        )
                        for _, _, zero, sp, word, again in chosen
                    ),
                )  # fmt: skip


def compositions(total):
    if total == 0:
        yield ()
    for first in range(1, total + 1):
        for others in compositions(total - first):
            yield (first, *others)


def test_no_pipeline_is_faster_by_more_than_a_hundredth():
    """Against simulating every 1F1B pipeline, where memory is enough and where it is not. The head
    takes as long as the layers, so that stages differ."""
    model = Model(name="small", hidden=1024, layers=3, heads=4, ffn=4096, vocab=51200)
    workload = Workload(global_batch_size=8, seq_len=1024)
    costs = unmeasured(files.take("p3.16xlarge", Cluster))
    prices, every = Prices(costs, datasheet=True), []
    for layout in every_pipeline(model, workload, 3):
        space.check(model, workload, layout)
        every.append(search.predict(model, workload, layout, prices))
    chosen = set()
    for memory_bytes in (16 * GIB, 3.4 * GIB, 3.35 * GIB):
        device = msgspec.structs.replace(costs.cluster.device, memory_bytes=int(memory_bytes))
        cluster = msgspec.structs.replace(costs.cluster, device=device)
        there = msgspec.structs.replace(costs, cluster=cluster)
        plan = search.find(model, workload, there, num_devices=3)
        fitting = [of for of in every if of.peak_memory_bytes <= cluster.usable_bytes]
        least_s = min(of.step_time_s for of in fitting)
        assert plan.prediction.step_time_s <= 1.01 * least_s
        assert plan.prediction.peak_memory_bytes <= cluster.usable_bytes
        assert plan.layout.meshes == ((1, 1), (2, 1))
        space.check(model, workload, plan.layout)
        chosen.add(plan.layout.recompute)
    assert chosen == {"none", "selective"}


DEARER = {  # by how much operations cost more than by the data sheet
    "by the data sheet": lambda op: 1.0,
    "attention": lambda op: 20.0 if isinstance(op, Attention) else 1.0,
    "optimizer": lambda op: 20.0 if getattr(op, "kind", "") in ("adamw", "grad_norm") else 1.0,
    "messages": lambda op: 5.0 if isinstance(op, Collective) else 1.0,
    "copies": lambda op: 5.0 if isinstance(op, Elementwise) else 1.0,
}


@pytest.mark.parametrize("dearer", DEARER)
@pytest.mark.parametrize(
    ("layers", "vocab", "batch", "seq_len", "devices"),
    [(3, 51200, 8, 1024, 3), (3, 51200, 2, 1024, 3), (3, 8192, 4, 1024, 3), (3, 51200, 4, 128, 3),
     (4, 8192, 4, 512, 4)],
    ids=["8 microbatches", "two sequences", "small vocabulary", "short", "4 devices"],
)  # fmt: skip
def test_no_pipeline_is_faster_by_more_than_a_hundredth_whatever_is_dear(
    layers, vocab, batch, seq_len, devices, dearer, monkeypatch
):
    """Against simulating every 1F1B pipeline. With few microbatches the step's single messages,
    copies and optimizer weigh as much as the microbatches."""
    plain = Prices.estimate

    def estimate(self, op, run=None):
        found = plain(self, op, run)
        return found._replace(time_s=DEARER[dearer](op) * found.time_s)

    monkeypatch.setattr(Prices, "estimate", estimate)
    model = Model(name="small", hidden=1024, layers=layers, heads=4, ffn=4096, vocab=vocab)
    workload = Workload(global_batch_size=batch, seq_len=seq_len)
    costs = unmeasured(files.take("p3.16xlarge", Cluster))
    prices = Prices(costs, datasheet=True)
    least_s = min(
        search.predict(model, workload, layout, prices).step_time_s
        for layout in every_pipeline(model, workload, devices, words=())
    )
    plan = search.find(model, workload, costs, num_devices=devices)
    assert plan.prediction.step_time_s <= 1.01 * least_s


def is_placed(layout, cluster):
    """Each pipeline rank's devices are on one host, or are whole hosts."""
    for rank in range(layout.pp):
        devices, host = layout.devices_of(rank), cluster.num_devices_per_host
        whole = devices.start % host == len(devices) % host == 0
        if devices.start // host != devices[-1] // host and not whole:
            return False
    return True


@pytest.mark.parametrize(
    ("hosts", "per_host", "devices", "layers", "batch"),
    [(1, 8, 7, 6, 8), (3, 6, 18, 5, 12), (3, 6, 15, 6, 6), (1, 8, 8, 1, 8), (1, 8, 5, 4, 2)],
    ids=["7 devices", "3 hosts of 6", "15 of 18", "one layer", "few sequences"],
)
def test_odd_numbers_have_legal_plans(hosts, per_host, devices, layers, batch):
    model = Model(name="odd", hidden=1024, layers=layers, heads=8, ffn=4096, vocab=8192)
    workload = Workload(global_batch_size=batch, seq_len=1024)
    costs = unmeasured(files.take("p3.16xlarge", Cluster))
    nvlink, network = costs.cluster.tiers
    nvlink = msgspec.structs.replace(nvlink, num_devices=per_host)
    network = msgspec.structs.replace(network, num_devices=hosts * per_host)
    cluster = msgspec.structs.replace(
        costs.cluster, num_hosts=hosts, num_devices_per_host=per_host,
        tiers=(nvlink, network) if hosts > 1 else (nvlink,),
    )  # fmt: skip
    costs = msgspec.structs.replace(costs, cluster=cluster)
    plan = search.find(model, workload, costs, num_devices=devices)
    for candidate in (plan, *plan.runners_up):
        space.check(model, workload, candidate.layout)
        assert candidate.layout.num_devices == devices
        assert candidate.layout.batch_size == batch
        assert candidate.prediction.peak_memory_bytes <= cluster.usable_bytes
        assert is_placed(candidate.layout, cluster)
    least = plan.prediction.peak_memory_bytes
    device = msgspec.structs.replace(
        cluster.device, memory_bytes=int(least) - 1 + cluster.reserved_bytes
    )
    cluster = msgspec.structs.replace(cluster, device=device)
    costs = msgspec.structs.replace(costs, cluster=cluster)
    shorter = search.find(model, workload, costs, num_devices=devices)  # a byte less than it needs
    assert shorter.prediction.peak_memory_bytes < least
    assert shorter.prediction.step_time_s >= plan.prediction.step_time_s


def test_an_uneven_pipeline_without_a_price_is_left_out(monkeypatch):
    model = Model(name="odd", hidden=1024, layers=3, heads=8, ffn=4096, vocab=51200)
    workload = Workload(global_batch_size=8, seq_len=1024)
    costs = unmeasured(files.take("p3.16xlarge", Cluster))
    plan = search.find(model, workload, costs, num_devices=3)
    assert plan.layout.meshes

    def predict(model, workload, layout, prices):
        if layout.meshes or layout.ways:
            raise ValueError("was not measured")
        return search.predict(model, workload, layout, prices)

    monkeypatch.setattr(sys.modules["meshwise.search.find"], "predict", predict)
    uniform = search.find(model, workload, costs, num_devices=3)
    assert not uniform.layout.meshes
    assert plan.prediction.step_time_s < uniform.prediction.step_time_s


@pytest.mark.parametrize("within", [ANY, Space(num_auto_layers=6)])
@pytest.mark.parametrize("layers", ["aaaaaaaaaaaa", "abbabbabbabb", "aabcaabcbbca"])
def test_stages_of_one_kind_have_the_same_layers_and_ends(layers, within):
    """The kinds of stages against their layers, compared one with another."""
    kind, starts, stops = inter_op_stages._kinds(tuple(layers), within)
    found, due = {}, {}
    for start, stop in itertools.combinations(range(13), 2):
        if kind[start, stop] >= 0:
            found.setdefault(kind[start, stop], []).append((start, stop))
        edges = all(within.is_edge(at, 12) for at in (start, stop))
        if edges and stop - start < 12:
            of = layers[start:stop], start == 0, stop == 12
            due.setdefault(of, []).append((start, stop))
    assert [*found.values()] == [*due.values()] and [*found] == [*range(len(due))]
    assert [*zip(starts, stops, strict=True)] == [of[0] for of in due.values()]


def test_kinds_of_stages_look_at_each_of_1000_layers_a_few_times():
    class Layer:
        looked = 0

        def __hash__(self):
            Layer.looked += 1
            return 1

        def __eq__(self, other):
            return True

    kind, starts, _ = inter_op_stages._kinds(tuple(Layer() for _ in range(1000)), ANY)
    assert Layer.looked <= 3000
    assert len(starts) == 999 + 998 + 999 == kind.max() + 1  # by size: first ones, inner ones, last
    assert inter_op_stages._kinds.cache_info().maxsize


def test_a_model_of_many_layers_is_divided_by_a_bounded_number_of_steps(monkeypatch, caplog):
    caplog.set_level("INFO")
    kept, keep = [], inter_op._keep
    monkeypatch.setattr(inter_op, "_keep", lambda *of: kept.append(keep(*of)))
    chance = random.Random(5)
    table = any_table(chance, 8, [1])
    problem = Problem(8, 8, 4, [1.0] * 8, 1e9)
    assert divide(table, problem) and "too many" not in caplog.text
    usual = len(kept)
    kept.clear()
    monkeypatch.setattr(inter_op, "MOST", usual // 2)
    assert divide(table, problem) is None and "of 4 microbatches, too many" in caplog.text
    assert len(kept) < usual


def test_where_no_more_stages_are_tried_there_are_none():
    """Interleaved, of exactly so many stages: where one answer is None, later ones are empty."""
    told = 0
    for seed in range(40):
        chance = random.Random(seed)
        table, is_over = any_table(chance, 8, [1, 2]), False
        for pp in range(2, 9):
            ahead = [(2 * s + 1 + pp) / 2 for s in range(pp)]
            problem = Problem(8, 8, 8, ahead, 40.0, 2, exactly=True)
            found = divide(table, problem, 60.0)
            assert not (is_over and found)
            is_over |= found is None
            told += is_over and pp < 8
    assert told


def test_a_long_search_says_how_far_it_is(monkeypatch, caplog):
    """By a clock that gains six seconds whenever it is read."""
    caplog.set_level("INFO")
    clock = itertools.count(0, 6)
    monkeypatch.setattr(progress, "monotonic", lambda: next(clock))
    model = Model(hidden=256, heads=4, layers=4, ffn=1024, vocab=512, max_seq_len=128)
    costs = unmeasured(files.take("h100-hgx", Cluster))
    search.find(model, Workload(seq_len=128, global_batch_size=8), costs, num_devices=4)
    for said in ("1 of ", "ways to run a stage", "unlike stages: 1 of", "layouts wait"):
        assert said in caplog.text
