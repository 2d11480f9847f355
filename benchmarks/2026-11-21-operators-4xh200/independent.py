"""A cold 8192 x 8192 x 8192 product in bf16 on one GPU, timed without Meshwise; JSON on stdout."""

import json
import statistics

import torch

N, ITERATIONS = 8192, 30


def main() -> None:
    a, b = (torch.randn(N, N, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty(N, N, device="cuda", dtype=torch.bfloat16)
    cache = torch.empty(256 * 2**20, device="cuda", dtype=torch.uint8)
    events = []
    for _ in range(ITERATIONS + 1):
        cache.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.mm(a, b.T, out=out)
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    times_s = [start.elapsed_time(end) / 1e3 for start, end in events[1:]]
    median_s = statistics.median(times_s)
    found = {"median_s": median_s, "flops_per_s": 2 * N**3 / median_s, "times_s": times_s}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
