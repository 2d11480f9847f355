"""Image classifiers: sizes only, as ``spec/model.py`` has them for language models."""

from bisect import bisect
from itertools import accumulate

from meshwise.spec.record import Count, Length, Record

MOST_RESOLUTIONS = 8
EXPANSION = 4  # channels of a bottleneck's output to its filters


class WideResNet(Record, kw_only=True, tag_field="family", tag="wide_resnet"):
    """A residual network of bottlenecks whose middle convolution is ``width_factor`` times wider
    (He et al. 2016; Zagoruyko and Komodakis 2016).

    ``blocks``: bottlenecks of each resolution, (3, 4, 6, 3) for depth 50. Resolution i has
    f = channels * 2^i filters; a bottleneck of input n has convolutions [f, n, 1, 1],
    [width_factor*f, f, 3, 3] and [4f, width_factor*f, 1, 1], a norm behind each, and where its
    input and output differ a shortcut [4f, n, 1, 1] with a norm. The first bottleneck of every
    resolution but the first halves height and width. Before them a stem [channels, 3, 7, 7] and a
    max pooling, each halving both; behind them the mean over the image and a linear head with bias.
    """

    name: str = ""
    blocks: tuple[Count, ...] = (3, 4, 6, 3)
    channels: Length
    width_factor: Count = 1
    image_size: Length = 224
    num_classes: Count = 1024

    def check(self) -> None:
        if not 1 <= len(self.blocks) <= MOST_RESOLUTIONS:
            self.fail("blocks", f"must be 1 to {MOST_RESOLUTIONS} numbers, one for each resolution")

    @property
    def layers(self) -> int:
        """Residual blocks: where a pipeline may cut."""
        return sum(self.blocks)

    def kind_of(self, layer: int) -> str:
        """Name the layers that are alike: those of a resolution (``0.rest``) but its first, which
        changes the shape (``0.first``)."""
        starts = list(accumulate(self.blocks, initial=0))
        resolution = bisect(starts, layer) - 1
        return f"{resolution}.{'first' if layer == starts[resolution] else 'rest'}"

    @property
    def depth(self) -> int:
        """Convolutions on the longest path and the head: 50 for (3, 4, 6, 3)."""
        return 3 * self.layers + 2
