#!/usr/bin/env bash
# Everything of this folder, on two GPUs (8 minutes): OUT=DIR bash benchmarks/2026-11-21-refit-2xh200/run.sh
here=$(cd "$(dirname "$0")" && pwd); mkdir -p "$OUT"; cd "$OUT"
go() { timeout 120 meshwise refit --num-benchmark-warmup 3 --num-benchmark-iterations "${ITERATIONS:-20}" "$@" > /dev/null; }
large=(--scenario 8b-tp2-tp1 --scenario 1.5b-tp2-tp1)
small=(--scenario tp2-tp1 --scenario tp1-tp2 --scenario tp1pp2-tp2pp1 --scenario ep2-ep1)
go "${large[@]}" --refit-method ipc
go "${large[@]}" --refit-method ipc --verify off
go "${large[@]}" --refit-method ipc --verify full
go "${small[@]}" --bf16 --refit-method ipc
for method in nvshmem nccl; do go "${large[@]}" --refit-method $method; done
timeout 200 python -m torch.distributed.run --standalone --nproc-per-node 4 "$here/shared.py" "$OUT/shared" \
    8b-tp2-tp4 8b-tp2pp2-tp4 8b-tp2pp2-tp1 8b-tp2-tp2-apart moe-5b-ep2-ep4 moe-30b-ep2-ep4
go "${small[@]}" --refit-method ipc
go "${small[@]}" --bf16 --refit-method nvshmem
go "${small[@]}" --bf16 --refit-method nccl
go --scenario 8b-tp2-tp1 --refit-method ipc --atomic
go --scenario 8b-tp2-tp1 --refit-method ipc --delta --changed 0.02
ITERATIONS=3 go --scenario 8b-tp2-tp1 --refit-method gloo
