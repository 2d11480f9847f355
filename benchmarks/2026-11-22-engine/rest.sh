#!/usr/bin/env bash
# What README.md lacks on 4 H200: OUT=DIR bash benchmarks/2026-11-22-engine/rest.sh PART...
#   rows    timed, alone: messages beside products (some 220 s)
#   curves  50 steps of a Llama type and of experts, tests/gpu beside them
#   suites  each until its time is up; curves may run beside them (some 560 s; also on 2)
# Packs run directories and tables into $OUT/runs.tgz.
set -uo pipefail
cd "$(dirname "$0")/../.."
here=benchmarks/2026-11-22-engine runs=$(mktemp -d)
python=$PWD/.venv/bin/python OUT=$(realpath "$OUT")

rows() {
	local name
	for name in 2.6b-tp-async 8b-tp-async 2.6b-tp-pp-async 8b-tp-pp-async; do
		row $name
	done
}

row() {
	timeout 110 "$python" -m torch.distributed.run --nproc-per-node 4 $here/table.py "$runs" $1
}

curves() {
	local family
	timeout 540 "$python" -m pytest tests/gpu >"$OUT/tests.txt" 2>&1 &
	for family in moe llama; do
		timeout 540 "$python" $here/curve.py "$runs/$family" $family >"$OUT/curve-$family.txt" 2>&1 &
	done
	wait
}

suites() {
	if [ "$("$python" -c 'import torch; print(torch.cuda.device_count())')" = 4 ]; then
		(suite 4 90 gpt.perf_test_manual; suite 4 450 gpt_inference.profile) &
		(suite 4 180 wresnet.perf_test_2d; suite 4 360 moe_inference.profile) &
		suite 4 540 gpt_no_embedding_inference.profile &
	fi
	for name in gpt_inference gpt_no_embedding_inference moe_inference; do
		suite 2 540 $name.profile &
	done
	wait
}

suite() { # GPUs, seconds, name
	mkdir -p "$runs/$1/$3"
	(cd "$runs/$1/$3" && timeout $2 "$python" -m meshwise run --suite $3 --niter 2 --num-hosts 1 \
		--num-devices-per-host $1 --runs . --exp-name all >suite.txt 2>&1)
}

for part; do
	$part &
done
wait
tar --exclude=steps.jsonl --exclude='trace-*' --exclude='*.npy' -czf "$OUT/runs.tgz" -C "$runs" .
