#!/bin/bash
#@plan@
# Time limit, partition and account are yours: they can be written beside the lines above.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?is not set: start this script by sbatch}"
[[ -f node.sh ]] || { echo "error: $PWD: there is no node.sh: call sbatch in the folder of this script" >&2; exit 2; }
#@hosts@
#@srun@
