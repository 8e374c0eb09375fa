"""The plans that are predicted beforehand: plans of one device, and of eight whose memory is measured on one."""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from gpu_kit import configurations
from gpu_kit.setting import Setting
from gpu_kit.workbench import MIXED, described, plan_of
from msgspec.structs import replace

from shardwright.models.adapter_config import adapter_of_config
from shardwright.models.low_rank import adapt
from shardwright.models.registry import read_presets
from shardwright.types import (
    ContextParallel,
    DataParallel,
    ExpertStrategy,
    Model,
    PipelineStage,
    Plan,
    Recompute,
    Schedule,
    SequenceParallel,
    Strategy,
)

LLAMA, SMALL, GPT2, EXPERTS = "llama-3-8b", "llama-1b", "gpt2-xl", "experts-32"
_PRESETS = LLAMA, GPT2
_TINY: dict[str, dict[str, Any]] = {
    LLAMA: {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "max_position_embeddings": 32},
    GPT2: {"vocab_size": 512, "n_embd": 64, "n_head": 4, "n_positions": 32},
    EXPERTS: {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32}
    | {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "num_experts": 8},
}
_LENGTHS = {LLAMA: 4096, SMALL: 4096, GPT2: 1024, EXPERTS: 4096}
_TINY_LENGTH = 32
_LORA = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
PACKED = "llama of 1 B, 4 layers, packed documents"
"""Name of the plan that `run` trains on documents that do not attend to one another, which `measure` cannot do."""


class Case(NamedTuple):
    """A plan, and whether the measured profile of Llama's layers can price it."""

    plan: Plan
    is_profiled: bool = True


def config_of(setting: Setting, model: str, layers: int) -> dict[str, Any]:
    """Return the config.json of a model with a number of layers."""
    config: dict[str, Any] = dict(configurations.LLAMA_1B if model == SMALL else configurations.EXPERTS)
    if model in _PRESETS:
        config = dict(read_presets()[model].config)
    config |= {"n_layer" if model == GPT2 else "num_hidden_layers": layers}
    if setting.tiny:
        config |= _TINY[LLAMA if model == SMALL else model]
    elif model == LLAMA:
        # With 128,256 tokens, embedding and head would be most of a small model and of the time to draw its weights.
        config |= {"max_position_embeddings": _LENGTHS[LLAMA], "vocab_size": 32000}
    return config


def length_of(setting: Setting, model: str) -> int:
    """Return the sequence length of a model."""
    return int(setting.size(_LENGTHS[model], _TINY_LENGTH))


@cache
def model_of(setting: Setting, model: str, layers: int, lora: bool = False, parts: int = 1) -> Model:
    """Return the description of a model with a number of layers, at its sequence length divided by `parts`."""
    found = described(config_of(setting, model, layers), model, length_of(setting, model) // parts)
    return adapt(found, adapter_of_config(_LORA, Path("LoRA")), Path("LoRA")) if lora else found


def of_one_device(setting: Setting) -> dict[str, Case]:
    """Return 14 plans of one device by name."""

    def llama(
        name: str,
        layers: int = 4,
        size: int = 1,
        microbatches: int = 1,
        recompute: Recompute = Recompute.NONE,
        kind: DataParallel = DataParallel.DDP,
    ) -> tuple[str, Case]:
        named = f"llama {layers} layers, {name}"
        strategy = Strategy(tp_size=1, dp_size=1, data_parallel=kind)
        plan = _plan(setting, named, model_of(setting, LLAMA, layers), strategy, size, microbatches, recompute)
        return named, Case(plan)

    alone = Strategy(tp_size=1, dp_size=1)
    others = {
        "llama 4 layers, LoRA": model_of(setting, LLAMA, 4, lora=True),
        "gpt2-xl 12 layers": model_of(setting, GPT2, 12),
        PACKED: model_of(setting, SMALL, 4),
    }
    full, selective = Recompute.FULL, Recompute.SELECTIVE
    return dict(
        (
            llama("plain", layers=2),
            llama("plain"),
            llama("plain", layers=8),
            llama("4 microbatches", microbatches=4),
            llama("full recomputation", recompute=full),
            llama("full recomputation, 4 microbatches", microbatches=4, recompute=full),
            llama("selective recomputation", recompute=selective),
            llama("selective recomputation, 4 microbatches", microbatches=4, recompute=selective),
            llama("micro-batch of 2", size=2),
            llama("micro-batch of 2, 2 microbatches, full", size=2, microbatches=2, recompute=full),
            llama("ZeRO-3 of one rank, 4 microbatches", microbatches=4, kind=DataParallel.ZERO3),
            *((name, Case(_plan(setting, name, model, alone, 1, 1), False)) for name, model in others.items()),
        )
    )


def of_eight_devices(setting: Setting) -> dict[str, Case]:
    """Return 10 plans of eight devices by name."""
    model, sparse = model_of(setting, LLAMA, 8), model_of(setting, EXPERTS, 4)
    mega, zero2, zero3 = SequenceParallel.MEGATRON, DataParallel.ZERO2, DataParallel.ZERO3

    def flat(name: str, strategy: Strategy, of: Model = model, **fields: object) -> tuple[str, Case]:
        return name, Case(_plan(setting, name, of, strategy, 1, 2, **fields))

    def piped(name: str, chunks: int) -> tuple[str, Case]:
        layers, half = len(model.layers), 4
        cuts = [layers * i // (2 * chunks) for i in range(2 * chunks + 1)]
        stages = tuple(
            PipelineStage(
                ranks=tuple(range(i * half, (i + 1) * half)),
                layers=tuple((cuts[c], cuts[c + 1]) for c in range(i, 2 * chunks, 2)),
            )
            for i in range(2)
        )
        schedule = Schedule.INTERLEAVED_1F1B if chunks > 1 else Schedule.ONE_F_ONE_B
        strategy = Strategy(tp_size=1, dp_size=half)
        return name, Case(_plan(setting, name, model, strategy, 1, 4, stages=stages, schedule=schedule))

    gathered, ring = ContextParallel.GATHER, ContextParallel.RING
    return dict(
        (
            flat("tensor parallelism of 2, sequence split", Strategy(tp_size=2, dp_size=4, sequence_parallel=mega)),
            flat("Ulysses of 2", Strategy(tp_size=2, dp_size=4, sequence_parallel=SequenceParallel.ULYSSES)),
            flat("ZeRO-2", Strategy(tp_size=1, dp_size=8, data_parallel=zero2)),
            flat("ZeRO-3", Strategy(tp_size=1, dp_size=8, data_parallel=zero3)),
            flat("ZeRO-3 in groups of 4", Strategy(tp_size=1, dp_size=8, data_parallel=zero3, shard_size=4)),
            piped("1F1B of 2 stages", 1),
            piped("interleaved 1F1B of 2 stages", 2),
            flat("context of 2, gathered", Strategy(tp_size=1, cp_size=2, dp_size=4), context=gathered),
            flat("context of 2, ring", Strategy(tp_size=1, cp_size=2, dp_size=4), context=ring),
            flat("experts on 4", Strategy(tp_size=1, dp_size=8), of=sparse, experts=ExpertStrategy(ep_size=4)),
        )
    )


def _plan(
    setting: Setting,
    name: str,
    model: Model,
    strategy: Strategy,
    size: int,
    microbatches: int,
    recompute: Recompute = Recompute.NONE,
    stages: tuple[PipelineStage, ...] | None = None,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    **of_layers: object,
) -> Plan:
    samples = size * microbatches * strategy.dp_size
    plan = plan_of(
        setting,
        model,
        strategy,
        stages,
        name=name,
        global_batch_size=samples,
        num_microbatches=microbatches,
        schedule=schedule,
        precision=MIXED,
        attention="sdpa",
    )
    layers = tuple(replace(layer, recompute=recompute, **of_layers) for layer in plan.layers)
    return replace(plan, layers=layers)
