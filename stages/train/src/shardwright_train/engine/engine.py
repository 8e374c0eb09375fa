"""A plan on one rank, ready to train: the pipeline stage, the schedule's runner and the optimizer.

`run`, `measure` and `check` build the same engine and differ in the hook that they pass to a step: so what is timed and
what is checked is the code that trains.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from torch import Tensor

from shardwright.optimizers.registry import matrix_dims
from shardwright.plan.chunks import chunk_layers
from shardwright.plan.layout import parameter_box
from shardwright.plan.process_groups import PlannedGroup, Purpose, strategy_groups
from shardwright.types import EMBEDDING, HEAD, LayerStrategy, Plan
from shardwright_train.engine.homes import Held
from shardwright_train.engine.host import LateUpdates
from shardwright_train.engine.learning_rate import ANY, Hyperparameters
from shardwright_train.engine.optimizer import ShardedOptimizer, StepOutcome
from shardwright_train.models.attention_kernels import use_kernels
from shardwright_train.pipeline.layer import RankContext
from shardwright_train.pipeline.p2p import Pipeline, StageAlone
from shardwright_train.pipeline.runner import MicrobatchChunk, Step, StepHook, no_hook, run_step
from shardwright_train.pipeline.stage import Stage, build_stage


@dataclass(frozen=True)
class Engine:
    """A rank's pipeline stage, its place in the pipeline, and the optimizer of its parameters."""

    stage: Stage
    pipeline: Pipeline
    settings: Hyperparameters
    updates: int
    """Number of earlier steps in which the optimizer changed the weights."""
    late: LateUpdates = field(default_factory=LateUpdates)
    """The parameter updates that the last step has left for this one."""

    @cached_property
    def optimizer(self) -> ShardedOptimizer:
        """The optimizer, made at the first use, when the parameters have memory."""
        parameters, replicas = self.stage.parameters_by_name(), self.stage.replicas()
        names, biases, context = self.stage.stock_names(), self.stage.router_biases(), self.stage.context
        given = parameters, self.settings, replicas, self.updates, names, biases
        held, (offloaded, on_host) = held_matrices(self.stage), offloaded_parameters(self.stage)
        rest = context.groups, held, offloaded, on_host, self.late, context.depths
        return ShardedOptimizer(*given, context.plan.optimizer, *rest)

    def forward_backward(self, step: Step, hook: StepHook = no_hook) -> Tensor:
        """Run the forward and backward passes of a global batch; see `run_step`."""
        return run_step(self.stage, self.pipeline, step, self.late, hook)

    def train_step(
        self, step: Step, *, stop: bool = False, save: bool = False, hook: StepHook = no_hook
    ) -> StepOutcome:
        """Run forward and backward passes and the update; `stop` and `save`: this rank's wishes, told to all ranks."""
        context = self.stage.context
        hook = slowed(hook, context.plan.cluster.of_rank(context.rank).slowdown)
        hook("start")
        loss = self.forward_backward(step, hook)
        hook("reduced")
        outcome = self.optimizer.step(step.number, loss, stop, step.loss_scale, save)
        hook("optimizer")
        return outcome

    def try_alone(self, step: Step) -> int:
        """Run the passes of only this rank's pipeline stage, up to its peak memory; return the number of microbatches.

        Needs the memory of a step, including gradients and optimizer, and changes nothing: its results have no
        meaning and are dropped. Collective over the ranks of the stage.
        """
        # Without neighbours no rank waits for another: an out-of-memory error of one stage cannot hang the others.
        alone = StageAlone.of_pipeline(self.pipeline)
        run_step(replace(self.stage, tied=self.stage.tied.alone()), alone, step, self.late)
        self.optimizer.forget_gradients()
        return len({action.microbatch for action in alone.actions()})

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint by name: parameters, and the optimizer states of trained ones.

        Updates that wait are finished first.
        """
        return {**self.optimizer.parameters, **self.optimizer.state()}

    def expert_orders(self) -> dict[str, tuple[int, ...]]:
        """Return the experts along the first dim, by tensor name, of checkpoint tensors that reorder experts."""
        orders = self.stage.expert_orders()
        states = [(name, name.removeprefix("optim.").rpartition(".")[0]) for name in self.optimizer.state()]
        return orders | {state: orders[name] for state, name in states if name in orders}


def offloaded_parameters(stage: Stage) -> tuple[dict[str, list[str]], frozenset[str]]:
    """Return the names of parameters with states in host memory, by layer, and of those that the host updates."""
    by_layer, on_host = defaultdict[str, list[str]](list), set[str]()
    for (layer, _, _), name in zip(stage.parameters(), stage.parameters_by_name(), strict=True):
        if isinstance(layer.strategy, LayerStrategy) and layer.strategy.offloads_optimizer:
            by_layer[layer.name].append(name)
            on_host |= {name} if layer.strategy.updates_on_host else set()
    return dict(by_layer), frozenset(on_host)


def held_matrices(stage: Stage) -> dict[str, Held]:
    """Return what the ranks of a stage hold of the blocks' trained parameters that consist of matrices, by name."""
    context, model, found = stage.context, stage.context.plan.model, dict[str, Held]()
    ranks = context.stage_ranks
    group = partial(context.groups.among, Purpose.EXCHANGE, ranks) if len(ranks) > 1 else None
    for layer in stage.layers:
        described = {p.name: p for p in model.type_of(layer.name).parameters}
        for name in layer.parallel.parameters if layer.kind not in (EMBEDDING, HEAD) else ():
            parameter = described[layer.described_name(name)]
            if (dims := matrix_dims(parameter)) is not None:
                strategy = layer.parallel.unit_of[name].strategy
                boxes = tuple(parameter_box(parameter, strategy, each) for each in range(len(ranks)))
                full_name = context.family.full_name(model, layer.name, parameter.name)
                found[full_name] = Held(parameter.shape, dims, boxes, context.me, group)
    return found


def say_compiled(plan: Plan, first_step_s: float) -> None:
    """Print the duration of a plan's first step, in which its blocks are compiled."""
    print(f"{plan.name}: first step, blocks compiled: {first_step_s:.1f} s", file=sys.stderr, flush=True)


def build_engine(context: RankContext, settings: Hyperparameters = ANY, updates: int = 0) -> Engine:
    """Create the plan's process groups and build this rank's part of it; collective over the world."""
    use_kernels(context.plan.precision, context.attention, context.device)
    # All groups before the first layer: creating one is collective over the world, but a rank builds only its layers.
    context.groups.prepare(context.plan, _groups_of_units(context))
    stage = build_stage(context)
    late = LateUpdates(tuple(layer.name for layer in stage.layers), stage.gathered_ahead)
    return Engine(stage, Pipeline.of_rank(context), settings, updates, late)


def _groups_of_units(context: RankContext) -> Iterator[PlannedGroup]:
    """Yield the groups of modules sharded differently from the rest of their layer, in the same order on all ranks."""
    plan = context.plan
    for index, stage in enumerate(plan.stages):
        for chunk in range(len(stage.layers)):
            for _, kind, strategy in chunk_layers(plan, index, chunk):
                for each in context.family.units(kind, strategy).values():
                    yield from strategy_groups(each, stage.ranks)


def slowed(hook: StepHook, times: int) -> StepHook:
    """Return a step hook that makes this rank's computation take `times` as long; waits are not slowed."""
    return hook if times == 1 else _Slowed(hook, times)


class _Slowed:
    """A hook that sleeps after each part of a step, as long as a slower processor would still compute."""

    def __init__(self, hook: StepHook, times: int) -> None:
        self._hook, self._times = hook, times
        self._computed_s = time.thread_time()

    def __call__(self, name: str, at: MicrobatchChunk | None = None) -> None:
        # Only this thread's CPU time: autograd runs on it if there is no accelerator, and gloo has separate threads.
        time.sleep((self._times - 1) * (time.thread_time() - self._computed_s))
        self._hook(name, at)
        self._computed_s = time.thread_time()
