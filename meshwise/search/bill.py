"""Say what a training takes of time, money and energy, by rates that the user states.

device hours = tokens / (tokens of a step) * (p50 of a step) / goodput * devices / 3600
dollars = device hours * price            kWh = device hours * watts / 1000
"""

from meshwise.spec import Bill, Plan


def bill(
    plan: Plan, tokens: float, price: float | None, watts: float | None, goodput: float = 1.0
) -> Bill:
    """Return the bill of ``tokens`` (or images) under the plan. ``price``: dollars of a device
    hour; ``watts``: of a device, all it needs included; ``goodput``: the share of the time that
    trains. A plan without a prediction raises a ValueError."""
    if plan.prediction is None:
        raise ValueError("Plan.prediction is None: the plan was not priced; meshwise plan does")
    seconds = tokens / plan.workload.tokens * plan.prediction.usual_s / goodput
    hours = seconds * plan.layout.num_devices / 3600
    return Bill(
        tokens=tokens,
        seconds=seconds,
        device_hours=hours,
        dollars=None if price is None else price * hours,
        kwh=None if watts is None else watts * hours / 1000,
    )
