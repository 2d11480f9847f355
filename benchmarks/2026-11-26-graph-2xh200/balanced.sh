#!/usr/bin/env bash
# Plan and run moe-2.4b on two GPUs in three layouts, its router balanced: OUT=DIR bash balanced.sh
set -uo pipefail
cd "$(dirname "$0")/../.."
export PATH=$PWD/.venv/bin:$PATH
OUT=$(realpath "$OUT")

chain() {
	meshwise detect
	meshwise measure profile --model moe-2.4b --budget 70s
	meshwise calibrate
	local number=0 layout
	for layout in '{"dp":2,"zero":2,"microbatch_size":32}' '{"dp":2,"ep":2,"zero":2,"microbatch_size":32}' \
		'{"tp":2,"sequence_parallel":true,"microbatch_size":64}'; do
		meshwise plan moe-2.4b --global-batch-size 64 --seq-len 1024 --layout "$layout" --out plan-$number.json
		# `plan` has no option for the recipe
		sed -i 's/"routing": *"learned"/"routing": "balanced"/' plan-$number.json
		grep -q '"routing": "balanced"' plan-$number.json || exit 1
		echo "--- run $number"
		timeout 120 meshwise run plan-$number.json
		number=$((number + 1))
	done
}

folder=$(mktemp -d)
(cd "$folder" && chain) 2>&1 | tee "$folder/chain.log"
tar --exclude='*.npy' -czf "$OUT/moe-2.4b-balanced.tgz" -C "$folder" .
