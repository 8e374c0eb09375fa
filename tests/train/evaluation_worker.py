"""Run by forked ranks: the loss of plans in float64 on data of unequal label counts, against one process."""

import json
import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from in_one_format import compute_in_the_inputs_format
from parity_worker import worst
from tiny_models import batch_of, engine_of, initial_stock, stock_logits
from torch import nn

from shardwright.io import read_document
from shardwright.types import Model, Plan, Plans
from shardwright_train.data.share import Batch, BatchShare
from shardwright_train.engine.engine import Engine
from shardwright_train.parallel.data import local_tensor
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.vocab import IGNORED
from shardwright_train.parallel.world import World, joined_world
from shardwright_train.pipeline.runner import Step
from shardwright_train.pipeline.stage import Chunk
from shardwright_train.torch_private import gathered_bytes
from shardwright_train.training.loop import Evaluator, ValidationData

SAMPLES = 37
"""No multiple of any global batch."""


@dataclass(frozen=True)
class Held:
    """A split whose samples have unlike numbers of labels, some none."""

    batch: Batch
    sha256: str = "0" * 64

    @classmethod
    def of(cls, model: Model) -> "Held":
        batch = batch_of(model, SAMPLES + 5, seed=7)
        labels = batch["labels"]
        kept = torch.rand(len(labels), 1, generator=torch.Generator().manual_seed(8))
        drawn = torch.rand(labels.shape, generator=torch.Generator().manual_seed(9))
        return cls(batch | {"labels": labels.masked_fill(drawn > kept**2, IGNORED)})

    def read(self, first: int, share: BatchShare) -> Batch:
        rows = (first + share.rows) % (SAMPLES + 5)
        return {name: x[rows] for name, x in self.batch.items() if name not in share.left_out}


def reference(plan: Plan) -> float:
    """Mean loss over all labels of the split, of the stock model in one process."""
    batch = {name: x[:SAMPLES] for name, x in Held.of(plan.model).batch.items()}
    labels, stock = batch["labels"].flatten(), initial_stock(plan.model).eval()
    with torch.no_grad():
        # With all labels, for T5's stock model makes its decoder's inputs from them.
        logits = stock_logits(stock, batch_of(plan.model, SAMPLES + 5, seed=7))[:SAMPLES].flatten(0, -2)
        return nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="mean").item()


def trained(engine: Engine, plan: Plan, between: Callable[[], object]) -> None:
    """Two steps, with something between them."""
    share = engine.stage.context.share
    for number in (1, 2):
        engine.train_step(Step.of_batch(batch_of(plan.model, plan.global_batch_size, number), share, number=number))
        between()


def compare(plan: Plan, wanted: float, groups: Groups, world: World, trains: bool) -> dict[str, float]:
    """Errors of loss and count, and what an evaluation leaves behind; where asked for, by how much training with
    evaluations, of which those between the steps are given up, differs from training without.
    """
    engine, held = engine_of(plan, world, groups), Held.of(plan.model)
    evaluator = Evaluator(engine, ValidationData(held, SAMPLES), world)  # type: ignore[arg-type]
    states = torch.get_rng_state()
    found = evaluator.evaluate(1)
    assert found is not None
    left = [float(parameter.grad is not None) for parameter in engine.optimizer.parameters.values()]
    left += [float(gathered_bytes(module)) for chunk in engine.stage.chunks for module in chunk.modules()]
    left += [float(not module.training) for chunk in engine.stage.chunks for module in chunk.modules()]
    left += [float(not torch.equal(states, torch.get_rng_state()))]
    counted = int((held.batch["labels"][:SAMPLES] != IGNORED).sum())
    errors = {
        "loss": abs(found.loss - wanted),
        "labels": abs(found.labels - counted),
        "left": worst([(torch.tensor(left), torch.zeros(len(left)))]),
    }
    if trains:
        stops = world.rank == world.size - 1
        trained(engine, plan, lambda: evaluator.evaluate(1, stops=lambda: stops))
        other = engine_of(plan, world, groups)
        trained(other, plan, lambda: None)
        pairs = zip(engine.tensors().values(), other.tensors().values(), strict=True)
        errors["training"] = worst([(local_tensor(one.detach()), local_tensor(same.detach())) for one, same in pairs])
    return errors


def _filling_counted() -> AbstractContextManager[object]:
    def read(self: ValidationData, number: int, share: BatchShare) -> Batch:
        return self.batches.read(number * share.global_samples, share)

    return patch.object(ValidationData, "read", read)


def _evaluated_with_dropout() -> AbstractContextManager[object]:
    return patch.object(Chunk, "eval", lambda self: self)


MUTATIONS = {f.__name__.removeprefix("_"): f for f in (_filling_counted, _evaluated_with_dropout)}


def main(plans_file: str, result_file: str, *mutations: str) -> None:
    """Compare every plan; the last one once more with each mutation, under the mutation's name."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    torch.set_default_dtype(torch.float64)
    compute_in_the_inputs_format()
    results: dict[str, dict[str, float]] = {}
    with joined_world("cpu") as world:
        groups = Groups("cpu")
        wanted: dict[str, float] = {}
        plans = read_document(Path(plans_file), Plans).plans
        for number, plan in enumerate(plans):
            key = plan.model.architecture_sha256 + str(plan.model.tied)
            if key not in wanted:
                wanted[key] = world.first_says(lambda plan=plan: reference(plan), float)  # type: ignore[misc]
            results[plan.name] = compare(plan, wanted[key], groups, world, trains=number % 2 == 0)
        for name in mutations:
            with MUTATIONS[name]():
                results[name] = compare(plan, wanted[key], groups, world, trains=False)
        if world.rank == 0:
            Path(result_file).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
