"""Plan a model on a cluster that nobody has measured, and ask what speaks for the plan.

    python examples/plan_from_data_sheets.py

Needs neither GPUs nor torch. Prices are of data sheets, so the interval is wide, and says so.
"""

import meshwise

RIVAL = (
    '{"dp": 2, "tp": 8, "sequence_parallel": true, "microbatch_size": 1, "num_microbatches": 64}'
)


def main() -> None:
    plan = meshwise.plan(
        "llama-3-8b",
        cluster="h100-hgx",
        hosts=2,
        seq_len=4096,
        global_batch_size="128",
        why_not=(RIVAL,),
    )
    step = plan.prediction
    assert step is not None
    print(f"{plan.layout.name}: {step.step_time_s:.2f} s a step, {step.tokens_per_s:,.0f} tokens/s")
    print(f"90 % of such steps take {step.low_s:.2f} to {step.high_s:.2f} s")
    print(f"{step.peak_memory_bytes / 2**30:.1f} GiB a device")
    for part in sorted(step.time_parts, key=lambda part: -part.value)[:4]:
        print(f"  {part.name}: {part.value:.3f} s")
    (why_not,) = plan.answers.why_not
    print(f"{why_not.layout.name} takes {why_not.slower_s:.2f} s longer, mostly:")
    print(f"  {why_not.time[0].part}: {why_not.time[0].more:.2f} s more")


if __name__ == "__main__":
    main()
