#!/usr/bin/env bash
# What this folder still lacks, on 4 H200: OUT=DIR bash benchmarks/2026-11-22-engine/rest.sh PART
#   rows    timed: overlapped products, skew, and the pipelines without FSDP2's hooks (some 350 s)
#   curves  50 steps of a Llama type, with cp, and of experts; tests/gpu beside them (some 400 s)
#   suites  the other suites on 4 and 2 GPUs, each until its time is up (some 480 s)
# Not run yet. Each part packs its run directories and tables into $OUT/PART.tgz.
set -uo pipefail
cd "$(dirname "$0")/../.."
here=benchmarks/2026-11-22-engine part=$1 runs=$(mktemp -d)
python=$PWD/.venv/bin/python OUT=$(realpath "$OUT")

rows() {
	local name
	for name in 2.6b-tp-pp 2.6b-tp-pp-bf16 2.6b-pp 8b-tp-pp-x4 8b-pp 2.6b-tp-async 8b-tp-async \
		moe-768-dp-skewed moe-1024-dp-skewed; do
		timeout 110 "$python" -m torch.distributed.run --nproc-per-node 4 $here/table.py "$runs" $name
	done
}

curves() {
	local family
	CUDA_VISIBLE_DEVICES=2,3 timeout 400 "$python" -m pytest tests/gpu >"$OUT/tests.log" 2>&1 &
	for family in moe llama; do
		timeout 500 "$python" $here/curve.py "$runs/$family" $family >"$OUT/curve-$family.txt" 2>&1 &
	done
	wait
	tail -n 12 "$OUT"/curve-*.txt "$OUT/tests.log"
}

suites() {
	suite 4 60 gpt.perf_test_manual
	suite 4 100 wresnet.perf_test_2d
	for gpus in 4 2; do
		suite $gpus 60 gpt_inference.profile
		suite $gpus 40 gpt_no_embedding_inference.profile
		suite $gpus 60 moe_inference.profile
	done
}

suite() { # GPUs, seconds, name
	(cd "$runs" && timeout $2 "$python" -m meshwise run --suite $3 --niter 2 --num-hosts 1 \
		--num-devices-per-host $1 --runs . --exp-name rest-$1 >>"$OUT/suites.txt" 2>&1)
	grep -E "^Type|error|does not fit" "$OUT/suites.txt" | tail -n 3 | cut -c1-200
}

$part
tar --exclude=steps.jsonl --exclude='trace-*' --exclude='*.npy' -czf "$OUT/$part.tgz" -C "$runs" .
