#!/usr/bin/env bash
# Plan and run four models on two GPUs, three layouts each: OUT=DIR bash run.sh MODEL...
# Packs each model's prices, plans, runs and what was printed into $OUT/MODEL.tgz.
set -uo pipefail
cd "$(dirname "$0")/../.."
export PATH=$PWD/.venv/bin:$PATH
OUT=$(realpath "$OUT")

declare -A WORKLOAD=(
	[llama-3-8b]="--global-batch-size 4 --seq-len 8192"
	[gpt-6.7b]="--global-batch-size 32 --seq-len 1024"
	[moe-2.4b]="--global-batch-size 64 --seq-len 1024"
	[wresnet-1b]="--global-batch-size 64"
)
declare -A LAYOUTS=( # beside the best that the search finds, one a word
	[llama-3-8b]='{"tp":2,"sequence_parallel":true,"num_microbatches":4} {"cp":2,"zero":3,"num_microbatches":4,"recompute":"selective"}'
	[gpt-6.7b]='{"tp":2,"sequence_parallel":true,"microbatch_size":16,"num_microbatches":2} {"pp":2,"schedule":"1f1b","microbatch_size":4,"num_microbatches":8}'
	[moe-2.4b]='{"dp":2,"ep":2,"zero":2,"microbatch_size":32} {"tp":2,"sequence_parallel":true,"microbatch_size":64}'
	[wresnet-1b]='{"dp":2,"zero":3,"microbatch_size":32} {"tp":2,"microbatch_size":64}'
)

chain() {
	meshwise detect
	meshwise measure profile --model "$1" --budget "${BUDGET:-70s}"
	meshwise calibrate
	meshwise plan "$1" ${WORKLOAD[$1]} --out plan-0.json
	local number=1 layout
	for layout in ${LAYOUTS[$1]}; do
		meshwise plan "$1" ${WORKLOAD[$1]} --layout "$layout" --out "plan-$number.json"
		number=$((number + 1))
	done
	for plan in plan-*.json; do
		echo "--- run $plan"
		timeout 150 meshwise run "$plan"
	done
}

for model; do
	folder=$(mktemp -d) began=$SECONDS
	(cd "$folder" && chain "$model") 2>&1 | tee "$folder/chain.log"
	echo "--- $model: $((SECONDS - began)) s"
	tar --exclude='*.npy' -czf "$OUT/$model.tgz" -C "$folder" .
done
