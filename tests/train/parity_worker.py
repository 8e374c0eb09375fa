"""Run by the launcher, one process per rank: plans in float64 against one process, written as JSON by rank 0."""

import json
import logging
import math
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from file_forms import as_in_runtime
from frozen_models import adapted, frozen_names
from in_one_format import compute_in_the_inputs_format
from msgspec import UNSET
from mtp_reference import mtp_losses
from skewed_routing import begin_with, check_skewed, skew_of, skew_routing
from stock_experts import correct_biases, shares_of
from stock_optimizers import Matrices, stock_optimizer
from tiny_models import batch_of, engine_of, initial_stock, made_by_first, named_parameters, stock_logits
from torch import Tensor, nn
from transformers.loss.loss_utils import fixed_cross_entropy

from shardwright.io import read_document
from shardwright.models.mtp import mtp_layers
from shardwright.optimizers.registry import matrix_dims
from shardwright.plan.expert_placement import expert_slices, experts_by_place
from shardwright.plan.layout import parameter_box
from shardwright.types import EMBEDDING, HEAD, LOW_RANK, Model, Plan, Plans
from shardwright_train.data.share import Batch, with_boundaries
from shardwright_train.data.split import Boundaries
from shardwright_train.engine import optimizer
from shardwright_train.engine.homes import Homes, orthogonalized
from shardwright_train.engine.learning_rate import Hyperparameters, LearningRateFactor
from shardwright_train.models.base import family_named
from shardwright_train.parallel import checkpointing, collectives, parallelize
from shardwright_train.parallel import data as data_parallel
from shardwright_train.parallel.data import local_tensor
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.tensor import TensorParallel
from shardwright_train.parallel.vocab import IGNORED
from shardwright_train.parallel.world import World, joined_world
from shardwright_train.pipeline import runner
from shardwright_train.pipeline.runner import MTP_FACTOR, Step
from shardwright_train.pipeline.stage import Stage, TiedParameters
from shardwright_train.torch_private import compiled
from shardwright_train.weights.reading import from_file

STEPS = 3
SETTINGS = Hyperparameters(
    learning_rate=1e-2, warmup_steps=1, steps=STEPS, weight_decay=0.1, clip_norm=0.5, router_bias_update_rate=0.05
)
_FACTORS = ("*embed*=0.25", "*wte*=0.25", "shared.*=0.25", "*relative_attention_bias*=3", "*.[02].*=0.5")
GROUPED = replace(
    SETTINGS, decay_norms_and_biases=True, learning_rate_factors=tuple(map(LearningRateFactor.parse, _FACTORS))
)
"""Embeddings, which the head may share, T5's biases, which blocks share, and some blocks learn at their own rates."""


def settings_of(plan: Plan) -> Hyperparameters:
    return GROUPED if plan.name.startswith("grouped") else SETTINGS


def factor_of(name: str) -> float:
    """The same of a stock model's parameter, said otherwise."""
    if "embed" in name or "wte" in name or name == "shared.weight":
        return 0.25
    if "relative_attention_bias" in name:
        return 3.0
    return 0.5 if re.search(r"\.[02]\.", name) else 1.0


def batches(plan: Plan) -> list[Batch]:
    found = [batch_of(plan.model, plan.global_batch_size, seed) for seed in range(STEPS)]
    if "packed" in plan.name:
        predicts_next = family_named(plan.model.family, "test").learns(plan.model).predicts_next
        found = [packed(batch, seed, predicts_next) for seed, batch in enumerate(found)]
    if "completions" in plan.name:
        found = [with_prompts(batch, seed) for seed, batch in enumerate(found)]
    return found


def with_prompts(batch: Batch, seed: int) -> Batch:
    """A batch of which each sample learns another share of its tokens, from none of the first to nearly all."""
    labels = batch["labels"]
    shares = (torch.arange(len(labels)) / len(labels))[:, None] ** 2
    learned = torch.rand(labels.shape, generator=torch.Generator().manual_seed(seed)) < shares
    return batch | {"labels": labels.masked_fill(~learned, IGNORED)}


def packed(batch: Batch, seed: int, predicts_next: bool) -> Batch:
    """A batch whose samples are of several documents, some of one token."""
    samples, length = batch["tokens"].shape
    begins = torch.rand(samples, length + 1, generator=torch.Generator().manual_seed(seed)) < 0.3
    return with_boundaries(batch, begins.long().cumsum(1), Boundaries(True, True), predicts_next=predicts_next)


class Reference:
    """What the stock Hugging Face model and loss give with stock clipping and optimizer in one process: rank 0."""

    def __init__(self, plan: Plan) -> None:
        model = plan.model
        self.first_gradients: dict[str, Tensor] = {}
        self.losses: list[float] = []
        self.auxiliary: list[float] = []
        self.shares: list[list[float]] = []
        self.norms: list[float] = []
        self.further: list[list[float]] = []
        self._train(plan, initial_stock(model))

    def _train(self, plan: Plan, stock: nn.Module) -> None:
        skew = skew_of(plan)
        if skew is not None:
            skew_routing(stock, skew)
        for name in frozen_names(plan.model):
            stock.get_parameter(name).requires_grad_(False)
        if plan.model.low_rank is UNSET:
            named = {name: p for name, p in named_parameters(stock, plan.model).items() if p.requires_grad}
        else:
            named = adapted(stock, plan.model)
        self.initial = {name: p.detach().clone() for name, p in named.items()} if skew else {}
        settings = settings_of(plan)
        grouped, shapes, matrices = settings is GROUPED, described_shapes(plan.model), described_matrices(plan.model)
        groups = [
            {
                "params": [parameter],
                "weight_decay": 0.1 if grouped or (parameter.dim() > 1 and not name.endswith("bias")) else 0.0,
                "factor": factor_of(name) if grouped else 1.0,
                "shape": shapes.get(name),
                "matrices": matrices.get(name),
            }
            for name, parameter in named.items()
        ]
        stock_update = stock_optimizer(plan.optimizer, groups, SETTINGS.betas, SETTINGS.eps)
        for step, batch in enumerate(batches(plan), start=1):
            logits = stock_logits(stock, batch)
            if skew is not None:
                check_skewed(stock, skew)
            entropy = fixed_cross_entropy(logits.flatten(0, -2), batch["labels"].flatten())
            further = mtp_losses(stock, batch) if mtp_layers(plan.model.layers) else []
            auxiliary = auxiliary_of(stock) / plan.global_batch_size
            loss = entropy + auxiliary + MTP_FACTOR * sum(further) / max(1, len(further))
            stock_update.zero_grad()
            loss.backward()
            if step == 1:
                self.first_gradients = {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
            self.norms.append(nn.utils.clip_grad_norm_(named.values(), SETTINGS.clip_norm).item())
            for group in stock_update.param_groups:
                group["lr"] = SETTINGS.learning_rate_at(step) * group["factor"]
            stock_update.step()
            if plan.model.low_rank is UNSET:
                correct_biases(stock, settings.router_bias_update_rate)
            self.losses.append(loss.item())
            self.auxiliary.append(auxiliary.item())
            self.further.append([each.item() for each in further])
            self.shares.append(shares_of(stock))
        # Behind low-rank matrices peft holds what was there.
        buffers = {name.replace(".base_layer", ""): x for name, x in stock.named_buffers()}
        self.parameters = {n: p.detach() for n, p in named.items()} | buffers

    def part(self, values: dict[str, Tensor], stage: Stage) -> list[Tensor]:
        """What this rank should hold of some values of trained parameters, one by one."""
        return part_of_rank(values, stage, buffers=values is self.parameters)


def described_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters in its description, by their names in the stock model."""
    family = family_named(model.family, "test")
    layers = (EMBEDDING, *(f"layers[{i}]" for i in range(len(model.layers))), HEAD)
    return {family.owner_name(model, name, p.name): p.shape for name in layers for p in model.type_of(name).parameters}


def described_matrices(model: Model) -> dict[str, list[Matrices]]:
    """The matrices of blocks by the names of the stock model's parameters, which may have several one under another."""
    family, layers = family_named(model.family, "test"), [f"layers[{i}]" for i in range(len(model.layers))]
    found: dict[str, dict[int, Matrices]] = {}
    for layer in layers:
        for parameter in model.type_of(layer).parameters:
            if (dims := matrix_dims(parameter)) is not None:
                name, place = family.file_name(family.owner_name(model, layer, parameter.name))
                found.setdefault(name, {})[place] = parameter.shape, dims
    return {name: [parts[i] for i in range(len(parts))] for name, parts in found.items()}


def part_of_rank(values: dict[str, Tensor], stage: Stage, buffers: bool = False) -> list[Tensor]:
    """What a rank should hold of values of a stock model's trained parameters, and of its `buffers`, one by one."""
    model, family, me = stage.context.plan.model, stage.context.family, stage.context.me
    found = []
    for layer in stage.layers:
        described = {p.name: p for p in model.type_of(layer.name).parameters}
        held = {
            local: described[family.described_name(layer.kind, local)]
            for local, _ in layer.module.named_parameters()
            if described[family.described_name(layer.kind, local)].trained
            or (buffers and described[family.described_name(layer.kind, local)].is_buffer)
        }
        names = {local: family.owner_name(model, layer.name, local) for local in held}
        whole = as_in_runtime(family, values, {names[local]: held[local].shape for local in held})
        for local, parameter in held.items():
            box = parameter_box(parameter, layer.parallel.unit_of[local].strategy, me)
            value = whole[names[local]]
            value = from_file(value, parameter) if LOW_RANK in local else value.view(parameter.shape)
            if parameter.ep_dim == 0 and (order := experts_by_place(stage.context.plan, layer.name)) is not None:
                value = value[list(order)]
            found.append(value[tuple(slice(low, high) for low, high in box)])
    return found


def auxiliary_of(stock: nn.Module) -> Tensor:
    """What the blocks of a stock model have added to the loss in their last pass: a sum over samples."""
    return torch.as_tensor(sum(module.auxiliary for module in stock.modules() if hasattr(module, "auxiliary")))


def worst(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """The largest difference on any rank, so that replicas that disagree are seen; padding does not count.

    It is relative where values are over 1: gradients behind the norm of a projection that begins with 0 are 1e8.
    """
    differences = [0.0]
    for mine, wanted in pairs:
        cut = mine[tuple(slice(0, length) for length in wanted.shape)].double() - wanted.double()
        differences.append(cut.abs().max().item() / max(1.0, wanted.abs().max().item()) if cut.numel() else 0.0)
    found = torch.tensor(max(differences) if all(map(math.isfinite, differences)) else math.inf)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def compare(
    plan: Plan, reference: Reference, groups: Groups, world: World, exact: Sequence[float] = ()
) -> dict[str, float]:
    """Errors against one process; of a loss to the nearer of that process and its `exact` one, in float64.

    Adam's first steps magnify rounding where gradients are almost 0: two right runs in float32 stray to both sides.
    """
    engine = engine_of(plan, world, groups, settings=settings_of(plan))
    stage, parameters = engine.stage, engine.optimizer.parameters
    if reference.initial:
        begin_with(parameters, reference.part(reference.initial, stage))
    gradient_error = loss_error = norm_error = load_error = 0.0
    for step, batch in enumerate(batches(plan), start=1):
        loss = engine.forward_backward(Step.of_batch(batch, stage.context.share, number=step))
        if step == 1:
            mine = [local_tensor(p.grad) for p in parameters.values() if p.grad is not None]
            gradient_error = worst(list(zip(mine, reference.part(reference.first_gradients, stage), strict=True)))
        outcome = engine.optimizer.step(step, loss, stop=False)
        auxiliary = outcome.auxiliary_loss or 0.0
        wanted = reference.losses[step - 1], *exact[step - 1 : step]
        loss_error = max(loss_error, min(abs(outcome.loss - loss) for loss in wanted))
        loss_error = max(loss_error, abs(auxiliary - reference.auxiliary[step - 1]))
        loads = zip(shares_in(plan, outcome.assignments), reference.shares[step - 1], strict=True)
        load_error = max(load_error, *(abs(one - other) for one, other in loads), 0.0)
        depths = zip(outcome.mtp_losses, reference.further[step - 1], strict=True)
        loss_error = max(loss_error, *(abs(one - other) for one, other in depths), 0.0)
        norm = reference.norms[step - 1]
        norm_error = max(norm_error, abs(outcome.grad_norm - norm) / max(1.0, norm))
    engine.late.flush()
    held = parameters.items()
    mine = [local_tensor(p.detach()) for n, p in held if p.requires_grad or n.endswith("correction_bias")]
    return {
        "gradient": gradient_error,
        "loss": loss_error,
        "norm": norm_error,
        "load": load_error,
        "parameters": worst(list(zip(mine, reference.part(reference.parameters, stage), strict=True))),
    }


def _exact_losses(plan: Plan, world: World) -> Sequence[float]:
    torch.set_default_dtype(torch.float64)
    losses = made_by_first(world, Reference, plan).losses
    torch.set_default_dtype(torch.float32)
    return losses


def shares_in(plan: Plan, assignments: Sequence[float]) -> list[float]:
    """Shares of the experts of each layer in its assignments, layer after layer."""
    parts = [assignments[part] for part in expert_slices(plan.model).values()] if assignments else []
    return [count / sum(part) for part in parts for count in part]


def _norm_gradients_not_summed() -> AbstractContextManager[object]:
    return patch.object(TensorParallel, "sums_outside", property(lambda _self: False))


def _bias_added_by_every_rank() -> AbstractContextManager[object]:
    return patch.object(TensorParallel, "rank", property(lambda _self: 0))


def _gradients_averaged_instead_of_summed() -> AbstractContextManager[object]:
    return patch.object(data_parallel, "_sum_gradients", lambda _module: None)


def _pieces_swapped_in_redistribution() -> AbstractContextManager[object]:
    return patch.object(dist, "all_to_all_single", lambda out, inp, *_args, **_kwargs: out.copy_(inp.flip(0)))


def _sequence_gradient_scaled() -> AbstractContextManager[object]:
    gather = collectives._gather
    return patch.object(collectives, "_gather", lambda x, group: gather(x, group) * 1.001)


def _replicated_squares_counted_twice() -> AbstractContextManager[object]:
    return patch.object(optimizer, "_replicas", lambda _parameter: 1)


def _a_transfer_skipped() -> AbstractContextManager[object]:
    move = collectives._Move.__call__

    def skipping(self: collectives._Move, x: Tensor) -> Tensor:
        moved = move(self, x)
        if received := [window for from_peer in self.receives for window in from_peer]:
            moved[received[-1]] = 0
        return moved

    return patch.object(collectives._Move, "__call__", skipping)


def _partial_gradients_reduced_twice() -> AbstractContextManager[object]:
    once = collectives.all_reduce_together

    def twice(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        once(tensors, group)
        once(tensors, group)

    return patch("shardwright_train.pipeline.stage.all_reduce_together", twice)


def _copies_of_tied_parameters_not_summed() -> AbstractContextManager[object]:
    return patch.object(TiedParameters, "sum_gradients", lambda _self, _gradients, _like: None)


def _auxiliary_losses_without_gradient() -> AbstractContextManager[object]:
    return patch.object(
        runner._Passes, "losses", property(lambda _self: defaultdict(list), lambda *_: None), create=True
    )


def _units_not_reduced() -> AbstractContextManager[object]:
    made = parallelize._unit

    def reduced(layer: nn.Module, root: str, *arguments: Any) -> parallelize.Unit:
        unit = made(layer, root, *arguments)
        return replace(unit, gradient_all_reduce=None) if root else unit

    return patch.object(parallelize, "_unit", reduced)


def _copies_counted_twice_in_the_norm() -> AbstractContextManager[object]:
    return patch.object(Stage, "replicas", lambda _self: frozenset())


def _parts_of_matrices_orthogonalized_alone() -> AbstractContextManager[object]:
    def alone(_self: Homes, tensors: Sequence[Tensor]) -> None:
        for x in tensors:
            for matrix in x.view(-1, *x.shape[-2:]) if x.numel() else ():
                matrix.copy_(orthogonalized(matrix.clone()))

    return patch.object(Homes, "orthogonalize", alone)


MUTATIONS = {
    f.__name__.removeprefix("_"): f
    for f in (
        _norm_gradients_not_summed,
        _bias_added_by_every_rank,
        _gradients_averaged_instead_of_summed,
        _pieces_swapped_in_redistribution,
        _sequence_gradient_scaled,
        _replicated_squares_counted_twice,
        _a_transfer_skipped,
        _partial_gradients_reduced_twice,
        _copies_of_tied_parameters_not_summed,
        _copies_counted_twice_in_the_norm,
        _auxiliary_losses_without_gradient,
        _units_not_reduced,
        _parts_of_matrices_orthogonalized_alone,
    )
}


def main(plans_file: str, result_file: str, *mutations: str) -> None:
    """Compare every plan; the last one once more with each mutation, under the mutation's name."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    compute_in_the_inputs_format()
    plans = read_document(Path(plans_file), Plans).plans
    results: dict[str, dict[str, float]] = {}
    with joined_world("cpu") as world:
        groups = Groups("cpu")
        references: dict[str, Reference] = {}
        for plan in plans:
            # The compiler's own backend takes a minute; the graphs are the same.
            backend = "inductor" if plan.name.startswith("inductor") else "aot_eager"
            checkpointing.compiled = partial(compiled, backend=backend)
            torch.set_default_dtype(getattr(torch, plan.precision.parameters))
            key = f"{plan.model.architecture_sha256} {len(plan.layers)} {plan.model.tied} {plan.precision.parameters}"
            key += f" {plan.model.layers} {plan.global_batch_size} {settings_of(plan)} {'packed' in plan.name}"
            key += f" {skew_of(plan)} {'completions' in plan.name} {plan.optimizer}"
            if key not in references:
                references[key] = made_by_first(world, Reference, plan)
            exact = _exact_losses(plan, world) if plan.precision.parameters == "float32" else ()
            results[plan.name] = compare(plan, references[key], groups, world, exact)
        for name in mutations:
            with MUTATIONS[name]():
                results[name] = compare(plan, references[key], groups, world)
        if world.rank == 0:
            Path(result_file).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
