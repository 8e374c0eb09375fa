"""Plans with one strategy, engines for them, and stock models with the weights of an engine."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from zlib import crc32

import torch
from gpu_kit.setting import Setting
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwright.plan.layout import Box
from shardwright.types import LayerStrategy, Model, PipelineStage, Plan, Precision, Schedule, Strategy
from shardwright_train.data.objectives import Batch
from shardwright_train.data.share import on_host
from shardwright_train.engine.engine import Engine, build_engine
from shardwright_train.engine.learning_rate import ANY, Hyperparameters
from shardwright_train.models.base import describe, family_named
from shardwright_train.parallel.data import local_tensor
from shardwright_train.parallel.experts import Counts
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World
from shardwright_train.pipeline.layer import RankContext
from shardwright_train.pipeline.runner import Step

MIXED = Precision(parameters="float32", compute="bfloat16", reduce="float32")
"""The usual formats in training: weights and sums of gradients in float32, matrix products in bfloat16."""


def described(config: Mapping[str, Any], name: str, sequence_length: int) -> Model:
    """Return the model description of a Hugging Face configuration."""
    return describe(family_named(config["model_type"], name), dict(config), name, sequence_length)


def plan_of(
    setting: Setting,
    model: Model,
    strategy: Strategy,
    stages: tuple[PipelineStage, ...] | None = None,
    **fields: object,
) -> Plan:
    """Return a plan with the same strategy for every layer, on one pipeline stage unless `stages` are given."""
    devices = strategy.tp_size * strategy.cp_size * strategy.dp_size
    own = {name: getattr(strategy, name) for name in Strategy.__struct_fields__}
    return Plan(
        model=model,
        cluster=setting.cluster(devices * len(stages or (1,))),
        stages=stages or (PipelineStage(ranks=tuple(range(devices)), layers=((0, len(model.layers)),)),),
        embedding=strategy,
        head=strategy,
        layers=tuple(LayerStrategy(**own, type=kind) for kind in model.layers),
        **({"schedule": Schedule.ONE_F_ONE_B} | fields),  # type: ignore[arg-type]
    )


def one_device_plan(setting: Setting, model: Model, name: str, samples: int, **fields: object) -> Plan:
    """Return a plan for one device with steps of `samples`, by default in one microbatch."""
    fields = {"num_microbatches": 1, "precision": MIXED} | fields
    return plan_of(setting, model, Strategy(tp_size=1, dp_size=1), name=name, global_batch_size=samples, **fields)


def engine_of(
    plan: Plan,
    world: World,
    groups: Groups,
    attention: str,
    settings: Hyperparameters = ANY,
    weights: "DrawnOnDevice | None" = None,
) -> Engine:
    """Return the engine of this rank's part of a plan, by default with the initial weights of seed 0."""
    family = family_named(plan.model.family, plan.name)
    context = RankContext(
        plan=plan,
        family=family,
        rank=world.rank,
        groups=groups,
        attention=attention,
        device=world.device,
        seed=0,
        weights=weights,
    )
    return build_engine(context, settings)


class DrawnOnDevice:
    """Initial weights drawn by the device: for a billion of them the host needs seconds, while the device waits."""

    def read(self, window: Tensor, name: str, shape: Sequence[int], box: Box) -> bool:
        """Fill a part of a parameter: matrices with small random numbers, norms with ones, biases with zeros."""
        if len(shape) == 1:
            window.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            generator = torch.Generator(window.device).manual_seed(crc32(name.encode()))
            window.normal_(0.0, 0.02, generator=generator)
        return True


def batch_of(model: Model, samples: int, seed: int) -> Batch:
    """Return random inputs of a model, on the host."""
    generator = torch.Generator().manual_seed(seed)
    return family_named(model.family, model.name).learns(model).random_batch(samples, generator)


def step_of(engine: Engine, batch: Batch, number: int = 1) -> Step:
    """Return a step on a global batch, with this rank's share of it."""
    context = engine.stage.context
    return Step.of_batch(on_host(batch, context.device), context.share, number=number)


def any_kernel() -> AbstractContextManager[None]:
    """Return a context with all attention kernels: the runtime switches off those that its last plan does not name."""
    return sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]
    )


def stock_of(engine: Engine, attention: str, dtype: torch.dtype = torch.float32, experts: str = "eager") -> nn.Module:
    """Return the model of transformers with copies of the weights of an engine that has one rank.

    `experts`: how transformers computes experts, if the model has experts.
    """
    context = engine.stage.context
    model, family = context.plan.model, context.family
    config = family.configuration(model)
    config._attn_implementation, config._experts_implementation = attention, experts
    with context.device:
        stock: nn.Module = family.stock(config)
    own = by_stock_names(engine, lambda parameter: parameter.detach())
    aliases = {second: first for first, second in model.tied}
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            parameter.copy_(own[aliases.get(name, name)].view(parameter.shape))
    return stock.to(dtype)


def by_stock_names(engine: Engine, pick: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
    """Return what `pick` returns for each parameter of an engine of one rank, by the names of transformers.

    Parameters that are stacked in one matrix in transformers are concatenated.
    """
    context = engine.stage.context
    model, family = context.plan.model, context.family
    aliases = {second: first for first, second in model.tied}
    parts: dict[str, dict[int, Tensor]] = {}
    for layer in engine.stage.layers:
        for local, parameter in layer.parallel.parameters.items():
            if (picked := pick(parameter)) is not None:
                name, place = family.file_name(family.hugging_face_name(model, layer.name, local))
                parts.setdefault(aliases.get(name, name), {}).setdefault(place, local_tensor(picked))
    return {
        name: held[0] if len(held) == 1 else torch.cat([held[place] for place in range(len(held))])
        for name, held in parts.items()
    }


def logits_of(stock: nn.Module, batch: Batch) -> Tensor:
    """Return the logits, in the order of the batch's labels; the last dimension is the classes."""
    match type(stock).__name__:
        case "BertForMaskedLM":
            found = stock(batch["tokens"], attention_mask=batch["attention_mask"]).logits
        case "T5ForConditionalGeneration":
            # Stock transformers makes the decoder's tokens from the labels itself.
            found = stock(batch["tokens"], labels=batch["labels"].contiguous()).logits
        case "ViTForImageClassification":
            # In the dtype of the weights, as in the runtime.
            found = stock(batch["pixel_values"].to(next(stock.parameters()).dtype)).logits[:, None]
        case _:
            found = stock(batch["tokens"]).logits
    logits: Tensor = found
    return logits


@contextmanager
def memory_given_back(device: torch.device) -> Iterator[None]:
    """Reset a device's peak memory statistics before the `with` block, and free unused memory before and after it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    yield
    if device.type == "cuda":
        torch.cuda.empty_cache()


def row_counts(counts: Tensor) -> Counts:
    """Return the numbers of rows of experts [experts] in the form that `expert_products` takes."""
    return Counts(counts)
