#!/usr/bin/env bash
# What README.md here quotes, but for profile, trace and health: bash measure.sh, about 8 minutes on 4 GPUs.
set -u
m() { meshwise measure "$@" >"$(date +%H%M%S)-$1.txt" 2>&1 || echo "exit code $?: measure $*"; }
all="--dtype fp32 --sizes 1K..4G:x4 --as-measured"
meshwise detect >detect.txt
m collectives $all --backend nccl --mode graph --mode pipelined
m collectives $all --backend torch --mode graph --mode warm --mode blocking
m collectives all_reduce --dtype fp32 --sizes 1K..16M:x4 --as-measured --mode graph --backend one_shot --backend two_shot
m collectives all_gather all_to_all send_recv --dtype fp32 --sizes 1K..4G:x4 --as-measured --mode graph --backend peer_copy
m gemm --nproc 1 --square 8192 --mode cold
python "$(dirname "$0")/independent.py" >independent.json
m gemm --search --dtypes bf16 --dtypes fp8
m attention --backend cudnn --backend flash --backend efficient --backend flex --backend varlen --seq-len 2048 --seq-len 16384
m attention --model deepseek-v3 --model llama-3-8b --seq-len 4096 --backend cudnn --backend flash --backend flex --backend varlen --backend math
m overlap
m fsdp --model llama-3-70b
m collectives $all --backend nccl --mode graph # again: repeatability
m gemm --square 4096 --square 8192 --mode cold
m gemm --square 4096 --square 8192 --mode cold
