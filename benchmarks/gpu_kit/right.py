"""S1: 13 families in bfloat16 and float32, under each recomputation, against stock transformers: loss and gradients.

The tolerance is not chosen by hand: it is twice the distance of stock transformers from the same step in the next wider
format, which is due to the rounding of its own operations. Two computations that are each at most that far from the
exact one are at most twice as far from each other (the triangle inequality).
"""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from gpu_kit import right_experts, right_rings
from gpu_kit.configurations import FAMILIES, configuration
from gpu_kit.rows import Row, Values
from gpu_kit.setting import Setting
from gpu_kit.workbench import (
    MIXED,
    any_kernel,
    batch_of,
    by_stock_names,
    described,
    engine_of,
    logits_of,
    one_device_plan,
    step_of,
    stock_of,
)
from gpu_kit.worlds import lone_world
from harness import table
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwright.types import MIB, Model, Offload, Plan, Precision, Recompute
from shardwright_train.data.objectives import Batch
from shardwright_train.engine.engine import Engine
from shardwright_train.models.attention_kernels import settle_attention
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.vocab import IGNORED
from shardwright_train.parallel.world import World

FORMATS = {
    "bfloat16": (MIXED, torch.bfloat16, torch.float32),
    "float32": (Precision(), torch.float32, torch.float64),
}
RECOMPUTED = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
_TRIANGLE = 2.0


class _Stock(NamedTuple):
    """A step of stock transformers, in a format and in the next wider one (`exact`)."""

    kernel: str
    losses: Tensor
    exact_losses: Tensor
    gradients: dict[str, Tensor]
    exact: dict[str, Tensor]


def rows(setting: Setting, stack: ExitStack) -> list[Row]:
    """Return the rows: every family, format and recomputation, and in the middle experts, rings, bits, host memory."""
    world, groups = lone_world(setting, stack), cache(lambda: Groups(setting.device_type))
    found = []
    for dtype in FORMATS:
        for family in FAMILIES:
            # A family's stock step is used by its three rows, and is dropped when the next family begins.
            stock = _last_one(partial(_stock, setting, world, groups, family, dtype), stack)
            found += [
                Row(f"{family} {dtype} {kind}", partial(_compared, setting, world, groups, family, dtype, kind, stock))
                for kind in RECOMPUTED
            ]
    more = [
        *right_experts.rows(setting),
        *right_rings.rows(setting),
        *bits_rows(setting, world, groups),
        *host_rows(setting, world, groups),
    ]
    return [*found[: len(found) // 2], *more, *found[len(found) // 2 :]]


_HELD: dict[str, _Stock] = {}


def _last_one(make: Callable[[], _Stock], stack: ExitStack) -> Callable[[], _Stock]:
    """Return a function that makes its value at the first call, and drops the values of other such functions then."""
    key = str(id(make))
    stack.callback(_HELD.clear)

    def get() -> _Stock:
        if key not in _HELD:
            _HELD.clear()
            _HELD[key] = make()
        return _HELD[key]

    return get


def _plan(setting: Setting, family: str, dtype: str) -> Plan:
    width, layers, vocabulary, length, samples = setting.size((512, 4, 8192, 256, 8), (32, 2, 61, 16, 2))
    config = configuration(family, width, layers, vocabulary, length)
    model = described(config, f"right-{family}", length if family != "vit" else _patches(config))
    return one_device_plan(setting, model, family, samples, precision=FORMATS[dtype][0])


def _batch(model: Model, samples: int) -> Batch:
    return batch_of(model, samples, seed=0)


def _stock(
    setting: Setting, world: Callable[[], World], groups: Callable[[], Groups], family: str, dtype: str
) -> _Stock:
    plan = _plan(setting, family, dtype)
    (kernel,) = settle_attention([plan], world())
    engine = engine_of(plan, world(), groups(), kernel)
    batch = {name: x.to(world().device) for name, x in _batch(plan.model, plan.global_batch_size).items()}
    # Stock transformers supports sinks only in the eager kernel.
    stocks = "eager" if kernel == "eager" or engine.stage.context.family.facts.attention.sinks else "sdpa"
    steps = []
    with any_kernel():
        for form in FORMATS[dtype][1:]:
            steps.append(_stock_step(stock_of(engine, stocks, form), batch))
    (losses, gradients), (exact_losses, exact) = steps
    return _Stock(kernel, losses, exact_losses, gradients, exact)


def _compared(
    setting: Setting,
    world: Callable[[], World],
    groups: Callable[[], Groups],
    family: str,
    dtype: str,
    kind: Recompute,
    stock: Callable[[], _Stock],
) -> Values:
    kernel, stock_losses, exact_losses, wanted, exact = stock()
    plan = _plan(setting, family, dtype)
    plan = replace(plan, layers=tuple(replace(layer, recompute=kind) for layer in plan.layers))
    engine = engine_of(plan, world(), groups(), kernel)
    step = step_of(engine, _batch(plan.model, plan.global_batch_size))
    loss = float(engine.forward_backward(step).flatten()[0])
    own = gradients_of(engine)
    # The mean of the tokens' errors is at most their root mean square; the mean itself is rounded to float32 once.
    rounding = float((stock_losses - exact_losses).square().mean().sqrt())
    allowed = _TRIANGLE * rounding + torch.finfo(torch.float32).eps * abs(loss)
    loss_distance = abs(loss - float(stock_losses.mean()))
    gradient_rounding, gradient_distance = _relative(wanted, exact), _relative(own, wanted)
    return {
        "attention": kernel,
        "loss": loss,
        "stock_loss": float(stock_losses.mean()),
        "loss_distance": loss_distance,
        "loss_tolerance": allowed,
        "gradient_distance": gradient_distance,
        "gradient_tolerance": _TRIANGLE * gradient_rounding,
        "own_gradient_rounding": _relative(own, exact),
        "worst_parameter": _worst(own, wanted, exact),
        "agrees": loss_distance <= allowed and gradient_distance <= _TRIANGLE * gradient_rounding,
    }


def _patches(config: dict[str, Any]) -> int:
    return (config["image_size"] // config["patch_size"]) ** 2 + 1


def gradients_of(engine: Any) -> dict[str, Tensor]:  # noqa: ANN401
    """Return the gradients by the names of transformers; gradients of replicas are already summed."""
    found = by_stock_names(engine, lambda parameter: parameter.grad)
    return {name: gradient.double() for name, gradient in found.items()}


def _stock_step(stock: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of every label that is not ignored, and the gradients of their mean."""
    logits, labels = logits_of(stock, batch).flatten(0, -2), batch["labels"].flatten()
    wide = logits if logits.dtype is torch.float64 else logits.float()
    losses = nn.functional.cross_entropy(wide, labels, reduction="none", ignore_index=IGNORED)[labels != IGNORED]
    losses.mean().backward()
    gradients = {name: p.grad.double() for name, p in stock.named_parameters() if p.grad is not None}
    return losses.detach().double(), gradients


def _relative(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the 2-norm of all differences divided by the 2-norm of all wanted values."""
    if set(found) != set(wanted):
        raise SystemExit(f"not the same parameters: {sorted(set(found) ^ set(wanted))[:3]}")
    difference = sum(float((found[name].view(x.shape) - x).square().sum()) for name, x in wanted.items())
    return float((difference / sum(float(x.square().sum()) for x in wanted.values())) ** 0.5)


def _worst(own: dict[str, Tensor], stock: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, Any]:
    """Return the parameter with the largest ratio of distance to tolerance, if stock has rounding errors in it."""
    ratios = {
        name: float((own[name].view(x.shape) - x).norm()) / (_TRIANGLE * rounding)
        for name, x in stock.items()
        if (rounding := float((x - exact[name]).norm())) > 0
    }
    name = max(ratios, key=lambda name: ratios[name])
    return {"name": name, "distance_over_allowed": ratios[name]}


def lines(rows: Mapping[str, Any]) -> list[str]:
    """Return the tables of this step's report."""
    compared = {name: row for name, row in rows.items() if "gradient_distance" in row}
    agree = sum(row["agrees"] for row in compared.values())
    head = [
        f"{agree} of {len(compared)} agree: they are no farther from stock transformers than twice stock's own "
        "distance from the next wider format. The last column is of single parameters, where chance counts for more.",
        "",
    ]
    told = [
        [
            *name.split(" "),
            row["attention"],
            f"{row['loss_distance'] / row['loss_tolerance']:.2f}",
            f"{row['gradient_distance'] / row['gradient_tolerance']:.2f}",
            "yes" if row["agrees"] else "**no**",
            f"{row['worst_parameter']['distance_over_allowed']:.2f}",
        ]
        for name, row in compared.items()
    ]
    columns = "family|format|recomputed|attention|loss, of what is allowed|gradients|agrees|farthest parameter"
    return [
        *head,
        *table(columns, told),
        "",
        *right_experts.lines(rows),
        "",
        *right_rings.lines(rows),
        "",
        *bits_lines(rows),
        "",
        *host_lines(rows),
    ]


# S1: whether the same step gives the same bits twice, with each attention kernel.


KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "as chosen": None,
}
_MODELS = {"llama": (), "mixtral": ("as chosen",)}


def bits_rows(setting: Setting, world: Callable[[], World], groups: Callable[[], Groups]) -> list[Row]:
    """Return a row for each attention kernel, and one for a model with experts."""
    return [
        Row(f"bits: {family}, {kernel}", partial(_twice, setting, world, groups, family, kernel))
        for family, kernels in _MODELS.items()
        for kernel in kernels or KERNELS
    ]


def _twice(
    setting: Setting, world: Callable[[], World], groups: Callable[[], Groups], family: str, kernel: str
) -> Values:
    width, layers, vocabulary, length, samples = setting.size((512, 4, 8192, 1024, 8), (32, 2, 61, 16, 2))
    model = described(configuration(family, width, layers, vocabulary, length), f"bits-{family}", length)
    plan = one_device_plan(setting, model, "bits", samples, precision=MIXED, attention="sdpa")
    backend, found = KERNELS[kernel], []
    for _ in range(2):
        engine = engine_of(plan, world(), groups(), "sdpa")
        # A processor has neither cuDNN's kernel nor the memory-efficient one.
        with nullcontext() if backend is None or not setting.on_cuda else sdpa_kernel(backend):
            loss = engine.forward_backward(step_of(engine, batch_of(model, samples, seed=0)))
        gradients = by_stock_names(engine, lambda parameter: parameter.grad)
        found.append({name: x.detach().clone() for name, x in gradients.items()} | {"loss": loss.detach().clone()})
    first, second = found
    unlike = [name for name, x in first.items() if not torch.equal(x, second[name])]
    return {"same": not unlike, "unlike": len(unlike), "of": len(first), "first_unlike": unlike[:3]}


def bits_lines(rows: Mapping[str, Any]) -> list[str]:
    """Return the table of the steps run twice."""
    told = [
        [name.removeprefix("bits: "), "yes" if row["same"] else "no", f"{row['unlike']} of {row['of']}"]
        for name, row in rows.items()
        if name.startswith("bits: ")
    ]
    return [*table("model, kernel|same bits twice|tensors that differ", told)]


# S1: a step with states or activations in host memory against the same step without: bits, time, device memory.


_STEPS = 4
_CASES = (
    (Offload.OPTIMIZER, Recompute.NONE),
    (Offload.UPDATE, Recompute.NONE),
    (Offload.ACTIVATIONS, Recompute.NONE),
    (Offload.ACTIVATIONS, Recompute.FULL),
)


def host_rows(setting: Setting, world: Callable[[], World], groups: Callable[[], Groups]) -> list[Row]:
    """Return a row for each kind of offload, which is used in all blocks."""
    return [
        Row(f"host: {offload}, recompute {recompute}", partial(_beside, setting, world, groups, offload, recompute))
        for offload, recompute in _CASES
    ]


def _beside(
    setting: Setting,
    world: Callable[[], World],
    groups: Callable[[], Groups],
    offload: Offload,
    recompute: Recompute,
) -> Values:
    width, layers, vocabulary, length, samples = setting.size((2048, 8, 8192, 4096, 4), (32, 2, 61, 16, 2))
    model = described(configuration("llama", width, layers, vocabulary, length), "host", length)
    plan = one_device_plan(setting, model, "host", samples, precision=MIXED, attention="sdpa", num_microbatches=2)
    plain = replace(plan, layers=tuple(replace(layer, recompute=recompute) for layer in plan.layers))
    moved = replace(plain, layers=tuple(replace(layer, offload=offload) for layer in plain.layers))
    on, off = (_trained(setting, each, world(), groups()) for each in (moved, plain))
    unlike = [name for name, x in on.pop("tensors").items() if not torch.equal(x, off["tensors"][name])]
    off.pop("tensors")
    return {"same": not unlike, "unlike": len(unlike), "first_unlike": unlike[:3], "on": on, "off": off}


def _trained(setting: Setting, plan: Plan, world: World, groups: Groups) -> dict[str, Any]:
    """Train some steps; return the parameters after them, the fastest step's time, and the peak of device tensors."""
    engine: Engine = engine_of(plan, world, groups, "sdpa")
    times_s = []
    for number in range(1, _STEPS + 1):
        step = step_of(engine, batch_of(plan.model, plan.global_batch_size, seed=number), number)
        if setting.on_cuda:
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
        began_s = time.perf_counter()
        engine.train_step(step)
        if setting.on_cuda:
            torch.accelerator.synchronize()
        times_s.append(time.perf_counter() - began_s)
    most = torch.accelerator.max_memory_allocated() if setting.on_cuda else 0
    engine.late.flush()
    tensors = {name: x.detach().to("cpu", copy=True) for name, x in engine.optimizer.parameters.items()}
    return {"step_s": min(times_s), "peak_mib": most / MIB, "tensors": tensors}


def host_lines(rows: Mapping[str, Any]) -> list[str]:
    """Return the table of steps with offloading."""
    told = [
        [
            name.removeprefix("host: "),
            "yes" if row["same"] else f"no, {row['unlike']} differ",
            *(f"{row[which]['step_s'] * 1e3:.1f}" for which in ("on", "off")),
            *(f"{row[which]['peak_mib']:.0f}" for which in ("on", "off")),
        ]
        for name, row in rows.items()
        if name.startswith("host: ")
    ]
    return [*table("in host memory|same bits|ms|ms without|MiB|MiB without", told)]
