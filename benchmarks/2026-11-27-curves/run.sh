#!/bin/sh
# Collectives of two GPUs at sizes that rise by the root of two; then the demo on the host's cores.
# Usage: run.sh OUT; needs `make venv` before.
set -e
out=$1; mw="$PWD/.venv/bin/python -m meshwise"
mkdir -p "$out"; cd "$out"
$mw detect
for mode in warm graph pipelined; do
    $mw measure collectives all_reduce all_gather reduce_scatter all_to_all \
        --gpus 2 --sizes 1K-8G:x1.4142 --mode $mode --runs runs > $mode.txt
done
$mw calibrate runs/* > calibrate.txt
