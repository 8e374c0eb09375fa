"""No pass of a step makes the host wait for the device: seen without one, by tensors of no data in its place."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from random_plans import cluster_of, precision_of, random_plan
from rest_long import rest_long
from test_train_traffic import first_kinds, kinds_of_strategy
from tiny_models import batch_of, tiny
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.optim import adam
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.types import RECOMPUTE_WHOLE, ExpertStrategy, LayerStrategy, PipelineStage, Plan, Schedule, Strategy
from shardwright_train.engine.engine import build_engine
from shardwright_train.models.base import family_named
from shardwright_train.parallel import experts
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World
from shardwright_train.pipeline.layer import RankContext
from shardwright_train.pipeline.runner import Step
from shardwright_train.pipeline.stage import Stage
from shardwright_train.training.metrics import METRICS, Metrics

DEVICE = torch.device("meta")
"""It takes the place of a GPU: what is computed on it is not computed, and the host's tensors are the CPU's."""
SIZED_BY_VALUES = ("nonzero", "masked_select", "unique", "unique_dim", "_unique2", "unique_consecutive", "equal")


class _Copies(TorchDispatchMode):
    """Names what the host waits for: values, and sizes that depend on them."""

    def __init__(self, whole: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: list[str] = []
        self._whole = whole

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        sources = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_device = any(x.device == DEVICE for x in sources)
        if name in SIZED_BY_VALUES and on_device:
            raise AssertionError(f"{name} has a size that the device alone knows")
        if name.startswith("index") and any(
            x.dtype == torch.bool for x in tree_leaves(args[1:]) if isinstance(x, Tensor)
        ):
            raise AssertionError(f"{name} by a mask has a size that the device alone knows")
        if name == "_local_scalar_dense" and on_device:
            self.waits.append(name)
            return 1.0
        if name == "_to_copy":
            there = kwargs.get("device") or sources[0].device
            if sources[0].device == DEVICE != there:
                self.waits.append("a copy to the host")
                value = 1.0 if sources[0].is_floating_point() else self._whole
                return torch.full(sources[0].shape, value, dtype=kwargs.get("dtype") or sources[0].dtype)
            if sources[0].device != DEVICE == there and not kwargs.get("non_blocking"):
                self.waits.append("a copy from the host")
        if name == "copy_" and args[0].device != args[1].device and not (len(args) > 2 and args[2]):
            self.waits.append("a copy between host and device")
        return func(*args, **kwargs)


class _Made(TorchFunctionMode):
    """Names tensors that are made on the device of numbers on the host, which are copied there."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, Tensor.new_tensor) and made.device == DEVICE:
            self._waits.append("numbers of the host")
        return made


class _Stream(torch.cpu.Stream):
    def record_event(self, event: Any = None) -> Any:
        return torch.cpu.Event()


@pytest.fixture(scope="module", autouse=True)
def a_device_without_data() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # What FSDP2 and the optimizer ask of a kind of device.
        asked = {"current_device": lambda: 0, "Stream": _Stream, "current_stream": lambda *_: _Stream()}
        patch.setattr(torch, "meta", SimpleNamespace(**vars(torch.cpu) | asked), raising=False)
        patch.setattr(FSDPParamGroup, "_validate_no_meta_params", lambda _self: None)
        patch.setattr(adam, "_device_dtype_check_for_fused", lambda *_args, **_more: None)
        yield


def waits_of_a_step(plan: Plan, rank: int, whole: float = 1.0) -> list[str]:
    """What the host waits for in a rank's step, and to write it down; whole numbers of the device are all `whole`."""
    with ExitStack() as stack:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world_size)
        stack.callback(dist.destroy_process_group)
        family = family_named(plan.model.family, "test")
        context = RankContext(
            plan=plan,
            family=family,
            rank=rank,
            groups=Groups(DEVICE.type),
            attention="sdpa",
            device=DEVICE,
            seed=None,
        )
        engine = build_engine(context)
        assert engine.optimizer
        step = Step.of_batch(batch_of(plan.model, plan.global_batch_size, 0), context.share)
        folder = Path(stack.enter_context(TemporaryDirectory()))
        world = World(rank, plan.world_size, DEVICE, "fake", heartbeat=None)  # type: ignore[arg-type]
        metrics = Metrics(folder / METRICS, plan, world, steps=1)
        copies = stack.enter_context(_Copies(whole))
        stack.enter_context(_Made(copies.waits))
        metrics.write(1, engine.train_step(step), step_time_s=1.0)
        assert metrics.file.is_file() == (rank == 0)
        return list(copies.waits)


def longer(plan: Plan, times: int) -> Plan:
    """The same with so many times as many micro-batches."""
    return msgspec.structs.replace(
        plan,
        num_microbatches=plan.num_microbatches * times,
        global_batch_size=plan.global_batch_size * times,
    )


ONCE = ["a copy to the host"]
"""Loss, norm, who wants to stop and every rank's peak memory, at the step's end; what is written down needs no more."""


def test_the_host_waits_once_a_step_whatever_the_number_of_microbatches() -> None:
    plan = next(iter(kinds_of_strategy()))
    assert [waits_of_a_step(longer(plan, times), 0) for times in (1, 2, 5)] == [ONCE] * 3


@pytest.mark.parametrize("plans", rest_long(1, (first_kinds, kinds_of_strategy)))
def test_the_host_waits_once_a_step_whatever_the_strategy(plans: Callable[[], Iterable[Plan]]) -> None:
    found = {plan.name: waits_of_a_step(plan, 0) for plan in plans()}
    assert found == dict.fromkeys(found, ONCE)


@pytest.mark.parametrize("family", rest_long(3, ("llama", "t5", "vit", "qwen3", "gpt2", "bert")))
def test_the_host_waits_once_a_step_on_every_stage_of_each_family(family: str) -> None:
    plan = longer(random_plan(tiny(family), 3, 4, "bfloat16", stages=2), 2)
    ends = plan.stages[0].ranks[0], plan.stages[-1].ranks[-1]
    assert [waits_of_a_step(plan, rank) for rank in ends] == [ONCE] * 2


def sparse_plan(ranks: int, **layer: Any) -> Plan:
    """Two microbatches in bf16 of a model with experts in all blocks, of which each recomputes something else."""
    kinds = list(RECOMPUTE_WHOLE)
    types = ["sliding_attention", "full_attention"]
    model = tiny("gpt_oss", num_hidden_layers=len(kinds), layer_types=[types[i % 2] for i in range(len(kinds))])
    layers = [
        LayerStrategy(type=name, tp_size=1, dp_size=ranks, recompute=kind, **layer)
        for name, kind in zip(model.layers, kinds, strict=True)
    ]
    ends = Strategy(tp_size=1, dp_size=ranks)
    return Plan(
        name="experts",
        model=model,
        cluster=cluster_of(ranks),
        stages=(PipelineStage(ranks=tuple(range(ranks)), layers=((0, len(kinds)),)),),
        embedding=ends,
        head=ends,
        layers=tuple(layers),
        num_microbatches=2,
        global_batch_size=2 * ranks,
        schedule=Schedule.ONE_F_ONE_B,
        precision=precision_of("bfloat16"),
    )


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped products", "products one by one"])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_experts_make_the_host_wait_once_in_a_forward_pass_at_most(
    ep_size: int, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For how many rows go where, or each expert has: never in a backward pass, whatever it computes again."""
    monkeypatch.setattr(experts, "_has_grouped_products", lambda *_: grouped)
    shared = {} if ep_size == 1 else {"experts": ExpertStrategy(ep_size=ep_size, etp_size=1)}
    plan = sparse_plan(2, **shared)
    of_model = plan.model.types[plan.model.layers[0]].experts
    assert of_model
    rows_of_each = plan.model.sequence_length * of_model.top_k / of_model.number
    waits = len(waits_of_a_step(plan, 0, rows_of_each)) - len(ONCE)
    assert waits == (0 if grouped and ep_size == 1 else len(plan.layers) * plan.num_microbatches)


def test_a_value_that_a_step_looks_at_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = next(iter(kinds_of_strategy()))
    stock = Stage.finish_gradients

    def impatient(stage: Stage) -> None:
        stock(stage)
        next(stage.parameters())[-1].grad.sum().item()  # type: ignore[union-attr]

    monkeypatch.setattr(Stage, "finish_gradients", impatient)
    assert waits_of_a_step(plan, 0) == ["_local_scalar_dense", "a copy to the host"]
