"""What families cannot do of context parallelism is refused in one line before ranks start, and all else runs."""

import msgspec
import pytest
from context_plans import with_context, with_rings
from msgspec import UNSET
from random_plans import on_devices, precision_of, random_plan
from tiny_models import CONFIGS, tiny

from shardwright.io import BadInput
from shardwright.models.context import plan_obstacle
from shardwright.types import Attention, ContextParallel, Plan, misfit
from shardwright_train.dry_run import simulate_step
from shardwright_train.models.base import family_named
from shardwright_train.models.support import check_supported


def ring(family: str, attention: Attention = Attention.AUTO, **config: object) -> Plan:
    """A plan of two ranks that share positions out in every block, round a ring."""
    plan = random_plan(tiny(family, **config), 0, 2, "float32", stages=1)
    shared = {"tp_size": 1, "cp_size": 2, "dp_size": 1, "tp_consecutive": True, "context": ContextParallel.RING}
    layers = tuple(msgspec.structs.replace(layer, **shared) for layer in plan.layers)
    return msgspec.structs.replace(plan, layers=layers, attention=attention)


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (ring("t5"), "context ring adds no bias to scores, as t5 models do"),
        (ring("bert"), "context ring adds no padding to scores, as bert models do"),
        (ring("llama", Attention.EAGER), "context ring computes only with the kernels of sdpa"),
        (ring("whisper"), "context ring attends to no other sequence than the queries'"),
    ],
)
def test_a_model_that_needs_masks_is_refused(plan: Plan, problem: str) -> None:
    with pytest.raises(BadInput) as refused:
        check_supported(plan, "plan.json")
    assert str(refused.value) == f"plan.json: {problem}: use gather"


@pytest.mark.parametrize("context", ContextParallel)
def test_heads_that_a_gpus_kernels_do_not_take_are_refused_before_ranks_start(context: ContextParallel) -> None:
    plan = ring("llama", hidden_size=72, num_attention_heads=6, num_key_value_heads=6)  # heads of 12 features
    layers = tuple(msgspec.structs.replace(layer, context=context) for layer in plan.layers)
    check_supported(msgspec.structs.replace(plan, layers=layers, precision=precision_of("bfloat16")), "plan.json")
    on_gpu = on_devices(msgspec.structs.replace(plan, layers=layers), "NVIDIA H200", "NVIDIA H200")
    check_supported(on_gpu, "plan.json")  # in float32
    with pytest.raises(
        BadInput, match=r"^plan\.json: cp_size above 1 attends in bfloat16 on a GPU with heads of a mul"
    ):
        check_supported(msgspec.structs.replace(on_gpu, precision=precision_of("bfloat16")), "plan.json")


@pytest.mark.parametrize("family", ["llama", "gpt2", "vit", "olmo2", "mixtral"])
def test_a_model_of_causal_or_full_attention_is_run(family: str) -> None:
    plan = ring(family)
    assert all(misfit(plan.model, layer.type, layer) is None for layer in plan.layers)
    check_supported(plan, "plan.json")


def test_random_plans_have_rings_only_where_they_can_be() -> None:
    for family, number in (("t5", 7), ("bert", 5), ("gemma2", 3)):
        plan = with_context(random_plan(tiny(family), number, 8), number)
        assert with_rings(plan, 0) == with_rings(plan, 1) == plan


_QUICK = "bert", "t5", "gemma2", "olmo2", "gpt_oss", "llava"
_SHAPES = "context ring does not support", "does not divide", "unequal heads"
"""Words of what the shapes and windows of a type of layer refuse."""


@pytest.mark.parametrize(
    ("family", "context"),
    [
        pytest.param(name, context, marks=() if name in _QUICK else pytest.mark.long)
        for name in CONFIGS
        for context in ContextParallel
    ],
)
def test_a_family_runs_what_its_facts_do_not_refuse_and_nothing_else(family: str, context: ContextParallel) -> None:
    plan, runtime = random_plan(tiny(family), 0, 2, "float32", stages=1), family_named(family, "test")
    shared = {"tp_size": 1, "cp_size": 2, "dp_size": 1, "tp_consecutive": True, "context": context}
    layers = tuple(msgspec.structs.replace(layer, **shared, experts=UNSET) for layer in plan.layers)
    odd = [problem for layer in layers if (problem := misfit(plan.model, layer.type, layer)) is not None]
    if odd:
        assert all(any(words in problem for words in _SHAPES) for problem in odd)
        return
    plan = msgspec.structs.replace(plan, layers=layers, num_microbatches=1, global_batch_size=plan.microbatch_samples)
    if plan_obstacle(plan) is None:
        check_supported(plan, "plan.json")
        assert simulate_step(plan, 1, runtime, runtime.plain_kernel).message_bytes
    else:
        with pytest.raises(AssertionError, match="plans whose masks a ring does not support"):
            simulate_step(plan, 1, runtime, runtime.plain_kernel)
