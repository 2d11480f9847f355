"""What a model is: sizes only. ``models/`` turns it into operations, ``nn/`` into a module."""

from typing import Annotated

from msgspec import Meta

from meshwise.spec.record import Positive, Record


class Model(Record, kw_only=True, tag_field="family", tag="gpt"):
    """A GPT-2 style decoder: learned positions, LayerNorm, GELU, biases, tied head.

    Shapes: embedding [vocab, hidden], positions [max_seq_len, hidden]; per layer qkv
    [3*heads*head_dim, hidden], out [hidden, heads*head_dim], up [ffn, hidden], down
    [hidden, ffn], each with a bias, and two norms of 2*hidden.
    """

    name: str = ""
    hidden: Positive
    layers: Annotated[int, Meta(ge=1, le=10_000)]
    heads: Positive
    ffn: Positive
    vocab: Positive = 51200
    max_seq_len: Positive = 1024

    def check(self) -> None:
        if self.hidden % self.heads:
            self.fail("heads", f"must divide hidden = {self.hidden}")

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads
