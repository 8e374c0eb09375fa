"""Names that close every place that a text may stand in, and plans that bear them."""

from msgspec.structs import replace

from shardwright.types import Cluster, DataParallel, GradientReduction, NodeGroup, Plan
from shardwright_search.options import UniformRequest

MARK = "touch RAN"
HOSTILE = {
    "quotes": f"""a'b"c'; {MARK}; "d'""",
    "three quotes": f'x"""\nimport os; os.system("{MARK}")\n"""',
    "three single quotes": f"x'''\n    cfg.train.micro_batch_size = 64\nimport os; os.system('{MARK}')\n'''",
    "a line of its own": f"x\n{MARK}\n#SBATCH --wrap={MARK}",
    "a substitution": f"$({MARK}) `{MARK}` ${{HOME}} %(x)s {{{{7*7}}}} {{name}} {{}}",
    "backslashes": "a\\",
    "backslash and quotes": '\\"""\\\'\\\n',
    "a page": "</title></script><script>alert(1)</script><img src=x onerror=alert(1)> &amp; --> ]]>",
    "a tab and signs": "a\tb | c | `d` # e\n# f = [1]\n[parallelism]",
    "other letters": "naïve 計画 😀 \u00a0\u200b",
    "placeholders": "#@plan@\n #@hosts@\n#@srun@\n",
    "an option": "--load=/elsewhere",
}
CONFIG = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "attention_dropout": 0.0,
}  # fmt: skip
REQUEST = UniformRequest(
    global_batch_size=32,
    num_microbatches=2,
    data_parallel=DataParallel.ZERO3,
    gradient_reduction=GradientReduction.EVERY_MICROBATCH,
    precision_compute="bfloat16",
)
"""What all systems run."""


def named(plan: Plan, text: str) -> Plan:
    """The plan with a text in the place of every name that its author chooses."""
    (kind,) = set(plan.model.layers)
    types = {text if name == kind else name: each for name, each in plan.model.types.items()}
    model = replace(plan.model, name=text, layers=(text,) * len(plan.layers), types=types)
    (node,) = plan.cluster.node_types.values()
    groups = tuple(NodeGroup(node_type=text, count=group.count) for group in plan.cluster.nodes)
    cluster = Cluster(name=text, nodes=groups, node_types={text: replace(node, device=text)})
    layers = tuple(replace(layer, type=text) for layer in plan.layers)
    return replace(plan, name=text, model=model, cluster=cluster, layers=layers)
