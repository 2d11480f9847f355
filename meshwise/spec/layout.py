"""How a model is laid out: the degree of every mesh axis, and how the batch is cut."""

from typing import Annotated, Literal

from msgspec import Meta

from meshwise.spec.record import Positive, Record


class Workload(Record, kw_only=True):
    """One training step: ``global_batch_size`` sequences of ``seq_len`` tokens."""

    global_batch_size: Positive
    seq_len: Positive

    @property
    def tokens(self) -> int:
        return self.global_batch_size * self.seq_len


class Layout(Record, kw_only=True):
    """Degrees of the mesh axes (tp innermost) and the cut of the batch.

    ``zero``: 0 replicates the model over dp, 1 shards optimizer state, 2 gradients too, 3
    parameters too. The batch of a step is ``dp * microbatch_size * num_microbatches``.
    """

    dp: Positive = 1
    tp: Positive = 1
    pp: Positive = 1
    zero: Annotated[int, Meta(ge=0, le=3)] = 0
    sequence_parallel: bool = False
    microbatch_size: Positive = 1
    num_microbatches: Positive = 1
    recompute: Literal["none"] = "none"

    def check(self) -> None:
        if self.zero and self.dp == 1:
            self.fail("zero", "shards over dp, which is 1; use zero = 0")
        if self.sequence_parallel and self.tp == 1:
            self.fail("sequence_parallel", "shards over tp, which is 1; set it to false")
        if self.pp != 1:
            self.fail("pp", "pipelines are not built yet; use pp = 1")

    @property
    def num_devices(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def name(self) -> str:
        """``dp4 zero3 mb8x1`` or ``dp2 tp2+sp zero1 mb4x2``: microbatch size x count."""
        parts = [f"dp{self.dp}"] if self.dp > 1 or self.tp == 1 else []
        if self.tp > 1:
            parts.append(f"tp{self.tp}" + ("+sp" if self.sequence_parallel else ""))
        if self.zero:
            parts.append(f"zero{self.zero}")
        parts.append(f"mb{self.microbatch_size}x{self.num_microbatches}")
        return " ".join(parts)
