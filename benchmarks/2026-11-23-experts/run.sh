#!/usr/bin/env bash
# MoE anew, with experts that begin as other weights do: OUT=DIR bash run.sh PART...
#   curves  50 steps of two models on one device and over two, beside the code before (a checkout in .old)
#   one     rows of one GPU, one process a GPU
#   two     rows of two GPUs
# Packs run directories and what was printed into $OUT/PART.tgz.
set -uo pipefail
cd "$(dirname "$0")/../.."
engine=$PWD/benchmarks/2026-11-22-engine python=$PWD/.venv/bin/python OUT=$(realpath "$OUT")

curves() {
	"$python" "$engine/curve.py" "$1/new" ${MODELS:-moe experts} >"$1/new.txt" 2>&1 &
	(cd .old && CUDA_VISIBLE_DEVICES=1 PYTHONPATH=$PWD "$python" "$engine/curve.py" "$1/old" ${MODELS:-moe experts}) \
		>"$1/old.txt" 2>&1 &
	wait
}

rows() { # folder, GPUs, port, NAME...
	local runs=$1 gpus=$2 port=$3 name
	for name in "${@:4}"; do
		timeout 100 "$python" -m torch.distributed.run --nproc-per-node "$gpus" \
			--master-port "$port" "$engine/table.py" "$runs" "$name"
	done
}

one() {
	CUDA_VISIBLE_DEVICES=0 rows "$1" 1 29501 moe-768-dp moe-768-dp-skewed >"$1/768.txt" 2>&1 &
	CUDA_VISIBLE_DEVICES=1 rows "$1" 1 29502 moe-1024-dp moe-1024-dp-skewed >"$1/1024.txt" 2>&1 &
	wait
}

two() {
	rows "$1" 2 29503 moe-{768,1024}-{dp,ep}{,-skewed} >"$1/rows.txt" 2>&1
}

for part; do
	runs=$(mktemp -d)
	$part "$runs"
	cat "$runs"/*.txt | grep -v Warning
	tar --exclude='trace-*' --exclude='*.npy' -czf "$OUT/$part.tgz" -C "$runs" .
done
