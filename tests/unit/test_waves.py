"""Attention's tiles in waves: beside what was measured, and beside a clock that ticks."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from meshwise import fit, store
from meshwise.prices import Datasheet, shape_op
from meshwise.prices.waves import MULTIPROCESSORS, START, spent_flops, work_s
from meshwise.spec import Attention, Gemm

PROFILES = Path(__file__).parents[2] / "benchmarks/2026-11-28-fresh"


def attention(heads, tokens, width=128, **fields):
    fields = {"batch": 1, "kv_len": tokens, "kv_heads": heads, **fields}
    return Attention(q_len=tokens, heads=heads, head_dim=width, **fields)


@pytest.mark.parametrize("profile", ["h100-gpt-1.3b", "h100-llama-3-8b"])
def test_the_data_sheet_knows_the_attention_of_a_device_that_nothing_was_fitted_to(profile):
    (run,) = (PROFILES / profile / "runs").glob("*-measure-profile-*")
    info, samples, *_ = store.load(run)
    sheet, off = Datasheet(info.cluster), []
    for surface in fit.calibrate([(info, samples)]).surfaces:
        if isinstance(surface.like, Attention) and surface.like.direction == "forward":
            for shape, time_s in zip(surface.shapes, surface.time_s, strict=True):
                off.append(abs(sheet.time_s(shape_op(surface, shape))[0] / time_s - 1))
    assert len(off) >= 6
    assert np.median(off) < 0.03
    assert max(off) < 0.1


@pytest.mark.parametrize(("heads", "tokens"), [(3, 640), (16, 1024), (17, 1024), (40, 2048)])
@pytest.mark.parametrize("causal", [True, False])
def test_tiles_take_turns_as_on_a_clock(heads, tokens, causal):
    """Each tick a multiprocessor does one block of keys; one without a tile takes the next."""
    tiles = [
        1 + (i + 1 if causal else tokens // 128) for _ in range(heads) for i in range(tokens // 128)
    ]
    busy, ticks = [0] * MULTIPROCESSORS, 0
    while tiles or any(busy):
        busy = [tiles.pop(0) if not left and tiles else left for left in busy]
        busy = [max(0, left - 1) for left in busy]
        ticks += 1
    block = 4 * 128 * 128 * 128  # FLOPs of its two products
    spent = spent_flops(attention(heads, tokens, causal=causal))
    assert spent == pytest.approx(block * MULTIPROCESSORS * (START + ticks))


def test_a_product_spends_whole_tiles_and_memory_is_not_all_hidden():
    skinny, whole = (Gemm(m=1024, n=n, k=512) for n in (16, 128))
    assert spent_flops(skinny) == spent_flops(whole) == whole.flops
    assert work_s(whole, whole.flops / 3, whole.bytes / 4) == pytest.approx(5)  # of 3 s and 4 s


def test_a_wave_that_is_not_full_takes_as_long_and_heads_are_padded():
    spent = [spent_flops(attention(heads, 1024)) for heads in (8, 16, 17)]
    assert spent[0] == spent[1] < spent[2]
    widths = [spent_flops(attention(16, 1024, width)) for width in (64, 80, 128)]
    assert widths[0] < widths[1] == widths[2]


def test_many_tiles_are_counted_without_their_turns_and_windows_cut_them():
    long = attention(64, 8320)  # 4160 tiles take turns, 4224 and more do not
    longer = msgspec.structs.replace(long, heads=66, kv_heads=66)
    assert spent_flops(longer) / spent_flops(long) == pytest.approx(66 / 64, rel=0.02)
    short = msgspec.structs.replace(long, window=256)
    assert spent_flops(short) < spent_flops(long) / 8
