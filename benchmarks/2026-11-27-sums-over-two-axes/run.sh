#!/usr/bin/env bash
# Gradients that are sums over tp, summed first and last, on two GPUs: OUT=DIR bash run.sh
# Packs prices, plans and runs into $OUT/sums.tgz, what was printed into $OUT/chain.log.
set -uo pipefail
cd "$(dirname "$0")/../.."
export PATH=$PWD/.venv/bin:$PATH
OUT=$(realpath "$OUT")
SHAPE='"tp":2,"microbatch_size":8,"num_microbatches":4'
NORMS='"sequence_parallel":true'
ATTENTION='"cuts":{"stream":"seq","attention":"batch"}'

chain() {
	meshwise detect
	meshwise measure profile --model gpt-2.6b --budget "${BUDGET:-40s}"
	meshwise calibrate
	local of order
	for of in NORMS ATTENTION; do
		for order in first last; do
			meshwise plan gpt-2.6b --global-batch-size 32 --seq-len 1024 --out "$of-$order.json" \
				--layout "{$SHAPE,${!of},\"tp_sums\":\"$order\"}"
		done
	done
	for plan in NORMS-first NORMS-last ATTENTION-first ATTENTION-last; do
		echo "--- run $plan"
		timeout 100 meshwise run "$plan.json" --steps 20
		tar --exclude='*.npy' -czf "$OUT/sums.tgz" .
	done
}

folder=$(mktemp -d)
(cd "$folder" && chain) 2>&1 | tee "$OUT/chain.log"
