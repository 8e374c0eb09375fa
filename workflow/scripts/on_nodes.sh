#!/bin/bash
# on_nodes.sh "NODESxCORES[@INTERFACE] ..." [--OPTION OF SRUN]... COMMAND...: run a command that starts the ranks of its node.
# In a job of Slurm srun starts it, once on each node, so that Slurm's signals reach it and it learns its place from the
# step. Elsewhere it is started here as it is, and so it is inside a step that somebody has started.
# Several NODESxCORES are the components of a heterogeneous job, in rank order; INTERFACE is what gloo and NCCL take.
read -ra groups <<<"$1"
shift
options=()
while [[ ${1:-} == --* ]]; do
    options+=("$1")
    shift
done
if [[ -z ${SLURM_JOB_ID:-} || -n ${SLURM_STEP_ID:-} ]]; then
    exec "$@"
fi
started=()
for i in "${!groups[@]}"; do
    group=${groups[i]}
    size=${group%%@*} interface=${group#*@}
    nodes=${size%x*} cores=${size#*x}
    ((${#groups[@]} == 1)) || started+=(--het-group="$i")
    # Said in full: inside a job of Snakemake's plugin, srun finds no SLURM_* variable to take the numbers from.
    started+=(--nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpus-per-task="$cores" --cpu-bind=none)
    started+=(--kill-on-bad-exit=1 "${options[@]}")
    [[ $group != *@* ]] || started+=(env "GLOO_SOCKET_IFNAME=$interface" "NCCL_SOCKET_IFNAME=$interface")
    started+=("$@" :)
done
if ((${#groups[@]} > 1)); then
    # Nor these, without which it refuses a second component, and nodes meet at the first by name, not by rank.
    export SLURM_HET_SIZE=${#groups[@]} SLURM_JOB_NODELIST_HET_GROUP_0=${SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURMD_NODENAME}
fi
exec srun "${started[@]:0:${#started[@]}-1}"
