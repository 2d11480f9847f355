#!/bin/sh
# Collectives of two GPUs at sizes that rise by the root of two, in graphs.
# Usage: run.sh OUT; needs `make venv` before.
set -e
mw="$PWD/.venv/bin/python -m meshwise"
mkdir -p "$1"; cd "$1"
$mw detect
$mw measure collectives all_reduce all_gather reduce_scatter all_to_all \
    --gpus 2 --sizes 1K-8G:x1.4142 --mode graph
$mw calibrate runs/*
