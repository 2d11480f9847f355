"""Read the metrics of a sample, each a number or several."""

from collections.abc import Mapping

Metrics = Mapping[str, float | tuple[float, ...]]


def each(metrics: Metrics, name: str) -> tuple[float, ...]:
    """All values of a metric, none where it is missing."""
    value = metrics.get(name, ())
    return value if isinstance(value, tuple) else (value,)


def number(metrics: Metrics, name: str) -> float | None:
    """The first value of a metric."""
    return next(iter(each(metrics, name)), None)
