"""Run by the launcher, one process per rank: plans beside the same with experts placed by the load of their first step.

Rank 0 writes, as JSON by the plan's name, what `Seen` has; all save what they have after each step.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace as with_fields
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from checkpoint_worker import JOB, saved
from tiny_models import batch_of, engine_of

from shardwright.io import read_document
from shardwright.plan.axes import axes_of
from shardwright.plan.expert_placement import expert_slices
from shardwright.types import ExpertLoad, LayerLoad, Plan, Plans
from shardwright_search.commands.place import placed_layers, with_placement
from shardwright_train.checkpoints.folders import Identity
from shardwright_train.checkpoints.tensors import read_tensors
from shardwright_train.engine.engine import Engine
from shardwright_train.engine.learning_rate import ANY
from shardwright_train.models import experts
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World, joined_world
from shardwright_train.pipeline.runner import Step

SETTINGS = with_fields(ANY, learning_rate=1e-2, steps=3)


class Seen(NamedTuple):
    """Of each placed layer by its name, rows of each group of ranks as the load has them, and as ranks got them."""

    groups: dict[str, list[list[int]]]
    consecutive: dict[str, list[int]]
    """Rows of groups of neighbours."""
    predicted: dict[str, list[int]]
    got_before: dict[str, list[int]]
    got: dict[str, list[int]]
    outcomes: list[list[float]]
    """Loss and norm of all steps: plain, placed, plain after placed, placed after plain."""


def main(plans_file: str, folder: str, result_file: str) -> None:
    results = {}
    with joined_world("cpu") as world:
        groups = Groups("cpu")
        for plan in read_document(Path(plans_file), Plans).plans:
            torch.set_default_dtype(getattr(torch, plan.precision.parameters))
            results[plan.name] = _seen(plan, world, groups, Path(folder, plan.name))
        if world.rank == 0:
            Path(result_file).write_text(json.dumps(results))


def _seen(plan: Plan, world: World, groups: Groups, folder: Path) -> Seen:
    plain = engine_of(plan, world, groups, settings=SETTINGS)
    with _counted(plain) as rows:
        outcomes, assignments = _step(plain, plan, 1)
    load = _load(plan, assignments)
    found = [one for one in placed_layers(plan, load) if one.after < one.before]
    placed_plan = with_placement(plan, {one.layer: one.groups for one in found})
    placed = engine_of(placed_plan, world, groups, settings=SETTINGS)
    with _counted(placed) as placed_rows:
        placed_outcomes, _ = _step(placed, placed_plan, 1)
    first = [_saved(folder / name, engine) for name, engine in (("plain 1", plain), ("placed 1", placed))]
    outcomes += _step(plain, plan, 2)[0]
    placed_outcomes += _step(placed, placed_plan, 2)[0]
    for name, engine in (("plain 2", plain), ("placed 2", placed)):
        _saved(folder / name, engine)
    crossed = []
    for name, of, start in (("plain after", plan, first[1]), ("placed after", placed_plan, first[0])):
        engine = engine_of(of, world, groups, settings=SETTINGS, updates=1)
        read_tensors(start, engine.tensors(), engine.expert_orders())
        crossed.append(_step(engine, of, 2)[0])
        _saved(folder / name, engine)
    counts = {f"layers[{n}]": list(map(round, assignments[part])) for n, part in expert_slices(plan.model).items()}
    names = [f"layers[{one.layer}]" for one in found]
    sizes = {name: len(counts[name]) // len(one.groups) for name, one in zip(names, found, strict=True)}
    return Seen(
        {name: [list(group) for group in one.groups] for name, one in zip(names, found, strict=True)},
        {n: [sum(counts[n][i : i + sizes[n]]) for i in range(0, len(counts[n]), sizes[n])] for n in names},
        {n: [sum(counts[n][e] for e in group) for group in one.groups] for n, one in zip(names, found, strict=True)},
        _by_group(plan, world, rows),
        _by_group(plan, world, placed_rows),
        [outcomes, placed_outcomes, *crossed],
    )


def _step(engine: Engine, plan: Plan, number: int) -> tuple[list[float], tuple[float, ...]]:
    batch = batch_of(plan.model, plan.global_batch_size, number)
    outcome = engine.train_step(Step.of_batch(batch, engine.stage.context.share, number=number))
    return [outcome.loss, outcome.grad_norm], outcome.assignments


def _load(plan: Plan, assignments: tuple[float, ...]) -> ExpertLoad:
    layers = []
    for layer, part in expert_slices(plan.model).items():
        counts = assignments[part]
        layers.append(LayerLoad(layer=layer, shares=tuple(count / sum(counts) for count in counts)))
    return ExpertLoad(model=plan.model.name, first_step=1, last_step=1, layers=tuple(layers))


def _saved(folder: Path, engine: Engine) -> Path:
    return saved(folder, engine, Identity.of_run(JOB, engine.stage.context.plan, data_sha256="0" * 64))


@contextmanager
def _counted(engine: Engine) -> Iterator[Counter[str]]:
    """Count the rows that this rank's experts get, by layer; replays count, too."""
    names = {id(module): layer.name for layer in engine.stage.layers for module in layer.module.modules()}
    rows, forward, exchange, here = Counter[str](), experts._forward, experts.exchange, list[str]()

    def named(part: Any, hidden: torch.Tensor) -> torch.Tensor:
        here.append(names[id(part)])
        return forward(part, hidden)

    def counted(*arguments: Any) -> Any:
        away = exchange(*arguments)
        rows[here[-1]] += sum(away.counts.for_host(0))
        return away

    with patch.object(experts, "_forward", named), patch.object(experts, "exchange", counted):
        yield rows


def _by_group(plan: Plan, world: World, rows: Counter[str]) -> dict[str, list[int]]:
    """Return the rows of the groups of ranks that have the same experts, in order, by layer."""
    every: list[Counter[str] | None] = [None] * world.size
    dist.all_gather_object(every, rows)
    found: dict[str, list[int]] = {}
    for rank, each in enumerate(every):
        me = plan.stages[plan.stage_of_rank(rank)].ranks.index(rank)
        for name, count in (each or {}).items():
            grid = plan.layers[int(name[len("layers[") : -1])].expert_grid
            assert grid is not None
            axis = axes_of(grid).dense.experts
            found.setdefault(name, [0] * axis.size)[axis.part_of(me)] += count
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
