"""A plan as a recipe of Megatron Bridge (Python), and such a recipe as a plan.

Fields are those of its 0.3.1 (`training/config.py`, `recipes/common.py`) and of megatron-core 0.16.1. It runs what
Megatron-LM runs, so that a recipe is Megatron-LM's arguments under the names of fields.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence

from shardwright_formats.io import BadInput
from shardwright_formats.types import Model, Plan, Precision
from shardwright_models.registry import FAMILIES
from shardwright_search.interop.limits import Limits, Reading, Setting, Target, torchrun
from shardwright_search.interop.megatron import megatron_arguments, megatron_limits
from shardwright_search.interop.megatron_reader import read_megatron, words_of
from shardwright_search.interop.target import Exported, ExportTarget

_TITLE = "Megatron Bridge"
_FIELDS: Mapping[str, str] = {
    "tensor_model_parallel_size": "model.tensor_model_parallel_size",
    "pipeline_model_parallel_size": "model.pipeline_model_parallel_size",
    "context_parallel_size": "model.context_parallel_size",
    "cp_comm_type": "model.cp_comm_type",
    "num_virtual_stages_per_pipeline_rank": "model.virtual_pipeline_model_parallel_size",
    "decoder_first_pipeline_num_layers": "model.num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "model.num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout": "model.pipeline_model_parallel_layout",
    "sequence_parallel": "model.sequence_parallel",
    "expert_model_parallel_size": "model.expert_model_parallel_size",
    "expert_tensor_parallel_size": "model.expert_tensor_parallel_size",
    "moe_token_dispatcher_type": "model.moe_token_dispatcher_type",
    "recompute_granularity": "model.recompute_granularity",
    "recompute_method": "model.recompute_method",
    "recompute_num_layers": "model.recompute_num_layers",
    "recompute_modules": "model.recompute_modules",
    "micro_batch_size": "train.micro_batch_size",
    "global_batch_size": "train.global_batch_size",
    "use_distributed_optimizer": "ddp.use_distributed_optimizer",
    "use_megatron_fsdp": "ddp.use_megatron_fsdp",
    "data_parallel_sharding_strategy": "ddp.data_parallel_sharding_strategy",
    "num_distributed_optimizer_instances": "ddp.num_distributed_optimizer_instances",
    "outer_dp_sharding_strategy": "ddp.outer_dp_sharding_strategy",
    "ckpt_format": "checkpoint.ckpt_format",
}
"""Fields of a recipe by the arguments of Megatron-LM that say the same."""
_DEFAULTS: Mapping[str, object] = {
    "ddp.use_distributed_optimizer": False,
    "ddp.use_megatron_fsdp": False,
    "ddp.data_parallel_sharding_strategy": "no_shard",
    "model.sequence_parallel": False,
}
"""Fields that a recipe's base sets otherwise than Megatron-LM does without an argument."""
_LINE = re.compile(r"^    cfg\.(\w+\.\w+) = (.+)$", re.MULTILINE)
_RECIPE = '''\
"""Recipe of plan {name}: PATH is a folder or a name of Hugging Face's hub."""

from megatron.bridge import AutoBridge
from megatron.bridge.recipes.common import _pretrain_common
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain

PATH = {path!r}


def config() -> ConfigContainer:
    """Return the configuration; data, tokenizer and learning rate are yours."""
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained(PATH).to_megatron_provider(load_weights=False)
    cfg.tokenizer.tokenizer_model = PATH
{lines}    return cfg


if __name__ == "__main__":
    pretrain(config=config(), forward_step_func=forward_step)
'''


def bridge_recipe(plan: Plan, plan_file: object) -> Exported:
    """Return the recipe; BadInput names the first thing that Megatron's core or the bridge cannot express."""
    target = ExportTarget(_TITLE, plan_file)
    bridged = ", ".join(sorted(name for name in FAMILIES if _is_bridged(name)))
    target.demand(_is_bridged(plan.model.family), f"a {plan.model.family} model", f"choose {bridged}")
    compute, reduce = plan.precision.compute, plan.precision.reduce
    target.demand_precision(
        plan, (compute, reduce) == ("bfloat16", "float32"), "compute in bfloat16, reduce in float32"
    )
    exported = megatron_arguments(plan, plan_file)
    given = {**words_of(exported.text, str(plan_file))}
    if given.pop("num_layers_per_virtual_pipeline_stage", None) is not None:
        given["num_virtual_stages_per_pipeline_rank"] = [str(len(plan.stages[0].layers))]
    fields = {**_DEFAULTS, **{_FIELDS[name]: _value(name, given[name]) for name in given if name in _FIELDS}}
    lines = "".join(f"    cfg.{field} = {value!r}\n" for field, value in (*fields.items(), *_others(plan, fields)))
    text = _RECIPE.format(name=plan.name, path=plan.model.name, lines=lines)
    return Exported(text, (f"run it on {plan.world_size} ranks", "PATH in the recipe is of the model"))


def _others(plan: Plan, fields: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    length = plan.model.sequence_length
    yield from (("model.seq_length", length), ("dataset.seq_length", length))
    yield "mixed_precision", "bf16_mixed"
    yield "ddp.grad_reduce_in_fp32", True
    if fields["ddp.use_megatron_fsdp"]:
        yield "model.gradient_accumulation_fusion", False


def _value(name: str, words: Sequence[str]) -> object:
    if name == "recompute_modules":
        return list(words)
    if not words:
        return True
    return int(words[0]) if words[0].isdecimal() else words[0]


def read_recipe(text: str, file: str, setting: Setting) -> Reading:
    """Return the plan of a recipe as `bridge_recipe` writes it: of its lines `cfg.SECTION.FIELD = VALUE`.

    Raises BadInput naming `file` for what is wrong, and for what no plan has.
    """
    fields: dict[str, object] = {}
    for match in _LINE.finditer(text):
        try:
            fields[match[1]] = ast.literal_eval(match[2])
        except (ValueError, SyntaxError):
            continue
    arguments = []
    for name, field in _FIELDS.items():
        value = fields.get(field)
        if value is not None and value is not False:
            words = [] if value is True else value if isinstance(value, list) else [value]
            arguments.append(" ".join((f"--{name}", *(f"'{word}'" for word in words))))
    if "--micro_batch_size" not in " ".join(arguments):
        raise BadInput(file, "sets no cfg.train.micro_batch_size", "write it")
    return read_megatron("\n".join(arguments), file, setting)


def bridge_limits(model: Model, precision: Precision) -> tuple[Limits, ...]:
    """Return Megatron-LM's ways, for models that the bridge has."""
    return megatron_limits(model, precision) if _is_bridged(model.family) else ()


def _is_bridged(name: str) -> bool:
    """Return whether a bridge converts the files of a family."""
    family = FAMILIES.get(name)
    return family is not None and family.megatron == "bridged"


MEGATRON_BRIDGE = Target(
    title=_TITLE,
    version="megatron-bridge 0.3.1",
    sources=(
        "megatron/bridge/training/config.py, recipes/common.py: sections and fields",
        "megatron/core of megatron-core 0.16.1: what it runs",
    ),
    limits=bridge_limits,
    unsearched=("recomputation of some layers of a stage (block)", "optimizer instances", "core_attn and layernorm"),
    file_name="recipe.py",
    mark="ConfigContainer",
    export=bridge_recipe,
    read=read_recipe,
    command=lambda plan, file: torchrun(plan, file),
)
