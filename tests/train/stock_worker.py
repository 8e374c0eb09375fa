"""Run on each of two ranks: plans of a model that is trained as its stock class, against that class in one process.

The stock class computes in float64 here whatever it asks for, since in float32 the order of samples would show.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, wraps
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from frozen_models import adapted
from msgspec import UNSET
from parity_worker import SETTINGS as USUAL
from parity_worker import worst
from random_plans import cluster_of, precision_of
from tiny_models import batch_of, engine_of, initial_stock, named_parameters
from tiny_types import TOKENS
from torch import Tensor, nn

from shardwright.io import BadInput
from shardwright.models.adapter_config import ADAPTER_CONFIG, read_adapter
from shardwright.models.low_rank import adapt
from shardwright.models.registry import check_trained
from shardwright.plan.layout import parameter_box
from shardwright.types import (
    DataParallel,
    GradientReduction,
    LayerStrategy,
    Model,
    PipelineStage,
    Plan,
    Recompute,
    Schedule,
    Strategy,
)
from shardwright.types.plan import misfit
from shardwright_train.data.share import Batch
from shardwright_train.models.as_stock import as_stock
from shardwright_train.models.traced import calling, describe_by_trace
from shardwright_train.parallel.data import local_tensor
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World, joined_world
from shardwright_train.pipeline.runner import Step
from shardwright_train.pipeline.stage import Stage

__all__ = ["LENGTH", "TOLERANCE", "Prepared", "compute_in_float64", "main", "plans_of", "prepared"]

LENGTH, STEPS, SAMPLES = 16, 2, 4
TOLERANCE = 1e-10
SETTINGS = replace(USUAL, eps=1e-4)
"""With the usual eps, AdamW would make 1e-8 of a difference of 1e-16 in gradients that are almost 0."""


def compute_in_float64() -> None:
    """Let nothing that transformers calls round to float32 in this process."""
    for owner, names in _WITH_DTYPE.items():
        for name in names:
            setattr(owner, name, _wide(getattr(owner, name)))
    narrow = torch.Tensor.float
    torch.Tensor.float = lambda self, *args, **kwargs: (  # type: ignore[method-assign]
        self.double() if _called_by_transformers() else narrow(self, *args, **kwargs)
    )


_WITH_DTYPE: dict[Any, tuple[str, ...]] = {
    torch.Tensor: ("to", "type", "sum", "mean", "softmax", "cumsum"),
    torch: ("sum", "mean", "softmax", "cumsum", "zeros", "ones", "full", "zeros_like", "ones_like"),
    nn.functional: ("softmax", "log_softmax"),
}
"""Functions that take a format."""


def _wide(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if _called_by_transformers():
            args = tuple(torch.float64 if x is torch.float32 else x for x in args)
            kwargs = {key: torch.float64 if x is torch.float32 else x for key, x in kwargs.items()}
        return function(*args, **kwargs)

    return called


def _called_by_transformers() -> bool:
    return str(sys._getframe(2).f_globals["__name__"]).startswith("transformers.")


def plans_of(model: Model) -> tuple[Plan, ...]:
    """Data parallelism of both kinds, pipelines of both, and tensor parallelism of blocks that can be shared out.

    With all kinds of recomputation that blocks have.
    """
    all_kinds, one = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL), Schedule.ONE_F_ONE_B
    divided = () if undivided(model, 2) else (_plan(model, "tp", 1, 2, DataParallel.ZERO3, all_kinds, one, 2),)
    return (
        _plan(model, "zero3", 1, 2, DataParallel.ZERO3, (Recompute.FULL,), Schedule.ONE_F_ONE_B),
        _plan(model, "ddp", 1, 1, DataParallel.DDP, (Recompute.SELECTIVE, Recompute.NONE), Schedule.ONE_F_ONE_B),
        _plan(model, "1f1b", 2, 4, DataParallel.ZERO2, (Recompute.NONE, Recompute.FULL), Schedule.ONE_F_ONE_B),
        _plan(model, "gpipe", 2, 2, DataParallel.ZERO3, (Recompute.NONE,), Schedule.GPIPE),
        _plan(model, "interleaved", 2, 2, DataParallel.DDP, (Recompute.NONE,), Schedule.INTERLEAVED_1F1B),
        _plan(model, "zero_bubble", 2, 4, DataParallel.DDP, (Recompute.NONE, Recompute.FULL), Schedule.ZERO_BUBBLE),
        *divided,
    )


def undivided(model: Model, ranks: int) -> str | None:
    """Why ranks cannot share out the blocks of a model; None: they can."""
    if (problem := as_stock(model.family).plan_problem) is not None:
        return problem
    odd = [_misfit(model, kind, ranks) for kind in dict.fromkeys(model.layers)]
    return None if None in odd else odd[0]


def _misfit(model: Model, kind: str, ranks: int) -> str | None:
    return misfit(model, kind, Strategy(tp_size=ranks, dp_size=1))


def _plan(
    model: Model,
    name: str,
    stages: int,
    microbatches: int,
    kind: DataParallel,
    recompute: Sequence[Recompute],
    schedule: Schedule,
    tp: int = 1,
) -> Plan:
    dp, layers = 2 // stages, len(model.layers)
    ranges = 2 * stages if schedule is Schedule.INTERLEAVED_1F1B else stages
    cuts = [(layers * i // ranges, layers * (i + 1) // ranges) for i in range(ranges)]
    end = Strategy(tp_size=1, dp_size=dp, data_parallel=kind)
    return Plan(
        name=name,
        model=model,
        cluster=cluster_of(2),
        global_batch_size=SAMPLES,
        num_microbatches=microbatches,
        schedule=schedule,
        gradient_reduction=GradientReduction.EVERY_MICROBATCH if name == "zero3" else GradientReduction.DEFERRED,
        precision=precision_of("float64"),
        stages=tuple(
            PipelineStage(ranks=(i,) if stages > 1 else (0, 1), layers=tuple(cuts[i::stages])) for i in range(stages)
        ),
        embedding=end,
        head=end,
        layers=tuple(
            LayerStrategy(type=each, tp_size=size, dp_size=dp // size, data_parallel=kind, recompute=how)
            for each, how in zip(model.layers, cycle(recompute), strict=False)
            for size in [tp if _misfit(model, each, tp) is None else 1]
        ),
    )


class _Reference:
    """The stock class in one process, with torch's AdamW and clipping.

    `rounded`: whether each initial weight is first moved by one rounding, up or down at random.
    """

    def __init__(self, model: Model, batches: Sequence[Batch], *, rounded: bool = False) -> None:
        stock = initial_stock(model)
        if rounded:
            _move_by_one_rounding(stock)
        _check_causal(stock, batches[0]["tokens"])
        self.named = named_parameters(stock, model) if model.low_rank is UNSET else adapted(stock, model)
        learned = [p for p in self.named.values() if p.requires_grad]
        decayed = [p for n, p in self.named.items() if p.requires_grad and p.dim() > 1 and not n.endswith("bias")]
        others = [p for p in learned if not any(p is each for each in decayed)]
        groups = [{"params": decayed, "weight_decay": SETTINGS.weight_decay}, {"params": others, "weight_decay": 0.0}]
        adamw = torch.optim.AdamW(groups, betas=SETTINGS.betas, eps=SETTINGS.eps)
        self.losses, self.norms, self.gradients = list[float](), list[float](), dict[str, Tensor]()
        for step, batch in enumerate(batches, start=1):
            logits = stock(**calling(stock.forward, batch["tokens"])).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten())
            adamw.zero_grad()
            loss.backward()
            for parameter in learned:  # What a step gives no gradient is decayed all the same in a run.
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if step == 1:
                self.gradients = {n: p.grad.clone() for n, p in self.named.items() if p.grad is not None}
            self.norms.append(nn.utils.clip_grad_norm_(learned, SETTINGS.clip_norm).item())
            for group in adamw.param_groups:
                group["lr"] = SETTINGS.learning_rate_at(step)
            adamw.step()
            self.losses.append(loss.item())
        self.parameters = {n: p.detach() for n, p in self.named.items()}

    def distance(self, other: "_Reference") -> float:
        """The largest difference from another in what `_compare` compares, relative where values are over 1."""
        pairs = [(a, other.gradients[n]) for n, a in self.gradients.items()]
        pairs += [(a, other.parameters[n]) for n, a in self.parameters.items()]
        pairs += [(torch.tensor(a), torch.tensor(b)) for a, b in zip(self.norms, other.norms, strict=True)]
        far = [(a - b).abs().max().item() / max(1.0, b.abs().max().item()) for a, b in pairs if a.numel()]
        return max(far + [abs(a - b) for a, b in zip(self.losses, other.losses, strict=True)])

    def part(self, values: dict[str, Tensor], stage: Stage) -> list[Tensor]:
        """What this rank should hold of some values of trained parameters."""
        model, family, me, found = stage.context.plan.model, stage.context.family, stage.context.me, []
        for layer in stage.layers:
            described = {p.name: p for p in model.type_of(layer.name).parameters if p.trained}
            for local in (name for name, _ in layer.module.named_parameters() if name in described):
                box = parameter_box(described[local], layer.parallel.unit_of[local].strategy, me)
                value = values[family.owner_name(model, layer.name, local)]
                value = value.view(described[local].shape)
                found.append(value[tuple(slice(low, high) for low, high in box)])
        return found


def _move_by_one_rounding(stock: nn.Module) -> None:
    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in stock.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=drawn) * 2 - 1
            parameter.mul_(1 + signs * torch.finfo(parameter.dtype).eps)


def _check_causal(stock: nn.Module, tokens: Tensor) -> None:
    """Raise AssertionError if a position's logits depend on a later token, which would be its label."""
    others = tokens.clone()
    others[:, -1] = (others[:, -1] + 1) % TOKENS
    with torch.no_grad():
        one, other = (stock(**calling(stock.forward, each)).logits[:, :-1] for each in (tokens, others))
    assert torch.allclose(one, other, rtol=1e-9, atol=1e-9), "positions see later tokens"


def _compare(plan: Plan, batches: Sequence[Batch], reference: _Reference, groups: Groups, world: World) -> float:
    engine = engine_of(plan, world, groups, settings=SETTINGS)
    stage, errors = engine.stage, list[float]()
    trained = [p for p in engine.optimizer.parameters.values() if p.requires_grad]
    for step, batch in enumerate(batches, start=1):
        loss = engine.forward_backward(Step.of_batch(batch, stage.context.share, number=step))
        if step == 1:
            mine = [local_tensor(p.grad) for p in trained if p.grad is not None]
            errors.append(worst(list(zip(mine, reference.part(reference.gradients, stage), strict=True))))
        outcome = engine.optimizer.step(step, loss, stop=False)
        norm = reference.norms[step - 1]
        errors += [abs(outcome.loss - reference.losses[step - 1]), abs(outcome.grad_norm - norm) / max(1.0, norm)]
    mine = [local_tensor(p.detach()) for p in trained]
    errors.append(worst(list(zip(mine, reference.part(reference.parameters, stage), strict=True))))
    return max(errors)


class Prepared(NamedTuple):
    """What ranks of one process compare with: made before they are forked, or by each."""

    model: Model
    batches: Sequence[Batch]
    reference: _Reference


@cache
def prepared(config_file: str) -> Prepared | str:
    """The model of a config.json, with an adapter that lies beside it, and its reference; or why it is refused."""
    config = json.loads(Path(config_file).read_bytes())
    try:
        model = describe_by_trace(config, "tiny", LENGTH)
        if (adapter := Path(config_file).with_name(ADAPTER_CONFIG)).exists():
            model = adapt(model, *read_adapter(adapter))
        check_trained(model.family, config_file)
    except ValueError as error:
        return f"not described: {error}"
    except BadInput as error:
        return str(error.args[1])
    if (problem := as_stock(model.family).problem(model)) is not None:
        return problem
    compute_in_float64()
    torch.set_default_dtype(torch.float64)
    batches = [batch_of(model, SAMPLES, seed) for seed in range(STEPS)]
    try:
        return Prepared(model, batches, _Reference(model, batches))
    except BadInput as error:
        return f"without --weights: {error.args[1]}"
    except RuntimeError as error:
        return f"not compared: the stock class does not run in float64 ({error})"


def main(config_file: str, result_file: str, *names: str) -> None:
    """Write the largest error of each plan, or of those that are named.

    If one is over the tolerance, what the stock class itself makes of a rounding of its weights is written beside it.
    """
    found = prepared(config_file)
    assert isinstance(found, Prepared), found
    torch.set_default_dtype(torch.float64)
    with joined_world("cpu") as world:
        groups, plans = Groups("cpu"), [plan for plan in plans_of(found.model) if not names or plan.name in names]
        errors = {plan.name: _compare(plan, found.batches, found.reference, groups, world) for plan in plans}
        if world.rank == 0:
            result = {"errors": errors, "undivided": undivided(found.model, 2)}
            if max(errors.values()) > TOLERANCE:
                rounded = _Reference(found.model, found.batches, rounded=True)
                result["rounding"] = found.reference.distance(rounded)
            Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
