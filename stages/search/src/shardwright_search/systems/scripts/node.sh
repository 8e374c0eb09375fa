#!/bin/bash
# Start the ranks of one node: node.sh [ARGUMENT]...
#@variables@
#   NODE_RANK     number of this node in nodes.txt, from 0; else the line of this machine's name (NODE_NAME, else Slurm's)
#   MASTER_ADDR   host of node 0; else the first of nodes.txt. MASTER_PORT: a free port of it, else 29500
#   NODES         host names in the place of those in nodes.txt
#@plan@
set -euo pipefail

refuse() {
    echo "error: $1: $2" >&2
    exit 2
}

#@checks@
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
list=$folder/nodes.txt
hosts=()
if [[ -n ${NODES:-} ]]; then
    read -r -a hosts <<<"$NODES"
else
    while read -r host _; do
        [[ -z $host || $host == \#* ]] || hosts+=("$host")
    done <"$list"
fi
[[ ${#hosts[@]} == "${#ranks[@]}" ]] || refuse "$list: ${#hosts[@]} hosts" "the plan is for ${#ranks[@]} nodes"

node=${NODE_RANK:-}
[[ ${#ranks[@]} != 1 ]] || node=${node:-0}
if [[ -z $node ]]; then
    name=${NODE_NAME:-${SLURMD_NODENAME:-$HOSTNAME}}
    for i in "${!hosts[@]}"; do
        if [[ ${hosts[i]} == "$name" || ${hosts[i]} == "${name%%.*}" ]]; then node=$i; fi
    done
    [[ -n $node ]] || refuse "$list: $name is none of its hosts" "name it there, or set NODE_RANK"
fi
[[ $node =~ ^[0-9]+$ && $node -lt ${#ranks[@]} ]] || refuse "NODE_RANK: $node" "number the nodes from 0 to $((${#ranks[@]} - 1))"
master=${MASTER_ADDR:-${hosts[0]}}
[[ $master != *[\<\>]* ]] || refuse "$list: $master is no host" "write the hosts there, or set MASTER_ADDR"

#@start@
