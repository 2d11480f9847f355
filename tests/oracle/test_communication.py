"""The parts that data parallelism adds to a step, beside the kernels of profiled steps.

A compiled Llama 2.6B step by FSDP2 over 4 H200 takes 291.3 ms, 259.3 without communication. Of the
32.0 ms, 12.6 are FSDP's copies and 4.0 exposed messages (benchmarks/2026-11-21-llama-2.6b-fsdp4).
"""

from pathlib import Path

import pytest

from meshwise import fit, search, store
from meshwise.prices import Prices
from meshwise.spec import AnyModel, Layout, Workload

STORED = Path(__file__).parents[2] / "benchmarks"
COPIES_S, EXPOSED_S, ALL_S = 12.6e-3, 4.0e-3, 32.0e-3  # measured
SLOWER_S = ALL_S - COPIES_S - EXPOSED_S
PART = "data-parallel communication"


def test_27_of_the_32_ms_of_data_parallelism_are_explained():
    profiles = [
        *(STORED / "2026-11-27-four/plans-gpt-2.6b/runs").glob("*-measure-profile-*"),
        *(STORED / "2026-11-21-operators-4xh200/runs").glob("*-measure-profile-*"),
    ]
    assert len(profiles) == 4
    prices = Prices(fit.calibrate([store.load(path)[:2] for path in profiles]), datasheet=True)
    model = store.read(STORED / "2026-11-21-llama-2.6b-fsdp4/llama-2.6b.json", AnyModel)
    workload = Workload(global_batch_size=32, seq_len=1024)
    told = search.predict(model, workload, Layout(dp=4, zero=2, microbatch_size=8), prices)
    part_s = {part.name: part.value for part in told.time_parts}
    copies_s = part_s["copies of weights and gradients"]
    slower_s, exposed_s = part_s[f"work slowed down by {PART}"], part_s[f"{PART} (exposed)"]
    assert copies_s == pytest.approx(COPIES_S, rel=0.1)
    assert slower_s == pytest.approx(SLOWER_S, rel=0.3)
    assert exposed_s == pytest.approx(EXPOSED_S, rel=0.3)
    assert 27e-3 <= copies_s + slower_s + exposed_s <= ALL_S
