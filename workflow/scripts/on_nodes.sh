#!/bin/bash
# on_nodes.sh NODES CORES [--OPTION OF SRUN]... COMMAND...: run a command that starts the ranks of its node.
# In a job of Slurm srun starts it, once on each node, so that Slurm's signals reach it and it learns its place from the
# step. Elsewhere it is started here as it is, and so it is inside a step that somebody has started.
nodes=$1 cores=$2 options=()
shift 2
while [[ ${1:-} == --* ]]; do
    options+=("$1")
    shift
done
if [[ -z ${SLURM_JOB_ID:-} || -n ${SLURM_STEP_ID:-} ]]; then
    exec "$@"
fi
# Said in full: inside a job of Snakemake's plugin, srun finds no SLURM_* variable to take the numbers from.
exec srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpus-per-task="$cores" --cpu-bind=none \
    --kill-on-bad-exit=1 "${options[@]}" "$@"
