"""The files that start a plan in this project's own runtime."""

from shardwright.io import document_text
from shardwright.types import Plan
from shardwright_search.systems.exporting import Exported
from shardwright_search.systems.launch import Launch, Program, launch_of

PLAN_FILE = "plan.json"
_WORDS = (
    f'shardwright train run "$folder/{PLAN_FILE}" --nnodes "${{#ranks[@]}}" --node-rank "$node" \\\n'
    '    --rendezvous "$master:${MASTER_PORT:-29500}"'
)
_SECRET = {"SHARDWRIGHT_SECRET": "secret by which nodes know one another: the same 32 or more random characters on all"}
_NOTE = "node.sh takes --data, --steps, --checkpoints and --out of `shardwright train run` (elsewhere ARGUMENTS does)"


def own_launch(plan: Plan, plan_file: object, spot: bool = False) -> Launch:
    """Return the files that start a plan by `shardwright train run`; `spot`: on spot nodes.

    Raises BadInput as `launch_of` does.
    """
    exported = Exported(document_text(plan), ())
    program = Program(_WORDS, _SECRET if plan.cluster.num_nodes > 1 else {}, alone=True)
    launch = launch_of(program, exported, PLAN_FILE, plan, plan_file, spot=spot)
    return launch._replace(notes=(_NOTE, *launch.notes))
