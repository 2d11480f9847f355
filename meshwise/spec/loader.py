"""The record of what a model's loader does with a checkpoint on one rank (``rank-0.json``)."""

from meshwise.spec.record import NonNegative, Positive, Record

SCHEMA_VERSION = 1


class LoadedBox(Record, kw_only=True):
    """A box [``low``, ``high``) of a checkpoint's tensor, and its ``offset`` in a parameter whose
    dims are in the checkpoint's order. Leading dims that one of them has more count as one."""

    parameter: str
    low: tuple[NonNegative, ...]
    high: tuple[NonNegative, ...]
    offset: tuple[NonNegative, ...]

    def check(self) -> None:
        if not len(self.low) == len(self.high) == len(self.offset):
            self.fail("offset", f"must have the {len(self.low)} dims of low, as high")
        if any(high <= low for low, high in zip(self.low, self.high, strict=True)):
            self.fail("high", f"must be above low = {self.low}")


class Loadable(Record, kw_only=True):
    """A tensor of the checkpoint and the boxes of it that this rank has."""

    shape: tuple[NonNegative, ...]
    boxes: tuple[LoadedBox, ...]

    def check(self) -> None:
        if not self.boxes:
            self.fail("boxes", "must be one at least; a tensor that is not used is in unread")
        for box in self.boxes:
            if len(box.high) != len(self.shape) or any(
                high > size for high, size in zip(box.high, self.shape, strict=True)
            ):
                self.fail("shape", f"must hold the box that ends at {box.high}")


class Filled(Record, kw_only=True):
    """A parameter. ``order`` of its dims in which it is as in the checkpoint, if it is transposed.
    ``unfilled``: elements filled from nowhere. ``computed``: the operation, if it is computed."""

    shape: tuple[NonNegative, ...]
    dtype: str
    order: tuple[NonNegative, ...] = ()
    unfilled: NonNegative = 0
    computed: str = ""

    def check(self) -> None:
        if self.order and sorted(self.order) != [*range(len(self.shape))]:
            self.fail("order", f"must be the numbers 0 to {len(self.shape) - 1}, each once")


class LoaderLayout(Record, kw_only=True):
    """The layout of one rank: what it holds of a checkpoint. ``loader``: whose it is, with its
    version. ``config``: sizes and counts of its model's configuration. ``unread``: tensors that it
    does not use."""

    schema_version: Positive = SCHEMA_VERSION
    loader: str = ""
    config: dict[str, int | bool] = {}
    parameters: dict[str, Filled]
    tensors: dict[str, Loadable]
    unread: tuple[str, ...] = ()

    def check(self) -> None:
        for name, tensor in self.tensors.items():
            dtypes = set[str]()
            for box in tensor.boxes:
                if box.parameter not in self.parameters:
                    raise ValueError(f"LoaderLayout.tensors {name}: no parameter {box.parameter}")
                dtypes.add(self.parameters[box.parameter].dtype)
            if len(dtypes) > 1:
                raise ValueError(f"LoaderLayout.tensors {name}: lies in {' and '.join(dtypes)}")
