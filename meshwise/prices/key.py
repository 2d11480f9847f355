"""Price keys: each field of an operation is category, coordinate or derived.

Operations of one *category* share a price, and categories are never mixed. A price is interpolated
over *coordinates*. A *derived* field does not count by itself; its mark gives the reason. How the
work ran (cold or warm, one call or many in a row, eager or compiled, by whose code) belongs to the
category.

A group of ranks is identified by its links: how many of its ranks are within each tier, and how
many groups share a link into that tier, since all groups work at once. With hosts of 8, one rank on
each of 8 hosts is ``8 by network (8 a link)``.
"""

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec

from meshwise.prices.uneven import even_bytes
from meshwise.spec import (
    AnyModel,
    Attention,
    Block,
    Case,
    Cluster,
    Collective,
    Convolution,
    Curve,
    Elementwise,
    Factor,
    Gemm,
    Op,
    Overlap,
    Surface,
    WideResNet,
    digest,
)
from meshwise.spec.costs import Price
from meshwise.spec.label import storage
from meshwise.spec.op import REDUCING, Lowering, Regime
from meshwise.spec.recipe import AttentionBackend

Category = tuple[tuple[str, str], ...]
Mark = tuple[Literal["category", "coordinate", "derived"], str, Any]  # name, and value or reason
Role = Callable[[Any, str, Cluster], tuple[Mark, ...]]

NO_SIZES: dict[str, Any] = {"name": "", "layers": 1, "max_seq_len": 2**20}  # not a layer's sizes
ONE_KERNEL = (
    "copy", "add", "mul", "cast", "adamw", "sgd", "adafactor", "grad_norm", "h2d", "d2h",
)  # fmt: skip


class How(NamedTuple):
    """The way work runs: fields of ``Case``, which explains them."""

    regime: Regime = "warm"
    lowering: Lowering = "eager"
    backend: str = ""


class Key(NamedTuple):
    """The key of a price: names and words of the category, names and values of the coordinates."""

    category: Category
    coordinates: dict[str, int]

    @property
    def name(self) -> str:
        """``gemm bf16 nt cold``, ``all_reduce fp32 in place 4 by nvlink``; no warm, no eager."""
        usual = ("warm", "eager", "")
        return " ".join(word for _, word in self.category if word not in usual)


def op_key(op: Op, how: How, cluster: Cluster) -> Key:
    """Return the key of an operation. A group too large for the cluster raises a ValueError."""
    category, coordinates = dict[str, str](), dict[str, int]()
    for kind, name, value in marks(op, cluster):
        if kind != "derived":
            (category if kind == "category" else coordinates)[name] = value
    return Key((*category.items(), *zip(How._fields, how, strict=True)), coordinates)


def marks(op: Op, cluster: Cluster) -> list[Mark]:
    """Return the marks of each field of ``op``, in the order of ``FIELDS``."""
    found: list[Mark] = [("category", "op", type(op).__struct_config__.tag)]
    return found + [m for f, role in FIELDS[type(op)].items() for m in role(op, f, cluster)]


def how(of: Case | Price) -> How:
    return How(of.regime, of.lowering, of.backend)


def name_of(price: Curve | Surface | Factor, cluster: Cluster) -> str:
    """Return the name of a price's category."""
    return op_key(price.like, how(price), cluster).name


def in_step(
    op: Op, cluster: Cluster, lowering: Lowering, attention: AttentionBackend = "auto"
) -> How:
    """Return how a training step runs an operation; ``measure profile`` times it the same way.

    On a GPU products, attention and element-wise work are cold: weights were read a microbatch ago,
    and activations of tens of MB leave L2 when the next kernel writes as many. Collectives are
    warm: kernels wrote their input just before, into buffers that are reused. Blocks are warm, too:
    their kernels share the cache as in a step. On a CPU all work is warm: there is no reliable
    flush, and rotated buffers alone would time page faults.

    Single operations are eager: compiled code calls the same kernels for products, attention and
    collectives. The factors of its blocks cover its fused element-wise work.

    ``attention``: the recipe's back end; attention with a window chooses its kernels itself.
    """
    if isinstance(op, Block | Overlap):
        return How("warm", lowering)
    warm = cluster.device.kind == "cpu" or isinstance(op, Collective)
    named = isinstance(op, Attention) and op.window is None and attention != "auto"
    return How("warm" if warm else "cold", backend=attention if named else "")


def size(op: Op, dim: str) -> int:
    """Return a coordinate of an operation. An absent field has the value of a plain operation."""
    value = getattr(op, dim)
    if value is None:
        value = getattr(op, {"head_dim_v": "head_dim", "window": "kv_len"}[dim])
    return int(value)


def links(op: Collective, cluster: Cluster) -> str:
    """Return ranks in each tier, groups per link: ``2 by nvlink, 8 by network (4 a link)``."""
    if not op.ranks and op.group_size > 1:
        cluster.tier_of(op.group_size, op.group_stride)  # raises if there is none
    words, within, reach = [], 1, 1
    for tier in cluster.tiers:
        inside = min(op.group_size, -(-tier.num_devices // op.group_stride))
        if op.ranks:
            inside = max(Counter(rank // tier.num_devices for rank in op.ranks).values())
        shared = 1 if op.ranks else min(reach, op.group_stride)
        if inside > within:
            words.append(f"{inside} by {tier.name}" + (f" ({shared} a link)" if shared > 1 else ""))
        within, reach = inside, tier.num_devices
    if within < op.group_size:
        raise ValueError(f"ranks {op.ranks}: cluster {cluster.name!r} has {cluster.num_devices}")
    return ", ".join(words)


def _category(op: Any, field: str, _: Cluster) -> tuple[Mark, ...]:
    value = getattr(op, field)
    word = field.replace("_", " ") if value is True else value if value != "none" else ""
    return (("category", field, word or ""),)


def _word(of: Callable[[Any], str], name: str = "") -> Role:
    return lambda op, field, _: (("category", name or field, of(op)),)


def _coordinate(name: str = "") -> Role:
    """Return the role of a coordinate: a field, or the property ``name`` of several fields."""
    return lambda op, field, _: (("coordinate", name or field, getattr(op, name or field)),)


def _unlike(plain: Callable[[Any], Any], word: str) -> Role:
    """Return the role of a field that is category and coordinate if it differs from ``plain``."""

    def role(op: Any, field: str, _: Cluster) -> tuple[Mark, ...]:
        value = getattr(op, field)
        if value in (None, plain(op)):
            return ("category", field, ""), ("derived", field, "says what is so without it")
        return ("category", field, word), ("coordinate", field, value)

    return role


def _kv_heads(op: Attention, field: str, _: Cluster) -> tuple[Mark, ...]:
    word = "" if op.kv_heads == op.heads else "GQA"
    return ("category", field, word), ("coordinate", field, op.kv_heads)


def _direction(op: Elementwise, field: str, _: Cluster) -> tuple[Mark, ...]:
    if op.kind in ONE_KERNEL:
        return (("derived", field, "one kernel for both"),)
    return (("category", "op", f"{op.kind} {op.direction}"),)


def _dtype(op: Collective, field: str, cluster: Cluster) -> tuple[Mark, ...]:
    if op.kind in REDUCING:
        return _category(op, field, cluster)
    return ("category", field, ""), ("derived", field, "bytes are moved, whatever they mean")


def _links(op: Collective, field: str, cluster: Cluster) -> tuple[Mark, ...]:
    found: Mark = ("category", "group", links(op, cluster))
    return (found,) if field == "group_size" else (found, ("derived", field, "counts by its links"))


def _even_bytes(op: Collective, field: str, _: Cluster) -> tuple[Mark, ...]:
    return (("coordinate", field, even_bytes(op)),)


def _nested(op: Overlap, field: str, cluster: Cluster) -> tuple[Mark, ...]:
    return tuple((of, f"{field} {name}", x) for of, name, x in marks(getattr(op, field), cluster))


@lru_cache
def _sizes(model: AnyModel) -> str:
    if isinstance(model, WideResNet):
        width = f"c{model.channels}"
        plain = {"name": "", "num_classes": 1, "blocks": (1,) * len(model.blocks)}
    else:
        width, plain = f"h{model.hidden}", NO_SIZES
    return f"{width} {digest(msgspec.structs.replace(model, **plain))[:8]}"


def _model(op: Block, field: str, _: Cluster) -> tuple[Mark, ...]:
    experts = not isinstance(op.model, WideResNet) and op.model.experts is not None
    words = str(type(op.model).__struct_config__.tag), "experts" if experts else ""
    return (
        ("category", "model", " ".join(filter(None, words))),
        ("category", "sizes", _sizes(op.model)),
        ("derived", field, "one layer is alike, whatever name, layers and longest sequence"),
    )


def _all(role: Role, fields: str) -> dict[str, Role]:
    return dict.fromkeys(fields.split(), role)


# The fields of each record; their order is that of the words in a name. A new record needs a line.
FIELDS: dict[type, dict[str, Role]] = {
    Gemm: {
        **_all(_category, "dtype"), **_all(_word(storage, "storage"), "trans_a trans_b"),
        **_all(_category, "scaling"), "groups": _unlike(lambda op: 1, "grouped"),
        **_all(_category, "batched"),
        **_all(_coordinate(), "m n k"),
    },
    Attention: {
        **_all(_category, "dtype direction causal"), "window": _unlike(lambda op: None, "windowed"),
        "head_dim_v": _unlike(lambda op: op.head_dim, "MLA"), "kv_heads": _kv_heads,
        **_all(_coordinate(), "batch q_len kv_len heads head_dim"),
    },
    Convolution: {
        **_all(_category, "dtype product"),
        "kernel": _word(lambda op: f"{op.kernel}x{op.kernel}"),
        "stride": _word(lambda op: f"stride {op.stride}" if op.stride > 1 else ""),
        **_all(_coordinate(), "batch in_channels out_channels height width"),
    },
    Elementwise: {
        "kind": _word(lambda op: op.kind, "op"), "direction": _direction,
        **_all(_coordinate("bytes"), "read_bytes write_bytes"),
        **_all(lambda op, field, _: (("derived", field, "bytes count"),), "rows width dtype"),
    },
    Collective: {
        "kind": _word(lambda op: op.kind, "op"), "dtype": _dtype, **_all(_category, "in_place"),
        "redop": _word(lambda op: "" if op.redop == "sum" else op.redop),
        "root": _word(lambda op: f"root {op.root}" if op.root else ""),
        **_all(_links, "group_size group_stride ranks"), "size_bytes": _even_bytes,
        "splits": lambda op, field, _: (("derived", field, "size_bytes is the busiest rank's"),),
    },
    Overlap: _all(_nested, "compute collective"),
    Block: {
        "part": _word(lambda op: op.part, "op"), **_all(_category, "form"), "model": _model,
        **_all(_category, "direction dtype"),
        "tp": _word(lambda op: f"tp{op.tp}"),
        "sequence_parallel": _word(lambda op: "sp" if op.sequence_parallel else ""),
        "cp": _word(lambda op: f"cp{op.cp}" if op.cp > 1 else ""),
        "ep": _word(lambda op: f"ep{op.ep}" if op.ep > 1 else ""),
        "recompute": lambda op, field, _: (
            ("category", field, "" if op.recompute == "none" else f"{field} {op.recompute}"),
        ),
        **_all(_coordinate("activation_elements"), "microbatch_size seq_len"),
    },
}  # fmt: skip


def outermost(group: str) -> tuple[int, str]:
    """Return the ranks of a group over its outermost links, and the name of these."""
    count, _, links = group.rpartition(", ")[2].partition(" (")[0].partition(" by ")
    return int(count or 1), links
