#!/bin/bash
# resume.sh TIMES NOTE COMMAND...: run a command, and again while it ends with 75 (stopped in order), at most TIMES more
# times. NOTE is the STOPPED.json that a stopped command leaves. If it exists, a status above 128 also counts as 75: srun
# has then ended the other tasks by a signal after one ended with 75. If this script is signalled as well, everything
# here is to end: then the command is not run again.
# Inside a job of Slurm, the job is queued again, and the run continues from its last checkpoint, in two cases:
# - Only the command was signalled, not this script: Slurm's notice that the job's time is nearly over.
# - The command failed and one of the job's nodes is lost; at most TIMES times in a job, counted in LOST_NODES.txt next to
#   NOTE. If no node is lost, a rank that fails ends the run.
# A job that Slurm is already ending, because it was cancelled, is not queued again: its ranks may end before this script
# is signalled, and Slurm would queue the job again all the same.
times=$1 note=$2 signalled=
lost_nodes=$(dirname "$note")/LOST_NODES.txt
shift 2
trap 'signalled=yes' TERM INT HUP USR1

queue_again() { # WHY: queue this job again and exit; return if Slurm does not allow it
    local state
    state=$(scontrol --oneliner show job "$SLURM_JOB_ID" | grep -om 1 ' JobState=[A-Z_]*')
    if [[ $state && $state != *=RUNNING ]]; then
        echo "resume.sh: $1 in a job that Slurm ends (${state#*=})" >&2
        exit "$status"
    fi
    scontrol requeue "$SLURM_JOB_ID" || return
    echo "resume.sh: $1: the job is queued again" >&2
    for ((waited = 0; waited < 600; waited++)); do # Slurm ends this job before that
        [[ $signalled ]] && break
        sleep 1
    done
    exit "$status"
}

queue_again_without_lost_node() { # return if no node is lost, or if too many were lost
    local node lost
    node=$("$(dirname "$0")/lost_node.sh" "$SLURM_JOB_ID") || return
    lost=$(grep -cs "^$SLURM_JOB_ID " "$lost_nodes")
    if ((${lost:-0} >= times)); then
        echo "resume.sh: $node is lost ($status), after this job has lost nodes $times times: $lost_nodes" >&2
        return
    fi
    echo "$SLURM_JOB_ID $node" >>"$lost_nodes"
    queue_again "$node is lost ($status)"
}

for ((resumed = 1; ; resumed++)); do
    rm -f "$note"
    "$@" && status=0 || status=$?
    if ((status > 128)) && [[ -e $note ]]; then
        status=75
    fi
    [[ $signalled ]] && exit "$status"
    if [[ -n ${SLURM_JOB_ID:-} ]]; then
        case $status in
        0 | 2) ;; # done, or bad input
        75) grep -q '"reason": *"signal"' "$note" && queue_again "stopped by a signal (75)" ;;
        *) queue_again_without_lost_node ;;
        esac
    fi
    if ((status != 75)) || ((resumed > times)); then
        exit "$status"
    fi
    echo "resume.sh: stopped in order (75): resumed, time $resumed of $times at most" >&2
done
