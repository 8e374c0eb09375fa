"""Run by the launcher, one process per rank: plans in float64 against one process, written as JSON by rank 0."""

import json
import logging
import math
import sys
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import LlamaConfig, LlamaForCausalLM

from shardwright_formats.files import read_document
from shardwright_formats.plan import Plan, Plans
from shardwright_train import optimiser
from shardwright_train.families import family_named
from shardwright_train.optimiser import Hyperparameters, ShardedAdamW
from shardwright_train.parallel import collectives, data_parallel
from shardwright_train.parallel.groups import Groups
from shardwright_train.parallel.tensor_parallel import TensorParallel
from shardwright_train.pipeline import Pipeline, run_step
from shardwright_train.stage import _seed_of, build_stage
from shardwright_train.world import World, joined_world

STEPS = 3
SETTINGS = Hyperparameters(learning_rate=1e-2, warmup_steps=1, steps=STEPS, weight_decay=0.1, clip_norm=0.5)


def batches(plan: Plan) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    shape = (plan.global_batch_size, plan.model.sequence_length + 1)
    return [torch.randint(0, plan.model.config["vocab_size"], shape, generator=generator) for _ in range(STEPS)]


class Reference:
    """The stock Hugging Face model with stock clipping and AdamW in one process."""

    def __init__(self, plan: Plan) -> None:
        family = family_named(plan.model.family, "plan")
        config = {k: v for k, v in plan.model.config.items() if k != "model_type"}
        config |= {"num_hidden_layers": len(plan.layers), "attn_implementation": "sdpa"}
        self.model = LlamaForCausalLM(LlamaConfig(**config))
        state = {}
        for name in ("embedding", *(f"layers[{i}]" for i in range(len(plan.layers))), "head"):
            torch.manual_seed(_seed_of(0, name))
            element = family.build(plan.model, name, "sdpa")
            state |= {family.full_name(name, local): p for local, p in element.named_parameters()}
        self.model.load_state_dict(state, strict=True)
        self.first_gradients: dict[str, Tensor] = {}
        self.losses: list[float] = []
        self.norms: list[float] = []
        self._train(plan)

    def _train(self, plan: Plan) -> None:
        named = dict(self.model.named_parameters())
        groups = [
            {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": SETTINGS.weight_decay},
            {"params": [p for p in named.values() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        adamw = torch.optim.AdamW(groups, betas=SETTINGS.betas, eps=SETTINGS.eps)
        for step, batch in enumerate(batches(plan), start=1):
            logits = self.model(batch[:, :-1]).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            adamw.zero_grad()
            loss.backward()
            if step == 1:
                self.first_gradients = {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
            self.norms.append(nn.utils.clip_grad_norm_(named.values(), SETTINGS.clip_norm).item())
            for group in adamw.param_groups:
                group["lr"] = SETTINGS.learning_rate_at(step)
            adamw.step()
            self.losses.append(loss.item())
        self.parameters = {n: p.detach() for n, p in named.items()}


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def worst(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """The largest difference on any rank, so that replicas that disagree are seen."""
    differences = [(whole(a).double() - b.double()).abs().max().item() for a, b in pairs]
    found = torch.tensor(max(differences) if all(map(math.isfinite, differences)) else math.inf)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def compare(plan: Plan, reference: Reference, groups: Groups, world: World) -> dict[str, float]:
    family = family_named(plan.model.family, "plan")
    groups.prepare(plan)
    stage = build_stage(plan, world.rank, family, groups, "sdpa", 0, world.device)
    place = Pipeline.of(plan, world.rank, groups, world.device)
    parameters = dict(stage.parameters_by_name(family))
    adamw = ShardedAdamW(parameters, SETTINGS)
    adamw.begin(0)
    gradient_error = loss_error = norm_error = 0.0
    for step, batch in enumerate(batches(plan), start=1):
        loss = run_step(stage, place, batch)
        if step == 1:
            gradient_error = worst([(p.grad, reference.first_gradients[n]) for n, p in parameters.items()])
        outcome = adamw.step(step, loss, stop=False)
        loss_error = max(loss_error, abs(outcome.loss - reference.losses[step - 1]))
        norm_error = max(norm_error, abs(outcome.grad_norm - reference.norms[step - 1]))
    return {
        "gradient": gradient_error,
        "loss": loss_error,
        "norm": norm_error,
        "parameters": worst([(p, reference.parameters[n]) for n, p in parameters.items()]),
    }


def _norm_gradients_not_summed() -> AbstractContextManager[object]:
    return patch.object(TensorParallel, "outside_gradient", property(lambda _self: Replicate()))


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
    return patch.object(optimiser, "_replicas", lambda _parameter: 1)


MUTATIONS = {
    f.__name__.removeprefix("_"): f
    for f in (
        _norm_gradients_not_summed,
        _bias_added_by_every_rank,
        _gradients_averaged_instead_of_summed,
        _pieces_swapped_in_redistribution,
        _sequence_gradient_scaled,
        _replicated_squares_counted_twice,
    )
}


def main(plans_file: str, result_file: str, *mutations: str) -> None:
    """Compare every plan; the last one once more with each mutation, under the mutation's name."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    plans = read_document(Path(plans_file), Plans).plans
    results = {}
    with joined_world("cpu") as world:
        groups = Groups("cpu")
        references: dict[str, Reference] = {}
        for plan in plans:
            torch.set_default_dtype(getattr(torch, plan.precision.parameters))
            key = f"{plan.model.types_sha256} {plan.model.layers} {plan.global_batch_size} {plan.precision.parameters}"
            if key not in references:
                references[key] = Reference(plan)
            results[plan.name] = compare(plan, references[key], groups, world)
        for name in mutations:
            with MUTATIONS[name]():
                results[name] = compare(plan, references[key], groups, world)
        if world.rank == 0:
            Path(result_file).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
