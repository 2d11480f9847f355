#!/bin/bash
# meshwise measure collectives all_reduce --model gpt-30m --json
#SBATCH --job-name=meshwise-measure
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --array=0-1
#SBATCH --output=/home/me/runs/jobs/ID/%A_%a.out
#SBATCH --error=/home/me/runs/jobs/ID/%A_%a.err
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
#SBATCH --requeue

set -euo pipefail
cd -- /home/me

# Ranks meet at the first host, at the address by which Slurm reaches it.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol --oneliner show node "$first" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
export MASTER_ADDR="${address:-$first}"
echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, start ${SLURM_RESTART_COUNT:-0}, ranks meet at $MASTER_ADDR" >&2

program=(python3 -m meshwise measure collectives all_reduce --model gpt-30m --json)
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then program+=(--resume); fi
values=(1024 2048)
program+=(--seq-len="${values[$SLURM_ARRAY_TASK_ID]}")

# At USR1 ranks keep what they have and end. Slurm sends it before the time limit.
is_late=0
trap 'kill -USR1 "$step"' TERM INT
trap 'is_late=1; kill -USR1 "$step"' USR1
srun --nodes=1 --ntasks=2 --ntasks-per-node=2 --kill-on-bad-exit=0 --wait=300 ${SLURM_STEP_ID:+--overlap} "${program[@]}" &
step=$!
code=0
while kill -0 "$step" 2>/dev/null; do
    code=0
    wait "$step" || code=$?
done
if [ "$is_late" = 1 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
