"""The price key: every field of every operation counts, or says why not. No torch."""

import typing

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshwise import store
from meshwise.prices import Prices, in_step, op_key, unmeasured
from meshwise.prices.key import FIELDS, How, links, marks
from meshwise.spec import (
    Attention,
    Block,
    Case,
    Cluster,
    Collective,
    Convolution,
    Costs,
    Decoder,
    Device,
    Elementwise,
    Experts,
    Gemm,
    HeldOut,
    Model,
    Op,
    Overlap,
    Shaped,
    Surface,
    Tier,
    WideResNet,
)
from meshwise.spec.label import label
from tests import sample_records as known

DEVICE = Device(
    name="x", kind="cuda", memory_bytes=2**36, peak_memory_bytes_per_s=3e12,
    peak_flops={"bf16": 1e15, "fp16": 1e15, "fp32": 1e14},
)  # fmt: skip
HOSTS = Cluster(
    name="hosts", num_hosts=8, num_devices_per_host=8, device=DEVICE,
    tiers=(Tier(name="nvlink", num_devices=8), Tier(name="network", num_devices=64)),
)  # fmt: skip
GOOD = HeldOut(median=0.01, p90=0.02, num_points=5)
GPT = Model(hidden=64, layers=1, heads=4, ffn=256)
LLAMA = Decoder(
    hidden=64, layers=1, heads=4, kv_heads=4, head_dim=16, ffn=256, vocab=8, max_seq_len=8
)
IMAGES = WideResNet(blocks=(2,), channels=8, image_size=32)
OTHERS: dict[str, tuple[object, ...]] = {  # values of a field, the first to begin with
    "dtype": ("bf16", "fp16", "fp32"), "scaling": ("none",), "direction": ("forward", "backward"),
    "head_dim_v": (None, 32, 128), "window": (None, 64, 100), "part": ("layer", "head"),
    "form": ("", "0.first", "0.rest"),
    "model": (
        GPT, msgspec.structs.replace(GPT, ffn=512), msgspec.structs.replace(GPT, hidden=128),
        msgspec.structs.replace(GPT, experts=Experts(num_experts=4, top_k=2, ffn=8)), LLAMA,
        IMAGES, msgspec.structs.replace(IMAGES, channels=16),
    ),
    "ranks": ((),), "splits": ((),), "heads": (64, 128), "kv_heads": (8, 4, 64),
    "kernel": (1, 3, 7),
    "group_size": (2, 4, 8), "group_stride": (1, 2, 4, 8),
    "compute": (Gemm(m=2, n=2, k=2), Gemm(m=2, n=2, k=4)),
    "collective": (
        Collective(kind="all_gather", size_bytes=8, group_size=4),
        Collective(kind="all_gather", size_bytes=8, group_size=8),
    ),
}  # fmt: skip
KINDS = typing.get_args(Op)


def values(kind, field):
    """What a field may be besides its first value."""
    if field in OTHERS:
        return OTHERS[field]
    hint = typing.get_type_hints(kind)[field]
    if typing.get_origin(hint) is typing.Literal:
        return tuple(x for x in typing.get_args(hint) if x not in ("all_to_all_v", "send"))
    return (False, True) if hint is bool else (3, 5, 1000)


@st.composite
def operations(draw, kinds=KINDS):
    kind = draw(st.sampled_from(kinds))
    fields = {f: draw(st.sampled_from(values(kind, f))) for f in kind.__struct_fields__}
    try:
        return kind(**fields)
    except ValueError:  # a window without a mask
        assume(False)


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_declared(kind):
    """One that is added later, too: it has to be entered in ``prices.key.FIELDS``."""
    assert set(FIELDS[kind]) == set(kind.__struct_fields__)


def test_every_operation_is_declared():
    assert set(FIELDS) == set(KINDS)


@given(operations(), st.data())
def test_every_field_counts_or_says_why_not(op, data):
    field = data.draw(st.sampled_from(op.__struct_fields__))
    value = data.draw(st.sampled_from(values(type(op), field)))
    try:
        other = msgspec.structs.replace(op, **{field: value})
    except ValueError:
        return
    here, there = (op_key(x, How(), HOSTS) for x in (op, other))
    reasons = [{n: r for k, n, r in marks(x, HOSTS) if k == "derived"} for x in (op, other)]
    if value == getattr(op, field):
        assert here == there
    elif not all(field in of for of in reasons) or field == "model":
        assert here != there
    else:
        assert all(reasons[0].values())


@given(operations())
def test_how_it_ran_belongs_to_the_category(op):
    runs = [
        How(r, w, b) for r in ("cold", "warm") for w in ("eager", "compiled") for b in ("", "x")
    ]
    assert len({op_key(op, run, HOSTS).category for run in runs}) == len(runs)


@pytest.mark.parametrize("change", [{"name": "b"}, {"layers": 9}, {"max_seq_len": 7}])
def test_a_layer_is_alike_whatever_it_is_called(change):
    block = Block(part="layer", model=GPT, microbatch_size=2, seq_len=8)
    other = msgspec.structs.replace(block, model=msgspec.structs.replace(GPT, **change))
    assert op_key(block, How(), HOSTS) == op_key(other, How(), HOSTS)


@pytest.mark.parametrize("change", [{"name": "b"}, {"blocks": (5,)}, {"num_classes": 7}])
def test_a_layer_of_images_is_alike_in_models_of_other_depths(change):
    block = Block(part="layer", form="0.rest", model=IMAGES, microbatch_size=2, seq_len=1)
    other = msgspec.structs.replace(block, model=msgspec.structs.replace(IMAGES, **change))
    first = msgspec.structs.replace(block, form="0.first")
    assert op_key(block, How(), HOSTS) == op_key(other, How(), HOSTS)
    assert op_key(block, How(), HOSTS) != op_key(first, How(), HOSTS)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"model": IMAGES}, "Block.form = '': must be one of 0.first, 0.rest"),
        (
            {"model": IMAGES, "part": "head", "form": "0.rest"},
            "Block.part = 'head': must be layer for an image",
        ),
        ({"model": GPT, "form": "0.rest"}, "Block.form = '0.rest': must be one of "),
    ],
)
def test_a_block_has_a_form_where_layers_have_several(fields, error):
    with pytest.raises(ValueError, match=error):
        Block(**{"part": "layer", "microbatch_size": 2, "seq_len": 1} | fields)


def test_recomputation_is_a_category_and_none_keeps_old_ids():
    block = Block(part="layer", model=GPT, microbatch_size=2, seq_len=8, direction="backward")
    stored = msgspec.json.decode(msgspec.json.encode(block))
    del stored["recompute"]  # as samples were written before there was the field
    assert msgspec.json.decode(msgspec.json.encode(stored), type=Block) == block
    full, selective = (
        msgspec.structs.replace(block, recompute=word) for word in ("full", "selective")
    )
    ids = [Case(op=op).id for op in (block, full, selective)]
    assert len({*ids}) == 3 and ids[0] == "dffe0c7c7d9b"  # its id before there was the field
    assert op_key(block, How(), HOSTS).name + " recompute full" == op_key(full, How(), HOSTS).name
    assert label(Case(op=full)) == label(Case(op=block)) + " recompute full"
    with pytest.raises(ValueError, match=r"Block\.recompute = 'full': only"):
        msgspec.structs.replace(full, direction="forward")


def peers(op, cluster):
    """By listing all groups: ranks of the first within each tier, groups at one part of a tier's
    devices that reach out of it."""
    n, stride = op.group_size, op.group_stride
    blocks = range(0, cluster.num_devices, n * stride)
    groups = [
        [b + j + i * stride for i in range(n)] for b in blocks for j in range(stride)
    ]  # fmt: skip
    found, reach = [], 1
    for tier in cluster.tiers:
        inside = sum(rank < tier.num_devices for rank in groups[0])
        leaving = [g for g in groups if any(r < reach for r in g) and any(r >= reach for r in g)]
        found.append((inside, len(leaving)))
        reach = tier.num_devices
    return found


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6), st.integers(0, 6))
def test_equal_places_share_a_price_and_others_do_not(n, stride, n2, stride2):
    ops = [
        Collective(kind="all_gather", size_bytes=8, group_size=2**a, group_stride=2**b)
        for a, b in ((n, stride), (n2, stride2))
        if a and a + b <= 6
    ]
    if len(ops) < 2:
        return
    counted = []
    for op in ops:
        within, words = 1, []
        for (inside, shared), tier in zip(peers(op, HOSTS), HOSTS.tiers, strict=True):
            if inside > within:
                words.append((tier.name, inside, shared))
            within = inside
        counted.append(words)
    assert (counted[0] == counted[1]) == (links(ops[0], HOSTS) == links(ops[1], HOSTS))


def test_the_links_of_a_group_in_words():
    def said(size, stride=1, ranks=()):
        op = Collective(
            kind="all_gather", size_bytes=8, group_size=size, group_stride=stride, ranks=ranks
        )
        return links(op, HOSTS)

    assert said(8) == "8 by nvlink" and said(2, 4) == said(2) == "2 by nvlink"
    assert said(8, 8) == "8 by network (8 a link)"
    assert said(16) == "8 by nvlink, 16 by network"
    assert said(4, 4) == "2 by nvlink, 4 by network (4 a link)"
    assert said(2, ranks=(7, 8)) == "2 by network"  # one group alone
    with pytest.raises(ValueError, match="spans 127 devices"):
        said(64, 2)
    with pytest.raises(ValueError, match="'hosts' has 64"):
        said(2, ranks=(0, 64))


def costs_of(*prices):
    return msgspec.structs.replace(
        unmeasured(HOSTS), surfaces=tuple(p for p in prices if isinstance(p, Surface)), runs=("r",),
        curves=tuple(p for p in prices if not isinstance(p, Surface)),
    )  # fmt: skip


def surface(op, *shapes, time_s=1e-3, **run):
    dims = tuple(op_key(op, How(), HOSTS).coordinates)
    return Surface(
        like=op, dims=dims, shapes=shapes or (tuple(getattr(op, d) for d in dims),),
        time_s=(time_s,) * max(1, len(shapes)), floor_s=0.0, flops_per_s=5e12, bytes_per_s=3e12,
        held_out=GOOD, noise=0.001, runs=("r",), **{"regime": "cold", **run},
    )  # fmt: skip


@given(operations(typing.get_args(Shaped)), operations(typing.get_args(Shaped)))
def test_one_key_is_one_price(op, other):
    """And a measured shape costs what was measured; another key does not."""
    prices = Prices(costs_of(surface(op)), datasheet=True)
    here, there = (op_key(x, in_step(x, HOSTS, "eager"), HOSTS) for x in (op, other))
    found = [prices.estimate(x) for x in (op, other)]
    assert found[0][:3] == (1e-3, 0.001, "measured")
    assert (found[0] == found[1]) == (here == there) == (found[1].source == "measured")
    if here.category != there.category:
        assert found[1].source in ("transferred", "datasheet") and found[1].note
        assert found[1].error > found[0].error


PLAIN = Attention(batch=1, q_len=1024, kv_len=1024, heads=32, kv_heads=32, head_dim=128)


def test_more_keys_are_another_price():
    prices = Prices(costs_of(surface(PLAIN)))
    one, eight = (
        prices.estimate(msgspec.structs.replace(PLAIN, kv_len=n)) for n in (1024, 8192)
    )  # fmt: skip
    assert one.source == "measured" and eight.source == "extrapolated"
    # 256 tiles in two waves: 17 blocks of keys and 3 to start, and 130 and 3
    assert eight.time_s == pytest.approx(1e-3 * 133 / 20, rel=0.02)
    assert "nearest measured shape" in eight.note and eight.error > GOOD.p90


@pytest.mark.parametrize(
    ("change", "blocks", "said"),
    [
        ({"window": 256}, 11, "attention bf16 forward causal windowed cold was not measured"),
        ({"kv_heads": 16}, 20, "attention bf16 forward causal GQA cold was not measured"),
        ({"head_dim_v": 64}, 20 * 216 / 248, "MLA cold was not measured"),
        ({"causal": False}, 21, "attention bf16 forward cold was not measured"),
        ({"dtype": "fp16"}, 20, "attention fp16 forward causal cold was not measured"),
        ({"dtype": "fp32"}, 200, "attention fp32 forward causal cold was not measured"),
        ({"direction": "backward"}, 50, "attention bf16 backward causal cold was not measured"),
    ],
)
def test_a_stand_in_is_said_and_widens(change, blocks, said):
    """256 tiles in two waves take 17 blocks of keys, and 3 to start; 2 x (8 + 1) without a mask."""
    prices = Prices(costs_of(surface(PLAIN)))
    op = msgspec.structs.replace(PLAIN, **change)
    found = prices.estimate(op)
    assert found.source == "transferred" and said in found.note
    assert found.note.endswith("attention bf16 forward causal cold stands in")
    assert found.error > GOOD.p90 and prices.tier == "transferred"
    assert found.time_s == pytest.approx(1e-3 * blocks / 20, rel=0.02)  # fp32 has a 10th of peak


CONVOLVED = Convolution(batch=32, in_channels=320, out_channels=640, height=56, width=56, kernel=3)


def test_without_any_convolution_measured_its_price_is_the_data_sheets_which_is_said():
    prices = Prices(costs_of(surface(PLAIN)), datasheet=True)
    found = prices.estimate(CONVOLVED)
    said = "convolution bf16 forward 3x3 cold was not measured: its data sheet's price"
    assert (found.source, found.note) == ("datasheet", said)
    with pytest.raises(ValueError, match="no price for convolution bf16 forward 3x3 cold"):
        Prices(costs_of(surface(PLAIN))).estimate(CONVOLVED)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"product": "wgrad"}, "wgrad 3x3"),
        ({"kernel": 1}, "forward 1x1"),
        ({"stride": 2}, "forward 3x3 stride 2"),
    ],
)
def test_another_convolution_stands_in_at_its_rate_and_is_said(change, name):
    op = msgspec.structs.replace(CONVOLVED, **change)
    found = Prices(costs_of(surface(CONVOLVED)), datasheet=True).estimate(op)
    assert found.source == "transferred" and found.error > GOOD.p90
    said = f"convolution bf16 {name} cold was not measured: "
    assert found.note == f"{said}convolution bf16 forward 3x3 cold stands in"
    assert found.time_s == pytest.approx(1e-3 * op.flops / CONVOLVED.flops, rel=0.02)


def test_cold_and_warm_are_two_prices_and_the_program_asks_for_cold():
    op = Gemm(m=4096, n=4096, k=4096)
    cold, warm = surface(op), surface(op, time_s=2e-3, regime="warm")
    for both in ((cold, warm), (warm, cold)):
        assert Prices(costs_of(*both)).estimate(op)[:3] == (1e-3, 0.001, "measured")
    alone = Prices(costs_of(warm))
    assert alone.estimate(op, How("warm")).source == "measured"
    found = alone.estimate(op)
    assert found.source == "transferred" and found.note.endswith("gemm bf16 nt stands in")
    assert found.error > 1


def test_nothing_stands_in_for_a_collective_over_other_links_or_of_another_kind():
    gather = Collective(kind="all_gather", size_bytes=2**18, group_size=8)
    prices = Prices(costs_of(known.curve(gather, 1e-5, 1e11)))
    assert prices.estimate(gather).source == "measured"
    assert prices.estimate(msgspec.structs.replace(gather, dtype="fp32")).source == "measured"
    for change in ({"group_size": 4}, {"group_stride": 8}, {"kind": "all_to_all"}):
        with pytest.raises(ValueError, match="no price for all_"):
            prices.estimate(msgspec.structs.replace(gather, **change))
    near = msgspec.structs.replace(gather, in_place=True)
    assert prices.estimate(near).source == "transferred"
    far = known.curve(msgspec.structs.replace(gather, group_stride=8), 1e-5, 1e10)
    found = Prices(costs_of(far)).estimate(msgspec.structs.replace(gather, group_stride=4))
    assert found.source == "transferred" and found.note == (
        "all_gather 2 by nvlink, 8 by network (4 a link) was not measured: "
        "all_gather 8 by network (8 a link) stands in"
    )


def test_element_wise_work_is_priced_as_copies_which_is_said_once():
    copy = Elementwise(kind="copy", read_bytes=2**20, write_bytes=2**20)
    prices = Prices(costs_of(known.curve(copy, 1e-5, 1e12, regime="cold")), datasheet=True)
    for kind in ("gelu", "layer_norm", "copy"):
        for direction in ("forward", "backward"):
            found = prices.estimate(
                msgspec.structs.replace(copy, kind=kind, direction=direction, read_bytes=2**19)
            )
            assert found.source == ("interpolated" if kind == "copy" else "transferred")
    assert len(prices.notes) == 1
    crossing = prices.estimate(msgspec.structs.replace(copy, kind="h2d"))  # over another link
    assert crossing.source == "datasheet"
    assert crossing.note == "h2d cold was not measured: its data sheet's price"


def test_costs_of_several_dtypes_and_lowerings_come_back(tmp_path):
    op = Gemm(m=512, n=512, k=512)
    several = costs_of(
        surface(op), surface(msgspec.structs.replace(op, dtype="fp32"), time_s=9e-3),
        surface(op, time_s=5e-4, lowering="compiled"),
    )  # fmt: skip
    store.write(tmp_path / "costs.json", several)
    found = store.read(tmp_path / "costs.json", Costs)
    assert found == several and found.schema_version == 5
    prices = Prices(found)
    assert prices.estimate(op).time_s == 1e-3
    assert prices.estimate(msgspec.structs.replace(op, dtype="fp32")).time_s == 9e-3
    assert prices.estimate(op, How("cold", "compiled")).time_s == 5e-4


def test_costs_of_version_1_are_refused_with_the_command_that_makes_new_ones(tmp_path):
    old = tmp_path / "costs.json"
    old.write_text('{"schema_version": 1, "runs": ["20260101T000000-measure-profile"]}')
    with pytest.raises(ValueError, match=r"is 1, .* reads 5; .*meshwise calibrate RUN.*20260101T"):
        store.read(old, Costs)


@pytest.mark.parametrize("shape", [(1, 1), (0, 1, 1)])
def test_a_surface_that_cannot_be_is_refused(shape):
    with pytest.raises(ValueError, match=r"Surface\.shapes"):
        surface(Gemm(m=1, n=1, k=1), shape)
    with pytest.raises(ValueError, match=r"Surface\.dims"):
        msgspec.structs.replace(surface(Gemm(m=1, n=1, k=1)), dims=("m", "n", "seq"))


def test_shaped_operations_have_coordinates_of_their_own_fields():
    for kind in typing.get_args(Shaped):
        fields = {f: values(kind, f)[0] for f in kind.__struct_fields__}
        assert set(op_key(kind(**fields), How(), HOSTS).coordinates) <= set(kind.__struct_fields__)


def test_beside_each_other_both_count():
    op = Overlap(compute=PLAIN, collective=Collective(kind="send", size_bytes=8, group_size=2))
    found = op_key(op, How(), HOSTS)
    assert "attention bf16 forward causal" in found.name and "2 by nvlink" in found.name
    assert found.coordinates["compute kv_len"] == 1024
