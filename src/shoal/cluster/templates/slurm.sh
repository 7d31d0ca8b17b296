#!/bin/bash
# One Ray cluster over the nodes of a SLURM job; the run itself lives on the first node.
#
#   shoal cluster template slurm > shoal.sbatch
#   sbatch --nodes=4 --gpus-per-node=8 shoal.sbatch train.toml --cluster.trainer.hosts=2 --cluster.trainer.gpus=8
#
# The configuration must lie where the first node can read it. Nothing else has to be shared. SHOAL_RAY_OPTIONS are
# further options of `ray start`, such as ports.
#SBATCH --job-name=shoal
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
set -euo pipefail
config=${1:?expected CONFIG.toml, and settings after it}
shift
export SHOAL_RUN_TOKEN=${SHOAL_RUN_TOKEN:-$(head -c 24 /dev/urandom | base64 | tr -dc 'A-Za-z0-9')}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 --nodelist="$first" hostname --ip-address | awk '{print $1}')
# How long nodes wait for one another: some may be slow.
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=600 RAY_NUM_REDIS_GET_RETRIES=300
exec srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --kill-on-bad-exit=1 \
    ray symmetric-run --address "$address:6379" --min-nodes "$SLURM_NNODES" ${SHOAL_RAY_OPTIONS:-} -- \
    shoal train "$config" --cluster.address="$address:6379" --cluster.listen="$address:8200" "$@"
