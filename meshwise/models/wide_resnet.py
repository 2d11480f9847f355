"""The Wide-ResNets of Alpa's table (OSDI'22, table 5; benchmark/alpa suite_wresnet.py)."""

from meshwise.spec import WideResNet

_SIZES = {  # blocks, channels, width_factor
    "wresnet-250m": ((3, 4, 6, 3), 160, 2),
    "wresnet-500m": ((3, 4, 6, 3), 224, 2),
    "wresnet-1b": ((3, 4, 6, 3), 320, 2),
    "wresnet-2b": ((3, 4, 6, 3), 448, 2),
    "wresnet-4b": ((3, 4, 6, 3), 640, 2),
    "wresnet-6.8b": ((3, 4, 6, 3), 320, 16),
    "wresnet-13b": ((3, 4, 23, 3), 320, 16),
}


def names() -> tuple[str, ...]:
    return tuple(_SIZES)


def sized(name: str) -> WideResNet:
    """The model called ``name``."""
    if name not in _SIZES:
        raise ValueError(f"model {name!r} is not in the catalogue; known: {', '.join(_SIZES)}")
    blocks, channels, width_factor = _SIZES[name]
    return WideResNet(name=name, blocks=blocks, channels=channels, width_factor=width_factor)
