"""The floor of a Wide-ResNet step: cuDNN's time of every convolution, forward and both backwards,
alone and one after the other: python convolutions.py [ROWS]

ROWS images (32 by default) of Wide-ResNet 1B, bf16 and TF32, channels last, cuDNN's own choice of
algorithm by trial. What a step takes beyond it is norms, pooling, the optimizer and communication.
"""

import sys

import torch
import torch.nn.functional as F

from meshwise.models.wide_resnet import Convolution, convolutions
from meshwise.spec import WideResNet

MODEL = WideResNet(name="wresnet-1b", channels=320, width_factor=2)
TIMES = 20


def milliseconds(conv: Convolution, rows: int, dtype: torch.dtype) -> float:
    """The median of one convolution's forward and backward."""
    half = MODEL.image_size if conv.unit == "root" else None
    last = {"memory_format": torch.channels_last}
    stride = 2 if half else 1
    size = half or conv.size
    x = torch.randn(rows, conv.in_channels, size, size, device="cuda", dtype=dtype).to(**last)
    w = torch.randn(*conv.shape, device="cuda", dtype=dtype).to(**last)
    x.requires_grad_(not half)
    w.requires_grad_()
    y = F.conv2d(x, w, stride=stride, padding=conv.kernel // 2)
    dy = torch.randn_like(y)
    spans = []
    for _ in range(TIMES + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        F.conv2d(x, w, stride=stride, padding=conv.kernel // 2).backward(dy)
        end.record()
        x.grad = w.grad = None
        spans.append((begin, end))
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in spans[3:])[TIMES // 2]


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 32
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = True
    for dtype in (torch.bfloat16, torch.float32):
        kinds: dict[tuple[int, ...], int] = {}
        total_ms = flops = 0.0
        for conv in convolutions(MODEL):
            key = (*conv.shape, conv.size)
            if key not in kinds:
                kinds[key] = milliseconds(conv, rows, dtype)
            total_ms += kinds[key]
            flops += 3 * rows * conv.forward_flops
        print(f"{dtype}: {total_ms:.1f} ms of convolutions, {flops / total_ms / 1e9:.0f} TFLOP/s")


main()
