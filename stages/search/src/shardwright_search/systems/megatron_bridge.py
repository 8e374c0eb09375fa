"""A plan as a recipe of Megatron Bridge (Python), and such a recipe as a plan.

Fields are from its 0.3.1 (`training/config.py`, `recipes/common.py`) and of megatron-core 0.16.1. It runs what
Megatron-LM runs, so that a recipe is Megatron-LM's arguments under the names of fields.
"""

import ast
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from shardwright.estimate.runtimes import RUNTIMES, RuntimeName
from shardwright.io import BadInput
from shardwright.models.registry import FAMILIES
from shardwright.types import NARROW_BITS, Model, Plan, Precision
from shardwright_search.systems.entry import Entry, Limits, Reading, Setting, program_of, torchrun
from shardwright_search.systems.exporting import Exported, ExportTarget
from shardwright_search.systems.megatron import megatron_arguments, megatron_limits
from shardwright_search.systems.megatron_reader import SIZES, check_fields, layout_of_lists, read_megatron, words_of

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
    "mtp_num_layers": "model.mtp_num_layers",
    "account_for_embedding_in_pipeline_split": "model.account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split": "model.account_for_loss_in_pipeline_split",
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
    "overlap_grad_reduce": "ddp.overlap_grad_reduce",
    "overlap_param_gather": "ddp.overlap_param_gather",
    "cross_entropy_loss_fusion": "model.cross_entropy_loss_fusion",
    "cross_entropy_fusion_impl": "model.cross_entropy_fusion_impl",
    "moe_flex_dispatcher_backend": "model.moe_flex_dispatcher_backend",
    "moe_router_dtype": "model.moe_router_dtype",
    "cuda_graph_impl": "model.cuda_graph_impl",
    "cuda_graph_scope": "model.cuda_graph_scope",
    "use_transformer_engine_op_fuser": "model.use_transformer_engine_op_fuser",
    "moe_paged_stash": "model.moe_paged_stash",
    "moe_expert_rank_capacity_factor": "model.moe_expert_rank_capacity_factor",
    "moe_pad_experts_for_cuda_graph_inference": "model.moe_pad_experts_for_cuda_graph_inference",
    "moe_mlp_glu_interleave_size": "model.moe_mlp_glu_interleave_size",
}
"""Fields of a recipe by the arguments of Megatron-LM with the same meaning."""
_OVERLAPS = ("tp_comm_overlap", "overlap_moe_expert_parallel_comm")
_LAYOUT = _FIELDS["pipeline_model_parallel_layout"]
_MIXED = {
    None: "bf16_mixed",
    "tensorwise": "bf16_with_fp8_current_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}
"""Names of precisions by the recipe of FP8 or FP4."""
_LENGTHS = ("model.seq_length", "dataset.seq_length")
_BEYOND = 10**9
_DEFAULTS: Mapping[str, object] = {
    "ddp.use_distributed_optimizer": False,
    "ddp.use_megatron_fsdp": False,
    "ddp.data_parallel_sharding_strategy": "no_shard",
    "model.sequence_parallel": False,
    "ddp.overlap_grad_reduce": False,
    "ddp.overlap_param_gather": False,
}
"""Fields that a recipe's base sets differently from Megatron-LM's defaults, with these defaults."""
_LINE = re.compile(r"^    cfg\.(\w+(?:\.\w+)*) = (.+)$", re.MULTILINE)
_RECIPE = '''\
"""A recipe of the plan PLAN for the model PATH, a folder or a name of Hugging Face's hub."""

from megatron.bridge import AutoBridge
from megatron.bridge.recipes.common import _pretrain_common
from megatron.bridge.training.comm_overlap import CommOverlapConfig
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain

PLAN = {name!r}
PATH = {path!r}


def config() -> ConfigContainer:
    """Return the configuration; its data are made up until you set cfg.dataset.blend."""
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained(PATH).to_megatron_provider(load_weights=False)
    cfg.tokenizer.tokenizer_model = PATH
{lines}    return cfg


if __name__ == "__main__":
    pretrain(config=config(), forward_step_func=forward_step)
'''


def bridge_recipe(plan: Plan, plan_file: object, tuned: bool = False) -> Exported:
    """Return the recipe; BadInput names the first feature that Megatron's core or the bridge cannot express.

    `tuned`: experts run as `Runtime.tuned` prices them.
    """
    target = ExportTarget(_TITLE, plan_file)
    bridged = ", ".join(sorted(name for name in FAMILIES if _is_bridged(name)))
    target.demand(_is_bridged(plan.model.family), f"a {plan.model.family} model", f"choose {bridged}")
    compute, reduce = plan.precision.compute, plan.precision.reduce
    holds = compute in ("bfloat16", *NARROW_BITS) and reduce == "float32"
    target.demand_precision(plan, holds, f"compute in bfloat16, {' or '.join(NARROW_BITS)}, reduce in float32")
    exported = megatron_arguments(plan, plan_file, tuned)
    given = {**words_of(exported.text, str(plan_file))}
    if given.pop("num_layers_per_virtual_pipeline_stage", None) is not None:
        given["num_virtual_stages_per_pipeline_rank"] = [str(len(plan.stages[0].layers))]
    fields = {**_DEFAULTS, **{_FIELDS[name]: _value(name, given[name]) for name in given if name in _FIELDS}}
    fields |= dict(_others(plan, given, fields))
    lines = "".join(f"    cfg.{field} = {value!r}\n" for field, value in fields.items())
    if overlaps := [name for name in _OVERLAPS if name in given]:
        lines += f"    cfg.comm_overlap = CommOverlapConfig({', '.join(f'{name}=True' for name in overlaps)})\n"
    text = _RECIPE.format(name=plan.name, path=plan.model.name, lines=lines)
    notes = [f"run it on {plan.world_size} ranks", "PATH in the recipe is of the model", "its data are made up"]
    notes += [f"its recipes for speed {line}" for line in exported.environment if tuned]
    return Exported(text, tuple(notes))


def _others(
    plan: Plan, given: Mapping[str, Sequence[str]], fields: Mapping[str, object]
) -> Iterator[tuple[str, object]]:
    length = plan.model.sequence_length
    yield from (("model.seq_length", length), ("dataset.seq_length", length))
    recipe = next((given[name][0] for name in ("fp8_recipe", "fp4_recipe") if name in given), None)
    yield "mixed_precision", _MIXED[recipe]
    yield "ddp.grad_reduce_in_fp32", True
    if "no_check_for_nan_in_loss_and_grad" in given:
        yield from (("rerun_state_machine.check_for_nan_in_loss", False), ("ddp.check_for_nan_in_grad", False))
    if "cuda_graph_impl" in given:
        yield from (("rng.te_rng_tracker", True), ("model.use_te_rng_tracker", True))
    if fields["ddp.use_megatron_fsdp"]:
        yield "model.gradient_accumulation_fusion", False


def _value(name: str, words: Sequence[str]) -> object:
    if name in ("recompute_modules", "cuda_graph_scope"):
        return list(words)
    if not words:
        return True
    number = words[0].replace(".", "", 1).isdecimal()
    return ast.literal_eval(words[0]) if number else words[0]


def read_recipe(text: str, file: str, setting: Setting) -> Reading:
    """Return the plan of a recipe as written by `bridge_recipe`, from its lines `cfg.SECTION.FIELD = VALUE`.

    Raises BadInput naming `file` for what is wrong, and for what no plan has.
    """
    fields, computed = dict[str, object](), dict[str, object]()
    for match in _LINE.finditer(text):
        try:
            fields[match[1]] = ast.literal_eval(match[2])
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            # What is computed, or nested beyond what Python parses, is not a value that `bridge_recipe` writes.
            computed[match[1]] = match[2]
    arguments = []
    for name, field in _FIELDS.items():
        value = fields.get(field)
        if value is not None and value is not False:
            if field == _LAYOUT and isinstance(value, list) and all(isinstance(row, list) for row in value):
                value = layout_of_lists(value)
            words = [] if value is True else value if isinstance(value, list) else [value]
            arguments.append(shlex.join((f"--{name}", *(_word(file, field, word) for word in words))))
    if all(fields.get(_FIELDS[name]) is None for name in SIZES):
        raise BadInput(file, "sets no parallel size", f"write cfg.{_FIELDS[SIZES[0]]}, or another")
    if fields.get(_FIELDS["micro_batch_size"]) is None:
        raise BadInput(file, "sets no cfg.train.micro_batch_size", "write it")
    check_fields(file, {**fields, **computed}, _FIELDS.values(), setting)
    length = next((fields[name] for name in _LENGTHS if name in fields), None)
    if length is not None:
        arguments.append(f"--seq_length {_word(file, _LENGTHS[0], length)}")
    return read_megatron("\n".join(arguments), file, setting)


def _word(file: str, field: str, value: object) -> str:
    """Return a recipe's value as a word of an argument; BadInput if it is neither text nor a reasonable number."""
    if isinstance(value, str) or (isinstance(value, int) and abs(value) < _BEYOND):
        return str(value)
    raise BadInput(file, f"cfg.{field} is neither a text nor a number of under {_BEYOND}", "correct it")


def bridge_limits(model: Model, precision: Precision) -> tuple[Limits, ...]:
    """Return Megatron-LM's ways; empty for models that the bridge does not have."""
    return megatron_limits(model, precision) if _is_bridged(model.family) else ()


def _is_bridged(name: str) -> bool:
    """Return whether a bridge converts the files of a family."""
    family = FAMILIES.get(name)
    return family is not None and family.systems.megatron == "bridged"


MEGATRON_BRIDGE = Entry(
    title=_TITLE,
    version="megatron-bridge 0.3.1 and 0.6.2",
    sources=(
        "megatron/bridge/training/config.py, recipes/common.py: sections and fields",
        "megatron/core of megatron-core 0.16.1: what it runs",
    ),
    runtime=RUNTIMES[RuntimeName.MEGATRON_CORE],
    limits=bridge_limits,
    unsearched=(
        "recomputation of some layers of a stage (block)",
        "optimizer instances",
        "core_attn, and light modules one by one",
    ),
    file_name="recipe.py",
    mark="ConfigContainer",
    export=bridge_recipe,
    read=read_recipe,
    command=lambda plan, file: torchrun(plan, file),
    program=program_of('"$folder/recipe.py"'),
)
TUNED_BRIDGE = MEGATRON_BRIDGE._replace(export=partial(bridge_recipe, tuned=True), version="megatron-bridge 0.6.2")
"""The same with experts as its recipes for speed run them."""
