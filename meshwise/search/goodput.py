"""Say which share of the time trains, where devices fail and checkpoints take time.

N devices that fail every M1 seconds each fail every M = M1 / N together, at random: times between
failures are exponential. A checkpoint, made after T seconds of work, stops training for C seconds.
A failure loses the work since the last one and stops training for R seconds more, in which the
next may strike. Then T seconds of work take (Daly 2006, Future Generation Computer Systems 22)

    M exp(R / M) (exp((T + C) / M) - 1)

seconds in the mean, exactly. The goodput, T over that, is largest where

    (1 - T / M) exp((T + C) / M) = 1,  so that with Lambert's W
    T = M (1 + W(-exp(-1 - C / M)))

which is about sqrt(2 C M) for short checkpoints (Young 1974).
"""

import math

from meshwise.models import num_parameters
from meshwise.models.optimizer import WHOLE_STATES
from meshwise.prices.datasheet import attainable
from meshwise.spec import DTYPE_BYTES, AnyModel, Cluster, Goodput, Recipe

_LEAST = 1e-9  # of a goodput, so that times over it are numbers


def state_bytes(model: AnyModel, recipe: Recipe) -> int:
    """Return the bytes of all parameters and of the states that are as large."""
    each = DTYPE_BYTES[recipe.weights] * (1 + WHOLE_STATES[recipe.optimizer])
    return each * num_parameters(model)


def goodput(
    model: AnyModel,
    cluster: Cluster,
    num_devices: int,
    *,
    device_s: float | None = None,
    checkpoint_s: float | None = None,
    bytes_per_s: float | None = None,
    restart_s: float | None = None,
    recipe: Recipe | None = None,
) -> Goodput:
    """Return the goodput of a training, with the best time between checkpoints.

    ``device_s``: between failures of one device. ``bytes_per_s``: at which all ranks together write
    a checkpoint, if ``checkpoint_s`` is not given. What is not given is ``data/attainable.toml``'s.
    """
    from scipy.special import lambertw

    usual = attainable().failures
    mean_s = (device_s or usual.device_s) / num_devices
    hosts = -(-num_devices // cluster.num_devices_per_host)
    rate = bytes_per_s or hosts * usual.host_bytes_per_s
    saved_s = checkpoint_s or state_bytes(model, recipe or Recipe()) / rate
    again_s = restart_s or usual.restart_s
    work = 1 + float(lambertw(-math.exp(-1 - saved_s / mean_s)).real)  # T / M
    whole = work + saved_s / mean_s
    share = work * math.exp(-again_s / mean_s - whole) / -math.expm1(-whole)
    return Goodput(
        share=max(share, _LEAST),
        failure_s=mean_s,
        checkpoint_s=saved_s,
        each_s=work * mean_s,
        restart_s=again_s,
    )
