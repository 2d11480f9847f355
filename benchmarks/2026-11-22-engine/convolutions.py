"""The floor of a Wide-ResNet step: cuDNN's time of every convolution, forward and both backwards,
alone and one after the other: python convolutions.py [ROWS]

ROWS images (32 by default) of Wide-ResNet 1B, bf16 and TF32, channels last, cuDNN's own choice of
algorithm by trial. What a step takes beyond it is norms, pooling, the optimizer and communication.
"""

import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from meshwise.models import families
from meshwise.models.graph import operation
from meshwise.spec import Convolution, WideResNet

MODEL = WideResNet(name="wresnet-1b", channels=320, width_factor=2)
TIMES = 20


def milliseconds(conv: Convolution, rows: int, dtype: torch.dtype) -> float:
    """The median of one convolution's forward and backward."""
    last = {"memory_format": torch.channels_last}
    image, kernel = (conv.height, conv.width), (conv.kernel, conv.kernel)
    x = torch.randn(rows, conv.in_channels, *image, device="cuda", dtype=dtype).to(**last)
    w = torch.randn(conv.out_channels, conv.in_channels, *kernel, device="cuda", dtype=dtype)
    w = w.to(**last)
    x.requires_grad_(conv.in_channels > 3)
    w.requires_grad_()
    y = F.conv2d(x, w, stride=conv.stride, padding=conv.kernel // 2)
    dy = torch.randn_like(y)
    spans = []
    for _ in range(TIMES + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        F.conv2d(x, w, stride=conv.stride, padding=conv.kernel // 2).backward(dy)
        end.record()
        x.grad = w.grad = None
        spans.append((begin, end))
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in spans[3:])[TIMES // 2]


def convolutions() -> Iterator[Convolution]:
    """Yield the convolutions of one image's forward pass."""
    graph = families.forward(MODEL, 1, 1, "bf16")
    for node in graph.nodes:
        read, written = ([graph.tensors[x] for x in of] for of in (node.inputs, node.outputs))
        op = operation(node, read, written, graph.sizes)
        if isinstance(op, Convolution):
            yield op


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 32
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = True
    for dtype in (torch.bfloat16, torch.float32):
        kinds: dict[Convolution, float] = {}
        total_ms = flops = 0.0
        for conv in convolutions():
            if conv not in kinds:
                kinds[conv] = milliseconds(conv, rows, dtype)
            total_ms += kinds[conv]
            flops += 3 * rows * conv.flops
        print(f"{dtype}: {total_ms:.1f} ms of convolutions, {flops / total_ms / 1e9:.0f} TFLOP/s")


main()
