#!/usr/bin/env bash
# `measure collectives` in graphs beside nccl-tests -G 20, a process a GPU, twice by turns:
#   NCCL_TESTS=BUILD bash run.sh      (in a folder of its own; meshwise on the path)
set -u
meshwise detect

both() { # command of two ranks: rank 0's output
	local id
	id=$(mktemp -u)
	NCCL_ID_FILE=$id WORLD_SIZE=2 RANK=1 timeout 60 "$@" >/dev/null &
	NCCL_ID_FILE=$id WORLD_SIZE=2 RANK=0 timeout 60 "$@"
	wait
	rm -f "$id"
}

for turn in 1 2; do
	for test in all_reduce all_gather reduce_scatter alltoall sendrecv; do
		echo "-- $test"
		both "$NCCL_TESTS/${test}_perf" -g 1 -b 1K -e 256M -f 4 -n 20 -w 5 -c 0 -G 20 | grep -v '^#' | grep .
	done
	meshwise measure collectives all_reduce all_gather reduce_scatter all_to_all send_recv --dtype fp32 \
		--sizes 1K..256M:x4 --as-measured --backend nccl --mode graph --nproc 2
done
