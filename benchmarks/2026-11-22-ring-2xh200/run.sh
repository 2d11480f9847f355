#!/usr/bin/env bash
# Everything of this folder, on two GPUs (4 minutes): OUT=DIR bash benchmarks/2026-11-22-ring-2xh200/run.sh
mkdir -p "$OUT"; cd "$OUT"
go() { meshwise measure ring 2 "$@"; }
large=(--causal --num-heads 32 --embed-dim 4096 --batch-size 1 --dtype bfloat16)
go --dense "${large[@]}" --seq-lengths 32768 131072 --ring-sizes 1 2 --way heads
go --dense "${large[@]}" --seq-lengths 32768 131072 --ring-sizes 2 --way ring --order zigzag --benchmark-runs 6
go --dense --causal --num-heads 12 --embed-dim 768 --batch-size 1 --dtype bfloat16 --seq-lengths 65536 --ring-sizes 1 2
go --seq-lengths 65536 --ring-sizes 1 2 --graph
go --seq-lengths 65536 --ring-sizes 1 2 --offsets group
go "${large[@]}" --seq-lengths 1048576 --ring-sizes 1 2 --benchmark-runs 5 \
    --segment-lengths 2048 4096 8192 16384 32768 65536 131072 262144 524288 1048576 \
    --dilation-rates 1 2 4 8 16 32 64 128 256 512
go --verify
