#!/bin/bash
# resume.sh TIMES NOTE COMMAND...: run a command, and again while it ends with 75 (stopped in order), TIMES times more at
# most. NOTE is the STOPPED.json that it leaves: where it is there, srun's status of another task that it ended because
# one had ended with 75 counts as 75, too. Where this script is signalled as well, everything here is to end: then
# it is left stopped. A signal to the command alone, inside a job of Slurm, is Slurm's word that the job's time is nearly
# up: then the job is queued again, and goes on from the checkpoint when it is started the next time. A job that Slurm is
# ending already, because it was cancelled, is not: its ranks can end of it before this script is signalled, and Slurm
# would queue it again all the same.
times=$1 note=$2 signalled=
shift 2
trap 'signalled=yes' TERM INT HUP USR1
for ((resumed = 1; ; resumed++)); do
    rm -f "$note"
    "$@" && status=0 || status=$?
    if ((status > 128)) && [[ -e $note ]]; then
        status=75
    fi
    if ((status != 75)) || [[ $signalled ]]; then
        exit "$status"
    fi
    if [[ -n ${SLURM_JOB_ID:-} ]] && grep -q '"reason": *"signal"' "$note"; then
        state=$(scontrol --oneliner show job "$SLURM_JOB_ID" | grep -om 1 ' JobState=[A-Z_]*')
        if [[ $state && $state != *=RUNNING ]]; then
            echo "resume.sh: stopped by a signal (75) in a job that Slurm ends (${state#*=})" >&2
            exit "$status"
        fi
        if scontrol requeue "$SLURM_JOB_ID"; then
            echo "resume.sh: stopped by a signal of Slurm's (75): the job is queued again" >&2
            for ((waited = 0; waited < 600; waited++)); do # Slurm ends this job before that
                [[ $signalled ]] && break
                sleep 1
            done
            exit "$status"
        fi
    fi
    ((resumed > times)) && exit "$status"
    echo "resume.sh: stopped in order (75): resumed, time $resumed of $times at most" >&2
done
