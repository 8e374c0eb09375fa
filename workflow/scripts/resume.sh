#!/bin/bash
# resume.sh TIMES COMMAND...: run a command, and again while it ends with 75 (stopped in order), TIMES times more at most.
# Where this script is signalled as well, everything here is to end: then it is left stopped.
times=$1 signalled=
shift
trap 'signalled=yes' TERM INT HUP USR1
for ((resumed = 1; ; resumed++)); do
    "$@" && status=0 || status=$?
    if ((status != 75 || resumed > times)) || [[ $signalled ]]; then
        exit "$status"
    fi
    echo "resume.sh: stopped in order (75): resumed, time $resumed of $times at most" >&2
done
