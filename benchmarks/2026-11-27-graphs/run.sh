#!/usr/bin/env bash
# Graphs of NCCL's calls beside nccl-tests -G 20, a process a GPU: NCCL_TESTS=BUILD PYTHON=python bash run.sh
set -u
cd "$(dirname "$0")"

both() { # variables and command: of two ranks, rank 0's output
	local id
	id=$(mktemp -u)
	env IDFILE="$id" NCCL_ID_FILE="$id" WORLD_SIZE=2 RANK=1 timeout 100 env "$@" >/dev/null &
	env IDFILE="$id" NCCL_ID_FILE="$id" WORLD_SIZE=2 RANK=0 timeout 100 env "$@"
	wait
	rm -f "$id"
}

for set in X=1 NCCL_GRAPH_REGISTER=0 NCCL_GRAPH_MIXING_SUPPORT=0; do
	echo "== $set"
	for test in all_reduce all_gather sendrecv alltoall; do
		echo "-- $test"
		both $set "$NCCL_TESTS/${test}_perf" -g 1 -b 1K -e 256M -f 4 -n 20 -w 5 -c 0 -G 20 | grep -v '^#' | grep .
	done
	both $set "${PYTHON:-python}" graphs.py
done
