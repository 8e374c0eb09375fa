#!/usr/bin/env bash
# workflow/scripts/demo.sh CORES   Run the default configuration to the end and print the results.
set -uo pipefail
log=results/logs/snakemake.log
mkdir -p "$(dirname "$log")"

# Print one line per job; the rest of Snakemake's output is in the log, which is shown if it fails.
snakemake --cores "$1" --quiet reason host 2>&1 | tee "$log" | while IFS= read -r said; do
    case $said in
        "Nothing to be done"*) echo "nothing to be done: all results are up to date" ;;
        "Job "*": "*) printf '%4d s  %s\n' "$SECONDS" "${said#*: }" ;;
        "error: "*) echo "$said" >&2 ;;
    esac
done
status=${PIPESTATUS[0]}
if [ "$status" -ne 0 ]; then
    grep -q '^error: ' "$log" || { sed -n '/^Error in rule/,$p' "$log" | grep . || tail -n 20 "$log"; } >&2
    echo "error: $log: the workflow stopped after $SECONDS s: see above, correct it, and call make demo again" >&2
    exit "$status"
fi

cat results/summary.txt
echo
echo "report: results/report.html ($SECONDS s)"
