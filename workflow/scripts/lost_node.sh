#!/bin/bash
# lost_node.sh JOB [SECONDS]: print a node that a running job of Slurm has lost; status 1 if none is lost.
# A node is lost if Slurm reports it as DOWN or NOT_RESPONDING, or if its slurmd accepts no connection for SECONDS (30).
# Slurm itself notices only after minutes (SlurmdTimeout), long after srun may have reported that ranks ended there.
job=$1 patience_s=${2:-30}
names=$(scontrol --oneliner show job "$job" | grep -o ' NodeList=[^ ]*' | cut -d= -f2 | paste -sd,)
default_port=$(scontrol show config | grep -om 1 '^SlurmdPort *= *[0-9]*')

field() { # NAME: its value in $line
    [[ $line =~ (^| )$1=([^ ]*) ]] && echo "${BASH_REMATCH[2]}"
}

answers() { # whether the slurmd of the node in $line accepts a connection
    local port
    port=$(field Port) || port=${default_port##* }
    timeout 3 bash -c "exec 3<>/dev/tcp/$(field NodeAddr)/$port" 2>/dev/null
}

while :; do
    silent=
    while read -r line; do
        case $(field State) in
        *DOWN* | *NOT_RESPONDING* | *'*'*) field NodeName && exit ;;
        esac
        answers || silent=$(field NodeName)
    done < <(scontrol --oneliner show node "$names")
    [[ $silent ]] || exit 1
    if ((SECONDS >= patience_s)); then
        echo "$silent"
        exit
    fi
    sleep 1
done
