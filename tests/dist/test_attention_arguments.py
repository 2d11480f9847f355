"""Arguments of attention: exact types, on all ranks alike, and tensors changed in place."""

import functools
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from meshwise.attention import RingDilatedAttention, dilated_attention, ring_attention
from meshwise.attention.shards import Shards
from meshwise.spec import Dilation
from tests.pace import paced

pytestmark = pytest.mark.dist
BRANCHES = Dilation(segment_lengths=(4, 64), dilation_rates=(1, 2))
WITHIN_S = paced(5.0)  # half of what a collective waits here


def rows(heads=4, kv_heads=2, n=8, dtype=torch.float32):
    return [torch.randn(2, n, h, 8, dtype=dtype) for h in (heads, kv_heads, kv_heads)]


def attention(kind, q, k, v, **given):
    if kind == "ring":
        return ring_attention(q, k, v, **given)
    if kind == "dilated":
        return dilated_attention(q, k, v, given.pop("dilation", BRANCHES), **given)
    given = {("is_causal" if name == "causal" else name): value for name, value in given.items()}
    return RingDilatedAttention((4, 64), (1, 2))(q, k, v, **given)


def said(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing"


# ---- types. What cannot travel as JSON has a name.

MADE = {
    "array": lambda: np.ones(2),
    "halves": lambda: torch.tensor([0.0, 0.5]),
    "flags": lambda: torch.tensor([False, True]),
    "table": lambda: torch.zeros(2, 2, dtype=torch.int64),
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "one": lambda: torch.tensor(1),
    "intervals": lambda: (((0, 8),),),
    "listed": lambda: Shards([[[0, 8]]]),
    "torn": lambda: Shards((((0.0, 8.0),),)),
    "dict": dict,
    "set": lambda: {0, 4},
    "integers": lambda: torch.ones(2, 8, 4, 8, dtype=torch.int64),
    "numbers": lambda: np.zeros((2, 8, 4, 8), dtype=np.float32),
    "complex": lambda: torch.zeros(2, 8, 4, 8, dtype=torch.complex64),
    "sparse": lambda: torch.zeros(2, 8, 4, 8).to_sparse(),
    "meta": lambda: torch.zeros(2, 8, 2, 8, device="meta"),
    "double": lambda: torch.zeros(2, 8, 2, 8, dtype=torch.float64),
    "thin": lambda: torch.zeros(2, 8, 8),
}  # fmt: skip
BOTH = [
    *[("causal", x) for x in ("no", 0, 1, None, "=one", "=array")],
    *[("scale", x) for x in ("1", True, 0, -1.0, "=nan", "=inf", "=one")],
    *[("shards", x) for x in ([8], "8", "=intervals", "=listed", "=torn")],
    *[("way", x) for x in (None, 3, "star", "", ["ring"], "=array")],
    *[("prices", x) for x in ("costs.json", 1, "=dict")],
    *[("return_lse", x) for x in ("no", 1, None)],
    *[("q", x) for x in (None, 1.0, "=integers", "=numbers", "=complex", "=sparse", "=thin")],
    *[("k", x) for x in (None, [1], "=double", "=meta", "=thin")],
    *[("v", x) for x in (None, "v", "=double", "=meta", "=thin")],
]
WRONG = [("ring", *each) for each in BOTH] + [("dilated", *each) for each in BOTH]
WRONG += [("ring", "window", x) for x in (2.0, "4", True, 0, -1, "=one", "=inf")]
WRONG += [
    ("ring", "documents", x)
    for x in ([0.7], [True], ["0"], 4, "04", [[0]], [None], [-1], [4, 2], [0, 9], {"0": 1},
              "=halves", "=flags", "=table", "=one", "=set", "=array")
]  # fmt: skip
WRONG += [("dilated", "dilation", x) for x in (None, 4, [4], "=dict")]
WRONG += [("module", "causal", x) for x in ("no", 1, None)]
WRONG += [("module", x, None) for x in "qkv"]


def made(value):
    return MADE[value[1:]]() if isinstance(value, str) and value.startswith("=") else value


def called(kind, name, value):
    q, k, v = rows()
    given = {"q": q, "k": k, "v": v} | ({"causal": True} if name == "window" else {})
    return said(lambda: attention(kind, **given | {name: made(value)}))


@pytest.mark.parametrize(("kind", "name", "value"), WRONG)
def test_another_type_is_a_value_error_that_names_field_and_value(kind, name, value):
    text = called(kind, name, value)
    together = name in ("q", "k", "v") and isinstance(made(value), torch.Tensor)
    assert (name if together else f"{name} = ") in text and text != "nothing", text
    assert "\n" not in text and len(text) <= 293


@pytest.mark.parametrize("documents", [(0, 4), [0, 4], torch.tensor([0, 4]), np.array([0, 4])])
def test_documents_are_ints_of_any_sequence(documents):
    q, k, v = rows()
    first = ring_attention(q, k, v, documents=documents)
    assert torch.equal(first, ring_attention(q, k, v, documents=[0, 4]))
    assert not torch.equal(first, ring_attention(q, k, v))


@pytest.mark.parametrize(
    "given",
    [
        {"segment_lengths": [4.0]},
        {"segment_lengths": 4},
        {"dilation_rates": ["1"]},
        {"dropout": "no"},
        {"dropout": 0.1},
        {"dropout": None},
        {"ring_size": "2"},
        {"ring_size": True},
        {"ring_size": 0},
        {"device": 3.5},
        {"dtype": "float32"},
        {"dtype": torch.int64},
        {"causal": "no"},
        {"causal": 1},
        {"offsets": None},
        {"mixture": 2},
        {"group": "all"},
        {"shards": [8]},
        {"way": "star"},
        {"way": 1},
        {"prices": "costs.json"},
        {"return_lse": "no"},
    ],
)
def test_a_module_of_other_types_is_refused_by_name(given):
    (name,) = given
    branch = {"segment_lengths": [4], "dilation_rates": [1]}
    text = said(lambda: RingDilatedAttention(**branch | given))
    assert f"{name} = " in text and "\n" not in text and len(text) <= 293, text


@pytest.mark.parametrize("of", [ring_attention, functools.partial(attention, "dilated")])
@pytest.mark.parametrize("given", [{"group": "all"}, {"group": 0}, {"wire": "w"}, {"wire": 0}])
def test_a_group_or_wire_of_another_type_is_refused_by_name(of, given):
    (name,) = given
    assert f"{name} = " in said(lambda: of(*rows(), **given))


# ---- one rank's malformed argument


def one_is_wrong(ranks, kind, name, value, culprit):
    """What each rank was told, how long that took, and whether the group works after it."""
    attend = functools.partial(attention, kind)
    started = time.monotonic()
    if ranks.rank == culprit:
        text = called(kind, name, value)
    else:
        text = said(lambda: attend(*rows(), causal=name == "window"))
    took_s = time.monotonic() - started
    return text, took_s, bool(attend(*rows()).isfinite().all())


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("ring", "causal", "no"),
        ("ring", "documents", [0.7]),
        ("ring", "window", 2.0),
        ("ring", "q", None),
        ("ring", "v", "=integers"),
        ("ring", "shards", [8]),
        ("ring", "prices", "costs.json"),
        ("dilated", "dilation", 4),
        ("dilated", "k", "=double"),
        ("dilated", "scale", "=nan"),
        ("dilated", "return_lse", 1),
        ("module", "causal", "no"),
    ],
)
def test_one_rank_s_malformed_argument_is_an_error_of_all(gloo_ranks, kind, name, value):
    for culprit in (1, 0):
        found = gloo_ranks(3, one_is_wrong, kind=kind, name=name, value=value, culprit=culprit)
        for text, took_s, works in found:
            assert f"rank {culprit}: " in text and name in text, text
            assert "\n" not in text and len(text) <= 293
            assert took_s < WITHIN_S and works


# ---- in place


def in_place(ranks, kind, name, given):
    """How far a change in place is from the gradient of the same out of place, or the error."""
    options = {"return_lse": True} if kind != "module" else {}
    options |= {key: value for key, value in given.items() if key != "kv_heads"}
    torch.manual_seed(3 + ranks.rank)
    made = rows(4, given.get("kv_heads", 4), 8, torch.float64)
    leaves = [x.requires_grad_() for x in made]
    weights = torch.randn(2, 8, 4, 8, dtype=torch.float64)
    change, (_, of) = CHANGES[name], name.split()

    def gradients(here):
        inputs = [x * 1.0 for x in leaves]
        found = attention(kind, *inputs, **options)
        out, lse = (found, None) if kind == "module" else found
        if of == "out":
            out = change(out, here)
        elif of == "part":
            first = change(out[:, :4], here)
            out = out if here else torch.cat([first, out[:, 4:]], 1)
        elif here and of == "lse":
            lse is None or change(lse, True)
        elif here:  # after the call, which has read them
            change(inputs["qkv".index(of)], True)
        return torch.autograd.grad((out * weights).sum(), leaves)

    plain = gradients(False)
    try:
        changed = gradients(True)
    except RuntimeError as error:
        return str(error)
    return max(float((a - b).abs().max()) for a, b in zip(plain, changed, strict=True))


def _scaled(x, here):
    return x.mul_(2) if here else x * 2


def _added(x, here):
    return x.add_(1) if here else x + 1


def _rectified(x, here):
    return F.relu(x, inplace=here)


CHANGES = {
    "add out": _added, "scale out": _scaled, "relu out": _rectified, "add part": _added,
    "relu part": _rectified, "add lse": _added, "scale q": _scaled, "scale k": _scaled,
    "scale v": _scaled,
}  # fmt: skip
CALLS = [
    *[("ring", {"way": way, "causal": True}) for way in ("heads", "ring", "gather", "auto")],
    ("ring", {"way": "heads", "kv_heads": 1}),
    ("ring", {"causal": True, "window": 3}),
    ("ring", {"documents": [0, 3]}),
    *[("dilated", {"way": way, "causal": True}) for way in ("auto", "gather", "heads", "ring")],
    *[
        ("dilated", {"dilation": {"segment_lengths": w, "dilation_rates": r, "mixture": m}})
        for w, r in (((8,), (1,)), ((4,), (1,)), ((64,), (3,)), ((4, 64), (1, 2)))
        for m in ("exact", "detached")
    ],
    ("module", {}),
]  # fmt: skip


def all_in_place(ranks):
    found = []
    for kind, given in CALLS:
        if "dilation" in given:
            given = given | {"dilation": Dilation(**given["dilation"])}
        found.append({name: in_place(ranks, kind, name, given) for name in CHANGES})
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_changes_in_place_have_the_right_gradient_or_say_why(gloo_ranks, ranks):
    for found in gloo_ranks(ranks, all_in_place):
        for call, differences in zip(CALLS, found, strict=True):
            for change, difference in differences.items():
                if isinstance(difference, str):  # torch's, of a tensor that the backward needs
                    assert "modified by an inplace operation" in difference, (call, change)
                else:
                    assert difference < 1e-12, (call, change, difference)
