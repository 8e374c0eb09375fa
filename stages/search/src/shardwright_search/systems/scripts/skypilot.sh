export NODES=$(tr '\n' ' ' <<<"$SKYPILOT_NODE_IPS") NODE_RANK=$SKYPILOT_NODE_RANK
read -r -a arguments <<<"${ARGUMENTS:-}"
exec bash node.sh "${arguments[@]}"
