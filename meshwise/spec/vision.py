"""Image classifiers: sizes only, like language models in ``spec/model.py``."""

from bisect import bisect
from itertools import accumulate

from meshwise.spec.record import Count, Length, Record

MOST_RESOLUTIONS = 8
EXPANSION = 4  # channels of a bottleneck's output over its filters


class WideResNet(Record, kw_only=True, tag_field="family", tag="wide_resnet"):
    """A residual network of bottlenecks whose middle convolution is ``width_factor`` times wider
    (He et al. 2016; Zagoruyko and Komodakis 2016).

    ``blocks``: bottlenecks of each resolution, (3, 4, 6, 3) for depth 50. Resolution i has
    f = channels * 2^i filters. A bottleneck with n input channels has convolutions [f, n, 1, 1],
    [width_factor*f, f, 3, 3] and [4f, width_factor*f, 1, 1], each followed by a norm. If its input
    and output differ, it has a shortcut [4f, n, 1, 1] with a norm. The first bottleneck of every
    resolution but the first halves height and width. A stem [channels, 3, 7, 7] and a max pooling
    come before; each halves both. The mean over the image and a linear head with bias come after.
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
        """Number of residual blocks; a pipeline may cut between them."""
        return sum(self.blocks)

    def kind_of(self, layer: int) -> str:
        """Return the kind of a layer: ``0.first`` for the first of a resolution, which changes the
        shape, ``0.rest`` for the others, which are alike."""
        starts = list(accumulate(self.blocks, initial=0))
        resolution = bisect(starts, layer) - 1
        return f"{resolution}.{'first' if layer == starts[resolution] else 'rest'}"

    @property
    def depth(self) -> int:
        """Number of convolutions on the longest path, plus the head: 50 for (3, 4, 6, 3)."""
        return 3 * self.layers + 2
