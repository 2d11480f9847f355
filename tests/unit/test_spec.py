"""Every record: its ranges hold, its errors are one line that says what to do, its file keeps it.

Values are drawn from the annotations themselves, so a new record or field is tested by existing.
"""

import hashlib
import json
import math
import re
import typing
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Meta
from msgspec.structs import replace

from meshwise import machine, spec, store
from meshwise.spec import (
    Attention,
    Block,
    Case,
    Cluster,
    Collective,
    Convolution,
    Costs,
    Curve,
    Cuts,
    Decoder,
    Device,
    DeviceCount,
    Dilation,
    Experts,
    Factor,
    Gemm,
    Layout,
    LongAttention,
    Model,
    Plan,
    Prediction,
    Recipe,
    Record,
    RopeScaling,
    Sample,
    Surface,
    Tier,
    Way,
    WeightLayout,
    WhyNot,
    WideResNet,
    Workload,
    digest,
    stages_of,
)
from meshwise.spec.costs import Law
from meshwise.spec.op import REDUCING, ROOTED
from tests import sample_records as known

KINDS: list[type[Record]] = [
    kind
    for kind in vars(spec).values()
    if isinstance(kind, type) and issubclass(kind, Record) and kind is not Record
]
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=6)
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "2026-11-21-gpt-2.6b-4xh200"
FEW = settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


# Fields that a rule ties together, made to keep it.
TIED: dict[type[Record], Callable[[dict[str, Any]], dict[str, Any]]] = {
    Model: lambda f: {"hidden": f["heads"] * f["hidden"]},
    Decoder: lambda f: {
        "heads": f["kv_heads"] * f["heads"],
        "softmax_scale": None if f["mla"] else f["softmax_scale"],
        "window": None if f["mla"] else f["window"],
        "activation": "silu" if f["experts"] else f["activation"],
        "not_computed": f["not_computed"] + "." * bool(f["more_weights"]),
    },
    Experts: lambda f: {
        "load": f["load"] if isinstance(f["load"], str) else float(f["num_experts"]),
        "num_experts": f["groups"] * (f["top_k"] + f["num_experts"]),
        "top_groups": min(f["groups"], f["top_groups"]),
        "capacity_factor": (f["capacity_factor"] or 1.5) if f["group_size"] else None,
    },
    RopeScaling: lambda f: {
        "original_max_seq_len": f["original_max_seq_len"] + 1,
        "fast": 2 * f["slow"] + f["fast"],
    },
    WideResNet: lambda f: {"blocks": (2, *f["blocks"])},
    Gemm: lambda f: {
        "scaling": "row" if f["dtype"] == "fp8" else "none",
        "m": f["m"] * f["groups"],
        "k": f["k"] * f["groups"],
        "batched": f["batched"] and f["groups"] > 1,
    },
    Convolution: lambda f: {"kernel": f["kernel"] | 1},
    Attention: lambda f: {
        "heads": f["kv_heads"] * f["heads"],
        "causal": f["causal"] or f["window"] is not None,
    },
    Dilation: lambda f: {"segment_lengths": (8, 16), "dilation_rates": (1, 3)},
    LongAttention: lambda f: {
        "heads": f["kv_heads"] * f["heads"],
        "window": None,
        "order": "contiguous" if f["dilation"] else f["order"],
    },
    Block: lambda f: {
        "recompute": "none",
        "dtype": "bf16" if f["dtype"] == "fp8" else f["dtype"],  # of layers of language models
        "seq_len": f["seq_len"] * f["cp"],
        **(
            {"part": "layer", "form": "0.first"}
            if isinstance(f["model"], WideResNet)
            else {"form": ""}
        ),
    },
    DeviceCount: lambda f: {"layout": f["layout"] if f["step_time_s"] else None},
    WhyNot: lambda f: {"obstacle": f["obstacle"] + "." * (not f["time"])},
    Collective: lambda f: {
        "ranks": tuple(range(3, 3 + f["group_size"])),
        "splits": ((5,) * f["group_size"],) * f["group_size"] * (f["kind"] == "all_to_all_v"),
        "size_bytes": 5 * f["group_size"] if f["kind"] == "all_to_all_v" else f["size_bytes"],
        "redop": f["redop"] if f["kind"] in REDUCING else "sum",
        "root": f["root"] % f["group_size"] if f["kind"] in ROOTED else 0,
    },
    Layout: lambda f: {
        "pp": 1,
        "schedule": "none",
        "stages_per_rank": 1,
        "layers": (),
        "meshes": (),
        "ways": (),
        "cuts": Cuts(),
        "replicas": 1,
        "recompute_layers": None,
        "zero": f["zero"] if f["dp"] * f["cp"] > 1 else 0,
        "dp": f["dp"] * f["ep"],
        "sequence_parallel": f["sequence_parallel"] and f["tp"] > 1,
        "tp_sums": f["tp_sums"] if f["tp"] > 1 and f["tp_sums"] != "together" else "last",
    },
    WeightLayout: lambda f: {
        "dp": f["dp"] * f["ep"] * f["etp"] * f["fsdp"],
        "fsdp": f["ep"] * f["etp"] * f["fsdp"],
        "pp": 3,
        "layers": (5,) * 3 * f["stages_per_rank"],
    },
    Cluster: lambda f: {
        "reserved_bytes": f["reserved_bytes"] % f["device"].memory_bytes,
        "tiers": (Tier(name="all", num_devices=f["num_hosts"] * f["num_devices_per_host"]),),
    },
    Prediction: lambda f: {"stage_times": ()},  # one for each stage, and others draw those
    Costs: lambda f: {
        "recipe": Recipe(
            learning_rate=f["recipe"].learning_rate,
            weights=f["recipe"].weights if f["dtype"] == "bf16" else "fp32",
        )
    },
    Plan: lambda f: {
        "layout": Layout(dp=2, zero=3, microbatch_size=4, num_microbatches=3),
        "workload": Workload(global_batch_size=24, seq_len=128),
        "cluster": cluster_of(num_devices=2),
        "stages": stages_of(Layout(dp=2, zero=3), f["model"]),
        "recipe": Recipe(learning_rate=f["recipe"].learning_rate),
    },
    Sample: lambda f: {
        "times_s": (1.0, 2.0),
        "rank_times_s": ((1.0, 2.0),),
        "reason": f["reason"] + ".",
    },
    Curve: lambda f: {
        "x_bytes": (1.0, 2.0),
        "time_s": (0.5, 0.25),
        "law": "lines",
        "laws": {"lines": Law(held_out=f["beyond"])},
        "end_range_s_per_byte": (f["end_s_per_byte"], f["end_s_per_byte"]),
    },
    Surface: lambda f: {
        "like": Gemm(m=1, n=2, k=3),
        "dims": ("m", "n"),
        "shapes": ((1, 2),),
        "time_s": (0.5,),
    },
    Factor: lambda f: {
        "activation_elements": (4.0, 8.0),
        "host_s": (0.0, 1.0),
        "ratio": (1.0, 2.0),
        "saved_ratio": (),
    },
}


def cluster_of(num_devices: int, *tiers: Tier) -> Cluster:
    return Cluster(
        name="test",
        num_hosts=1,
        num_devices_per_host=num_devices,
        device=Device(name="cpu", kind="cpu", memory_bytes=2**30),
        tiers=tiers or (Tier(name="host", num_devices=num_devices),),
    )


def fields_of(kind: type[Record]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in kind.__struct_fields__}


def drawn(hint: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation, ranges included."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated and args[0] is int:
        most = 30  # fields that TIED multiplies stay in range
        return st.integers(args[1].ge, most if args[1].le is None else min(most, args[1].le))
    if origin is typing.Annotated:
        low = args[1].ge if args[1].gt is None else args[1].gt
        high = min(1e18, math.inf if args[1].le is None else args[1].le)
        return st.floats(low, high, exclude_min=args[1].gt is not None)
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin in (typing.Union, UnionType):
        return st.one_of([drawn(arg) for arg in args])
    if origin is tuple and args[1:] != (...,):
        return st.tuples(*map(drawn, args))
    if origin is tuple:
        return st.lists(drawn(args[0]), max_size=2).map(tuple)
    if origin is dict:
        return st.dictionaries(TEXT, drawn(args[1]), max_size=2)
    if isinstance(hint, type) and issubclass(hint, Record):
        return records(hint)
    plain = {int: st.integers(-(2**40), 2**40), str: TEXT, bool: st.booleans(), Any: TEXT}
    floats = st.floats(allow_nan=False, allow_infinity=False)
    return {**plain, float: floats, type(None): st.none()}[hint]


def records(kind: type[Record]) -> st.SearchStrategy[Any]:
    """Valid records of a kind."""
    tie = TIED.get(kind, lambda fields: {})
    every = {name: drawn(hint) for name, hint in fields_of(kind).items()}
    every.pop("schema_version", None)  # other versions are refused, as a test below shows
    return st.fixed_dictionaries(every).map(lambda fields: kind(**{**fields, **tie(fields)}))


def outside(hint: Any) -> list[Any]:
    """Values just outside an annotation's range, one at each end that it has."""
    if typing.get_origin(hint) is typing.Literal:
        return ["no such choice"]
    for arg in typing.get_args(hint):
        if isinstance(arg, Meta):
            low = arg.gt if arg.gt is not None else arg.ge - 1
            bounded = arg.le is not None and arg.le + 1 > arg.le  # 1e300 stands for "finite"
            return [low, arg.le + 1] if bounded else [low]
        if typing.get_origin(arg) is typing.Annotated:  # Positive | None
            return outside(arg)
    return []


RANGES = [
    (kind, field, value)
    for kind in KINDS
    for field, hint in fields_of(kind).items()
    if typing.get_origin(hint) not in (tuple, dict)
    for value in outside(hint)
]


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as error:
        act()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_generator_sees_the_ranges() -> None:
    assert (Gemm, "m", 0) in RANGES
    assert (Layout, "zero", 4) in RANGES
    assert (Device, "peak_memory_bytes_per_s", 0) in RANGES
    assert (Collective, "kind", "no such choice") in RANGES


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    RANGES,
    ids=[f"{kind.__name__}.{field} = {value}" for kind, field, value in RANGES],
)
@given(data=st.data())
@settings(FEW, max_examples=2)
def test_a_value_out_of_range_is_refused(kind, field, value, data) -> None:
    record = data.draw(records(kind))
    built = refusal(lambda: msgspec.structs.replace(record, **{field: value}))
    assert built.startswith(f"{kind.__name__}.{field} = {value!r}: must be ")
    plain = {**msgspec.to_builtins(record), field: value}
    read = refusal(lambda: store.convert(plain, kind, "some.json"))
    assert read.startswith("some.json")
    assert field in read
    assert repr(value) in read


@pytest.mark.parametrize("suffix", [".json", ".toml"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
@FEW
def test_a_file_keeps_the_record(kind, suffix, tmp_path: Path, data) -> None:
    record = data.draw(records(kind))
    path = store.write(tmp_path / f"record{suffix}", record)
    again = store.read(path, kind)
    assert again == record
    assert digest(again) == digest(record)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(FEW, max_examples=2)
def test_unknown_and_missing_fields_are_refused(kind, data) -> None:
    plain = msgspec.to_builtins(data.draw(records(kind)))
    assert "colour" in refusal(lambda: store.convert({**plain, "colour": 1}, kind, "x.json"))
    for field in msgspec.structs.fields(kind):
        if field.required:
            fewer = {name: value for name, value in plain.items() if name != field.name}
            assert field.name in refusal(lambda fewer=fewer: store.convert(fewer, kind, "x.json"))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_documentation_names_every_field(kind) -> None:
    text = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    entry = re.search(rf"^- `{kind.__name__}`.*?(?=^- |^$|^#)", text, re.MULTILINE | re.DOTALL)
    assert entry, f"docs/formats.md has no entry for {kind.__name__}"
    named = set(re.findall(r"`(\w+)`", entry[0]))
    assert named >= set(kind.__struct_fields__)


@pytest.mark.parametrize("kind", [k for k in KINDS if "schema_version" in k.__struct_fields__])
@given(data=st.data())
@settings(FEW, max_examples=1)
def test_another_schema_version_is_refused_by_name(kind, data) -> None:
    plain = msgspec.to_builtins(data.draw(records(kind)))
    assert next(iter(plain)) == "schema_version"
    message = refusal(lambda: store.convert({**plain, "schema_version": 99}, kind, "x.json"))
    assert "schema_version is 99" in message


def test_a_nested_field_is_named_by_its_path() -> None:
    case = msgspec.to_builtins(Case(op=Gemm(m=1, n=2, k=3)))
    case["op"]["k"] = 0
    message = refusal(lambda: store.convert(case, Case, "x.json"))
    assert message == "x.json: op.k = 0: must be >= 1"


def test_a_dead_link_names_the_field_the_value_and_the_bound() -> None:
    cluster = msgspec.to_builtins(store.read(machine.shipped()["h100-hgx"], Cluster))
    cluster["tiers"][1]["bytes_per_s"] = 0
    message = refusal(lambda: store.convert(cluster, Cluster, "x.toml"))
    assert message == "x.toml: tiers[1].bytes_per_s = 0: must be > 0"


def test_the_values_of_a_table_have_ranges_too() -> None:
    device = msgspec.to_builtins(cluster_of(1).device) | {"peak_flops": {"bf16": -1.0}}
    message = refusal(lambda: store.convert(device, Device, "x.toml"))
    assert "peak_flops" in message
    assert "> 0" in message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Layout(zero=3),
            "Layout.zero = 3: shards over dp and cp, which are 1; use zero = 0",
        ),
        (lambda: Layout(sequence_parallel=True), "Layout.sequence_parallel = True: shards over tp"),
        (lambda: Model(hidden=10, layers=1, heads=3, ffn=8), "Model.heads = 3: must divide hidden"),
        (
            lambda: cluster_of(4, Tier(name="pair", num_devices=2)),
            "Cluster.tiers = pair: reach 2 devices; the last must reach all 4",
        ),
        (
            lambda: replace(
                cluster_of(1), reserved_bytes=cluster_of(1).device.memory_bytes
            ).check(),
            "must be below device.memory_bytes",
        ),
        (
            lambda: cluster_of(2, Tier(name="b", num_devices=2), Tier(name="a", num_devices=1)),
            "list tiers from the smallest reach to the largest",
        ),
        (
            lambda: Sample(case_id="x", case=Case(op=Gemm(m=1, n=1, k=1)), status="ok"),
            "Sample.times_s = (): an ok sample must hold at least one time",
        ),
        (
            lambda: Sample(
                case_id="x",
                case=Case(op=Gemm(m=1, n=1, k=1)),
                status="ok",
                times_s=(1.0,),
                metrics={"wrong": (0.0, 2.0)},
            ),
            "a sample with wrong elements is an error and not ok",
        ),
        (
            lambda: Sample(case_id="x", case=Case(op=Gemm(m=1, n=1, k=1)), status="oom"),
            "Sample.reason = '': a sample with status oom must say why",
        ),
        (
            lambda: Sample(case_id="x", case=Case(op=Gemm(m=1, n=1, k=1)), status="hung"),
            "Sample.reason = '': a sample with status hung must say why",
        ),
        (
            lambda: Gemm(m=1, n=1, k=1, dtype="fp8"),
            "Gemm.scaling = 'none': fp8 is scaled by tensor or row, other dtypes by none",
        ),
        (lambda: Gemm(m=1, n=1, k=1, scaling="row"), "Gemm.scaling = 'row': fp8 is scaled by"),
        (
            lambda: Convolution(
                batch=1, in_channels=1, out_channels=1, height=4, width=4, kernel=2
            ),
            "Convolution.kernel = 2: must be odd",
        ),
        (
            lambda: attention(2, 4, causal=False, window=2),
            "Attention.window = 2: only causal attention has a window; set causal",
        ),
        (
            lambda: Collective(kind="send", size_bytes=8, group_size=2, ranks=(1,)),
            "Collective.ranks = (1,): must be group_size = 2 different ranks, or empty",
        ),
        (
            lambda: Collective(kind="all_reduce", size_bytes=8, group_size=2, ranks=(1, 0)),
            "Collective.ranks = (1, 0): must ascend; only a send has a direction",
        ),
        (
            lambda: Collective(kind="all_to_all_v", size_bytes=8, group_size=2),
            "Collective.splits = (): all_to_all_v needs them, and no other kind has any",
        ),
        (
            lambda: Collective(kind="all_gather", size_bytes=8, group_size=2, redop="max"),
            "Collective.redop = 'max': all_gather does not reduce; leave it out",
        ),
        (
            lambda: Collective(kind="reduce", size_bytes=8, group_size=2, root=2),
            "Collective.root = 2: must be < 2 ranks",
        ),
        (
            lambda: Collective(kind="all_reduce", size_bytes=8, group_size=2, root=1),
            "Collective.root = 1: all_reduce has none",
        ),
        (
            lambda: uneven(8, (4, 4), (4,)),
            "Collective.splits = ((4, 4), (4,)): must be 2 rows of 2 byte counts",
        ),
        (
            lambda: uneven(8, (4, 4), (8, 0)),
            "Collective.size_bytes = 8: must be 12, the most that a rank sends or receives",
        ),
    ],
)
def test_rules_across_fields_say_what_to_do(make: Callable[[], object], message: str) -> None:
    assert message in refusal(make)


@given(st.data())
@settings(FEW, max_examples=5)
def test_a_plan_must_cut_its_whole_batch_and_fit_its_cluster(data) -> None:
    plan = data.draw(records(Plan))
    short = Layout(dp=2, microbatch_size=4, num_microbatches=2)
    message = refusal(lambda: msgspec.structs.replace(plan, layout=short))
    assert "is 16, but the workload's global_batch_size is 24; make them equal" in message
    wide = Layout(dp=6, tp=1, microbatch_size=4, num_microbatches=1)
    assert "needs 6 of 2 devices" in refusal(lambda: msgspec.structs.replace(plan, layout=wide))


def test_loops_name_the_ways_of_each_rank_once() -> None:
    loops = Layout(
        pp=2, dp=2, schedule="interleaved_1f1b", stages_per_rank=4, num_microbatches=2,
        ways=(Way(), Way(zero=1)) * 4,
    )  # fmt: skip
    assert loops.name == "pp2x4 interleaved_1f1b dp2 ways same/zero1 mb1x2"
    again = (*loops.ways[:6], Way(recompute="full"), Way(zero=1))
    assert "ways same/zero1/same/zero1/same/zero1/full/zero1" in replace(loops, ways=again).name


@given(records(Gemm))
def test_a_digest_is_that_of_the_sorted_compact_json_of_what_is_not_default(gemm: Gemm) -> None:
    usual = {"dtype": "bf16", "trans_a": False, "trans_b": True, "groups": 1, "scaling": "none"}
    usual |= {"batched": False}
    told = {field: value for field, value in vars_of(gemm).items() if value != usual.get(field)}
    text = json.dumps({"op": "gemm", **told}, sort_keys=True, separators=(",", ":"))
    assert digest(gemm) == hashlib.sha256(text.encode()).hexdigest()[:12]


def vars_of(record: Record) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


def test_a_digest_of_nested_records_leaves_their_defaults_out_too() -> None:
    case = Case(op=Gemm(m=1, n=2, k=3), regime="cold", world_size=2)
    text = '{"op":{"k":3,"m":1,"n":2,"op":"gemm"},"regime":"cold","world_size":2}'
    assert case.id == hashlib.sha256(text.encode()).hexdigest()[:12]


def test_flops_and_bytes_by_hand() -> None:
    gemm = Gemm(m=2, n=3, k=5, dtype="bf16")
    assert (gemm.flops, gemm.bytes) == (2 * 30, 2 * (10 + 15 + 6))
    shape = {"batch": 2, "q_len": 8, "kv_len": 8, "heads": 4, "kv_heads": 2, "head_dim": 16}
    full = Attention(**shape, causal=False)
    assert full.flops == 2 * (2 * 2 * 4 * 8 * 8 * 16)  # QK^T and PV
    assert full.bytes == 2 * (2 * 8 * 4 * 16 * 2 + 2 * (2 * 8 * 2 * 16))  # Q, O and K, V
    causal = Attention(**shape)
    assert causal.flops * 2 == full.flops
    assert Attention(**shape, direction="backward").flops == 2.5 * causal.flops


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (5, 5), (3, 7), (1, 6), (7, 3)])
@pytest.mark.parametrize("window", [None, 1, 3, 20])
def test_the_pairs_that_a_mask_leaves(q_len, kv_len, window, causal) -> None:
    if window is not None and not causal:
        return
    seen = 0  # of queries and keys whose last positions are the same
    for query in range(kv_len - q_len, kv_len):
        keys = [key for key in range(kv_len) if key <= query or not causal]
        seen += sum(window is None or key > query - window for key in keys)
    op = attention(q_len, kv_len, causal=causal, window=window)
    assert op.exact_flops == 2 * seen * (8 + 4)
    halves = 1 if causal else 2
    assert op.flops == (op.exact_flops if window else q_len * kv_len * (8 + 4) * halves)


def attention(q_len: int, kv_len: int, **changes: Any) -> Attention:
    """One head of 8 for q and k, 4 for v."""
    shape = {"batch": 1, "heads": 1, "kv_heads": 1, "head_dim": 8, "head_dim_v": 4}
    return Attention(q_len=q_len, kv_len=kv_len, **shape, **changes)


def test_bytes_of_wide_keys_groups_and_fp8_by_hand() -> None:
    assert attention(2, 3).bytes == 2 * (2 * (8 + 4) + 3 * (8 + 4))  # q and out, k and v
    assert attention(2, 3, direction="backward").bytes == 2 * attention(2, 3).bytes
    experts = {"m": 8, "n": 3, "k": 5, "groups": 4}
    assert Gemm(**experts).bytes == 2 * (8 * 5 + 4 * 5 * 3 + 8 * 3)  # a B for each group
    assert Gemm(**experts, trans_a=True).bytes == 2 * (8 * 5 + 5 * 3 + 4 * 8 * 3)  # a C for each
    fp8 = Gemm(m=2, n=3, k=5, dtype="fp8", scaling="row")
    assert fp8.bytes == 10 + 15 + 2 * 6  # the result is bf16


def uneven(size_bytes: int, *splits: tuple[int, ...]) -> Collective:
    return Collective(kind="all_to_all_v", size_bytes=size_bytes, group_size=2, splits=splits)


def test_an_uneven_exchange_waits_for_the_rank_with_most_to_move() -> None:
    op = uneven(12, (10, 1), (2, 3))  # rank 0 receives 12, 2 of them from elsewhere
    assert (op.bytes, op.bus_factor) == (2, pytest.approx(2 / 12))
    even = Collective(
        kind="all_to_all_v", size_bytes=8, group_size=4, splits=tuple((2,) * 4 for _ in range(4))
    )
    assert even.bus_factor == 0.75  # as all_to_all


@pytest.mark.parametrize(
    ("kind", "factor"),  # nccl-tests, doc/PERFORMANCE.md, for 4 ranks
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("broadcast", 1.0),
        ("reduce", 1.0),
        ("gather", 0.75),
        ("scatter", 0.75),
        ("send_recv", 1.0),
        ("send", 1.0),
    ],
)
def test_bus_factors(kind: Any, factor: float) -> None:
    collective = Collective(kind=kind, size_bytes=1 << 20, group_size=4)
    assert collective.bus_factor == factor
    assert collective.bytes == factor * 2**20
    assert Collective(kind=kind, size_bytes=1 << 20, group_size=1).bytes == 0


def test_bytes_on_the_wire_are_rounded_up() -> None:
    kinds = {"all_reduce": 14, "all_gather": 7, "broadcast": 10}  # of 10 bytes, 2 x 2/3 and 2/3
    found = {kind: Collective(kind=kind, size_bytes=10, group_size=3).bytes for kind in kinds}
    assert found == kinds


@given(size=st.integers(1, 64), stride=st.integers(1, 64))
def test_a_group_lies_in_the_innermost_tier_that_holds_it(size: int, stride: int) -> None:
    reaches = (2, 8, 64)
    cluster = cluster_of(64, *[Tier(name=f"t{n}", num_devices=n) for n in reaches])
    ranks = range(0, size * stride, stride)
    if ranks[-1] >= 64:
        message = refusal(lambda: cluster.tier_of(size, stride))
        assert "describe a larger cluster" in message
    else:
        holding = [n for n in reaches if all(rank // n == 0 for rank in ranks)]
        assert cluster.tier_of(size, stride).num_devices == holding[0]


def test_a_plan_of_version_1_is_read():
    old = json.loads((BENCHMARK / "plan.json").read_text())
    assert old["schema_version"] == 1
    read = store.convert(old, Plan, "plan.json")
    assert read.schema_version == 3 and read.stages[0].dp == read.layout.dp


def test_an_uneven_pipeline():
    layout = Layout(
        pp=3, schedule="1f1b", meshes=((1, 1), (1, 1), (1, 2)), layers=(1, 2, 1), microbatch_size=2
    )
    assert (
        layout.num_devices == 4 and layout.name == "pp3 1f1b meshes 1x1,1x1,1x2 layers 1,2,1 mb2x1"
    )
    deep = Layout(pp=6, schedule="1f1b", layers=(2, 3, 3, 3, 3, 2), num_microbatches=6)
    assert deep.name == "pp6 1f1b layers 2,3x4,2 mb1x6"
    stages = stages_of(layout, known.MODEL)
    assert [stage.devices for stage in stages] == [(0,), (1,), (2, 3)]
    cut = [stage.placements["feed_forward"] for stage in stages]
    assert cut == [{}, {}, {"ffn": ("tp",)}]
    assert [(stage.first_layer, stage.last_layer) for stage in stages] == [(0, 1), (1, 3), (3, 4)]
    assert layout.of_rank(2) == Layout(tp=2, microbatch_size=2)


def test_a_split_backward_refuses_compiled_code():
    layout = Layout(pp=2, schedule="zbv", stages_per_rank=2, dp=2, num_microbatches=4)
    stages = stages_of(layout, known.MODEL)
    workload = Workload(global_batch_size=8, seq_len=128)
    fields = {"layout": layout, "stages": stages, "workload": workload}
    plan = msgspec.structs.replace(known.plan(), **fields, lowering="eager")
    with pytest.raises(ValueError, match="splits each backward in two, and compiled"):
        msgspec.structs.replace(plan, lowering="compiled")


def test_a_v_puts_the_ends_on_one_rank():
    layout = Layout(pp=2, schedule="zbv", stages_per_rank=2, dp=2, zero=1, num_microbatches=4)
    stages = stages_of(layout, known.MODEL)
    assert [stage.pipeline_rank for stage in stages] == [0, 1, 1, 0]
    assert stages[3].devices == (0, 1) and layout.of_rank(0).zero == 1


@pytest.mark.parametrize(
    "fields, field",
    [
        ({"pp": 2}, "schedule"),
        ({"schedule": "gpipe"}, "schedule"),
        ({"stages_per_rank": 2}, "stages_per_rank"),
        ({"dp": 4, "replicas": 2}, "replicas"),
        ({"dp": 4, "zero": 1, "replicas": 4}, "replicas"),
        ({"recompute_layers": 1}, "recompute_layers"),
        ({"dp": 2, "tp_sums": "first"}, "tp_sums"),
        ({"tp": 2, "tp_sums": "together"}, "tp_sums"),
        ({"dp": 2, "tp": 2, "zero": 1, "tp_sums": "together"}, "tp_sums"),
        (
            {
                "dp": 2,
                "tp": 2,
                "pp": 2,
                "schedule": "1f1b",
                "num_microbatches": 2,
                "tp_sums": "together",
                "ways": (Way(zero=1), Way()),
            },
            "ways",
        ),
        ({"pp": 2, "schedule": "1f1b", "layers": (1,)}, "layers"),
        ({"pp": 2, "schedule": "1f1b", "meshes": ((1, 1),)}, "meshes"),
        ({"pp": 2, "schedule": "1f1b", "meshes": ((1, 1), (2, 1))}, "meshes"),
    ],
)
def test_layouts_that_contradict_themselves(fields, field):
    with pytest.raises(ValueError, match=rf"Layout\.{field} = "):
        Layout(**fields)
