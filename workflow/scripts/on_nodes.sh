#!/bin/bash
# on_nodes.sh "NODESxCORES[@INTERFACE] ..." [--OPTION OF SRUN]... COMMAND...: run a command that starts the ranks of its node.
# In a job of Slurm, srun starts it once on each node, so that Slurm's signals reach it and it learns its node's rank from
# the step. Outside a job, and inside a step that somebody has started, it is started here without srun.
# Several NODESxCORES are the components of a heterogeneous job, in rank order; gloo and NCCL use INTERFACE.
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
    # All numbers are given: inside a job of Snakemake's plugin, srun finds no SLURM_* variables to take them from.
    started+=(--nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpus-per-task="$cores" --cpu-bind=none)
    started+=(--kill-on-bad-exit=1 "${options[@]}")
    [[ $group != *@* ]] || started+=(env "GLOO_SOCKET_IFNAME=$interface" "NCCL_SOCKET_IFNAME=$interface")
    started+=("$@" :)
done
if ((${#groups[@]} > 1)); then
    # Nor does srun find these: without them it refuses a second component, and nodes would meet at the first node by
    # name, not by rank.
    export SLURM_HET_SIZE=${#groups[@]} SLURM_JOB_NODELIST_HET_GROUP_0=${SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURMD_NODENAME}
fi
exec srun "${started[@]:0:${#started[@]}-1}"
