#!/usr/bin/env bash
# What was never run on four GPUs, part by part: OUT=DIR bash benchmarks/2026-11-27-four/run.sh PART...
#   refit        Llama-3-8B, MoE-30B and 1.5B between layouts; Megatron's four-GPU scenarios
#   ring         dense and dilated attention over four GPUs, `measure ring 4 --all`, --verify
#   plans-MODEL  a profile, then layouts of gpt-2.6b, llama-3-8b or moe-2.4b: predicted beside measured
#   exchanges    300 uneven all-to-alls of random embedding tables, and the even sweep that prices them
#   collectives  every mode beside nccl-tests, whose binaries are in $NCCL_TESTS
#   schedules    zero-bubble pipelines beside 1F1B, eager; an uneven plan against one device
# Each part ends after LIMIT seconds and packs its run directories and what was printed into $OUT/PART.tgz.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export PATH=$here/../../.venv/bin:$PATH
OUT=$(realpath "$OUT")

began() { echo "--- $* ($SECONDS s)"; }

refit() {
	local large=(8b-tp2-tp4 8b-tp2pp2-tp4 8b-tp2pp2-tp1 8b-tp2-tp2-apart 1.5b-tp2-tp4) name
	for name in "${large[@]}" moe-30b-ep2-ep4; do moved ipc 20 "$name"; done
	for name in tp2-tp4 tp2pp2-tp4pp1 ep2-ep4 large; do moved ipc 20 "$name" --bf16; done
	for name in "${large[@]}" moe-30b-ep2-ep4; do moved nvshmem 10 "$name"; moved nccl 10 "$name"; done
	moved gloo 3 1.5b-tp2-tp4
	moved gloo 3 8b-tp2-tp4
}

moved() { # way, iterations, scenario
	began "$@"
	timeout 100 meshwise refit --scenario "$3" --refit-method "$1" --num-benchmark-warmup 3 \
		--num-benchmark-iterations "$2" "${@:4}" | grep -E "refit time|wrong|failed|error"
}

ring() {
	local large=(--causal --num-heads 32 --embed-dim 4096 --batch-size 1 --dtype bfloat16)
	go() { began ring "$@"; timeout 200 meshwise measure ring 4 "$@"; }
	go --dense "${large[@]}" --seq-lengths 32768 131072 --ring-sizes 1 2 4 --way heads
	go --dense "${large[@]}" --seq-lengths 32768 131072 --ring-sizes 4 --way ring --order zigzag
	go "${large[@]}" --seq-lengths 1048576 --ring-sizes 1 2 4 --benchmark-runs 5 \
		--segment-lengths 2048 4096 8192 16384 32768 65536 131072 262144 524288 1048576 \
		--dilation-rates 1 2 4 8 16 32 64 128 256 512
	go --all
	go --verify
	meshwise report --out ring.html
}

declare -A WORKLOAD=(
	[gpt-2.6b]="--global-batch-size 32 --seq-len 1024" [llama-3-8b]="--global-batch-size 8 --seq-len 8192"
	[moe-2.4b]="--global-batch-size 128 --seq-len 1024"
)
declare -A PROFILE=([llama-3-8b]="--seq-len 8192")

plans() {
	local model=$MODEL number=1 layout plan
	meshwise detect
	began profile
	meshwise measure profile --model "$model" ${PROFILE[$model]-} --budget "${BUDGET:-100s}"
	meshwise calibrate
	meshwise plan "$model" ${WORKLOAD[$model]} --out plan-00.json
	while read -r layout; do
		meshwise plan "$model" ${WORKLOAD[$model]} --layout "$layout" \
			--out "$(printf 'plan-%02d.json' $number)" >/dev/null || echo "not planned: $layout"
		number=$((number + 1))
	done <"$here/$model.layouts"
	# `plan` has no option for the recipe
	[ "$model" != moe-2.4b ] || sed -i 's/"routing": *"learned"/"routing": "balanced"/' plan-*.json
	for plan in $(ls plan-*.json | tail -n +"${FROM:-1}"); do
		began "$plan"
		timeout 100 meshwise run "$plan" --steps 8 --warmup 3
	done
}

exchanges() {
	local go=(meshwise measure collectives ${MODES:---mode warm --mode graph} --dtype fp32 --as-measured)
	"${go[@]}" all_to_all --sizes 64K..4G:x2
	"${go[@]}" --tables "$(python "$here/tables.py" 300)"
}

collectives() {
	local kinds=(all_reduce all_gather reduce_scatter all_to_all send_recv) kind sizes=1K..1G:x4
	local -A name=([all_to_all]=alltoall [send_recv]=sendrecv)
	for kind in "${kinds[@]}"; do
		local test=$NCCL_TESTS/${name[$kind]:-$kind}_perf sweep=(-b 1K -e 1G -f 4 -n 20 -w 5 -c 0)
		local file=nccl-tests/${name[$kind]:-$kind}
		mkdir -p nccl-tests
		timeout 60 "$test" -g 4 "${sweep[@]}" >"$file.txt"
		timeout 60 "$test" -g 4 "${sweep[@]}" -G 20 >"$file-graph.txt"
		apart "$file-apart.txt" "$test" "${sweep[@]}"
		apart "$file-apart-graph.txt" "$test" "${sweep[@]}" -G 20
	done
	local all=(meshwise measure collectives "${kinds[@]}" --dtype fp32 --sizes $sizes --as-measured)
	"${all[@]}" --backend nccl --mode graph --mode pipelined
	"${all[@]}" --backend torch --mode graph --mode warm --mode blocking --mode pipelined
	meshwise measure collectives all_reduce --dtype fp32 --sizes 1K..16M:x4 --as-measured --mode graph \
		--backend one_shot --backend two_shot
	meshwise measure collectives all_gather all_to_all send_recv --dtype fp32 --sizes $sizes \
		--as-measured --mode graph --backend peer_copy
}

apart() { # file, command: a process a GPU
	local rank id
	id=$(mktemp -u)
	for rank in 3 2 1; do
		RANK=$rank WORLD_SIZE=4 NCCL_ID_FILE=$id timeout 60 "${@:2}" -g 1 >/dev/null &
	done
	RANK=0 WORLD_SIZE=4 NCCL_ID_FILE=$id timeout 60 "${@:2}" -g 1 >"$1"
	wait
	rm -f "$id"
}

schedules() {
	local name layout
	for layout in \
		'{"pp":4,"schedule":"1f1b","microbatch_size":4,"num_microbatches":8}' \
		'{"pp":4,"schedule":"zbv","stages_per_rank":2,"microbatch_size":4,"num_microbatches":8}' \
		'{"pp":4,"schedule":"interleaved_zero_bubble","stages_per_rank":2,"microbatch_size":4,"num_microbatches":8}' \
		'{"pp":4,"schedule":"dualpipev","stages_per_rank":2,"microbatch_size":4,"num_microbatches":8}' \
		'{"pp":4,"schedule":"interleaved_1f1b","stages_per_rank":2,"microbatch_size":4,"num_microbatches":8}'; do
		began "$layout"
		timeout 100 meshwise run --model gpt-2.6b --layout "$layout" --lowering eager --steps 8
	done
	began "an uneven plan"
	timeout 200 meshwise run --check --model gpt-125m --layout \
		'{"pp":2,"schedule":"1f1b","meshes":[[1,2],[2,1]],"layers":[5,7],"microbatch_size":4,"num_microbatches":4}'
}

if [ "${1-}" = inside ]; then
	MODEL=${2#plans-}
	${2%%-*}
	exit
fi
for part; do
	folder=$(mktemp -d) begin=$SECONDS
	(cd "$folder" && timeout "${LIMIT:-540}" bash "$here/run.sh" inside "$part") 2>&1 | tee "$folder/printed.txt"
	echo "--- $part: $((SECONDS - begin)) s"
	tar --exclude='*.npy' --exclude='trace-*' --exclude=steps.jsonl -czf "$OUT/$part.tgz" -C "$folder" .
done
