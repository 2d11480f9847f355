"""Layouts of loaders in files: what each rank does, ``FOLDER/rank-0.json`` and so on.

In: a ``Loaded``. Out: its file, and the same ``Loaded`` of it. With the file a destination can be
planned without its loader: no second model is made, and where the server's library is not
installed, ``tensors`` makes plain tensors that can be filled.
"""

from pathlib import Path

import msgspec
import torch
from torch import Tensor

from meshwise import files, store
from meshwise.bridges.loader import Loaded, padding
from meshwise.reshard.holdings import HeldTensor
from meshwise.reshard.regions import Box, Piece
from meshwise.reshard.transports.copies import DTYPES
from meshwise.spec.loader import Filled, Loadable, LoadedBox, LoaderLayout

_MOST_BYTES = 2**27  # the 45,000 tensors of DeepSeek-V3's experts are some 10 MB


def file_of(folder: Path | str, rank: int) -> Path:
    return Path(folder) / f"rank-{rank}.json"


def write(path: Path | str, loaded: Loaded, *, loader: str = "") -> Path:
    """Write what a loader does on one rank, whole or not at all. ``loader``: whose it is."""
    record = LoaderLayout(
        loader=loader,
        config=loaded.config,
        parameters={
            name: Filled(
                shape=shape, dtype=dtype, order=loaded.turned.get(name, ()),
                unfilled=loaded.unfilled.get(name, 0), computed=loaded.computed.get(name, ""),
            )
            for name, (shape, dtype) in loaded.parameters.items()
        },
        tensors={
            name: Loadable(
                shape=held.shape,
                boxes=tuple(
                    LoadedBox(parameter=p.buffer, low=p.box.low, high=p.box.high, offset=p.offset)
                    for p in held.layout
                ),
            )
            for name, held in loaded.holdings.items()
        },
        unread=loaded.unread,
    )  # fmt: skip
    return files.write_whole(Path(path), msgspec.json.encode(record) + b"\n")


def read(path: Path | str) -> LoaderLayout:
    """Read a rank's file. ValueError, in one line, names what is wrong in it."""
    data = files.read_bytes(path, at_most=_MOST_BYTES)
    plain = files.parse_json(data, str(path), at_most=_MOST_BYTES)
    found = store.convert(plain, LoaderLayout, str(path))
    for name, parameter in found.parameters.items():
        if parameter.dtype not in DTYPES and not parameter.computed and not parameter.unfilled:
            raise ValueError(f"{path}: {name}: dtype {parameter.dtype!r} cannot be moved")
    return found


def loaded(layout: LoaderLayout, rank: int = 0) -> Loaded:
    """Return what the loader did, as ``rank``'s."""
    held, done = {}, set[str]()
    for name, tensor in layout.tensors.items():
        pieces = tuple(
            Piece(rank, Box(box.low, box.high), box.offset, box.parameter) for box in tensor.boxes
        )
        padded = []
        for buffer in dict.fromkeys(piece.buffer for piece in pieces):
            of = layout.parameters[buffer]
            if of.unfilled and buffer not in done:
                done.add(buffer)
                shape = [of.shape[dim] for dim in of.order or range(len(of.shape))]
                padded.append(padding(rank, buffer, shape, len(tensor.shape)))
        dtype = layout.parameters[pieces[0].buffer].dtype
        held[name] = HeldTensor(tensor.shape, dtype, pieces, tuple(padded))
    of_each = layout.parameters.items()
    return Loaded(
        held,
        {name: of.order for name, of in of_each if of.order},
        {name: of.computed for name, of in of_each if of.computed},
        layout.unread,
        {name: of.unfilled for name, of in of_each if of.unfilled},
        {name: (of.shape, of.dtype) for name, of in of_each},
        layout.config,
    )


def tensors(layout: LoaderLayout, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Make zeros of every parameter's shape and dtype, to be filled where there is no model."""
    return {
        name: torch.zeros(of.shape, dtype=DTYPES[of.dtype], device=device)
        for name, of in layout.parameters.items()
    }
