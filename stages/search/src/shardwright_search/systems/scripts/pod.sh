set -euo pipefail
cd "$(mktemp -d)"
while (($# > 1)); do
    printf %s "$2" >"$1"
    shift 2
done
export NODE_RANK=$((${FIRST_NODE:-0} + ${JOB_COMPLETION_INDEX:?is not set: start this as an indexed job}))
export MASTER_ADDR=${PET_MASTER_ADDR:-$MASTER_ADDR}
read -r -a arguments <<<"${ARGUMENTS:-}"
exec bash node.sh "${arguments[@]}"
