#!/bin/bash
# Start the ranks of one node in a container: docker.sh [ARGUMENT]..., on each node.
#   IMAGE    the image, which has torch and what the plan is for; paths are paths in it
#   MOUNTS   folders that it sees beside this one: HOST_FOLDER:FOLDER[,HOST_FOLDER:FOLDER]...
# Other variables are those of node.sh; those of NCCL and Gloo are handed on.
set -euo pipefail

[[ -n ${IMAGE:-} ]] || { echo "error: IMAGE: is not set: give an image with torch and what the plan is for" >&2; exit 2; }
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
options=(--volume "$folder:$folder:ro" --env "NODE_NAME=${NODE_NAME:-$HOSTNAME}")
IFS=, read -r -a mounts <<<"${MOUNTS:-}"
for mount in "${mounts[@]}"; do
    options+=(--volume "$mount")
done
for variable in @names@NODES NODE_RANK MASTER_ADDR MASTER_PORT CUDA_DEVICE_MAX_CONNECTIONS "${!NCCL_@}" "${!GLOO_@}"; do
    options+=(--env "$variable")
done
exec docker run --rm --gpus all --network host --ipc host --ulimit memlock=-1 --ulimit stack=67108864 \
    "${options[@]}" "$IMAGE" bash "$folder/node.sh" "$@"
