#!/bin/bash
# meshwise refit --scenario tp2-tp4
#SBATCH --job-name=meshwise-refit
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --output=/home/me/runs/jobs/ID/%j.out
#SBATCH --error=/home/me/runs/jobs/ID/%j.err
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
#SBATCH --no-requeue

set -euo pipefail
cd -- /home/me

# Ranks meet at the first host, at the address by which Slurm reaches it.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol --oneliner show node "$first" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
export MASTER_ADDR="${address:-$first}"
echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, start ${SLURM_RESTART_COUNT:-0}, ranks meet at $MASTER_ADDR" >&2

program=(python3 -m meshwise refit --scenario tp2-tp4)

# At USR1 ranks keep what they have and end. Slurm sends it before the time limit.
is_late=0
trap 'kill -USR1 "$step"' TERM INT
trap 'is_late=1; kill -USR1 "$step"' USR1
srun --nodes=1 --ntasks=4 --ntasks-per-node=4 --gpu-bind=none --kill-on-bad-exit=0 --wait=300 --container-image=/images/torch.sqsh --container-mounts=/data:/data,/home/me:/home/me --container-workdir=/home/me ${SLURM_STEP_ID:+--overlap} "${program[@]}" &
step=$!
code=0
while kill -0 "$step" 2>/dev/null; do
    code=0
    wait "$step" || code=$?
done
if [ "$is_late" = 1 ]; then echo 'error: time limit: this command cannot go on; give a longer --time' >&2; fi
exit "$code"
