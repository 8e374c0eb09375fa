"""S1: the same step twice: whether it gives the same bits, with each kernel of attention."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from gpu_kit.configurations import configuration
from gpu_kit.page import table
from gpu_kit.rows import Row, Values
from gpu_kit.setting import Setting
from gpu_kit.workbench import MIXED, batch_of, by_stock_names, described, engine_of, one_device_plan, step_of
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "as chosen": None,
}
_MODELS = {"llama": (), "mixtral": ("as chosen",)}


def rows(setting: Setting, world: Callable[[], World], groups: Callable[[], Groups]) -> list[Row]:
    """The rows; a model with experts once."""
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


def lines(rows: Mapping[str, Any]) -> list[str]:
    """The table."""
    told = [
        [name.removeprefix("bits: "), "yes" if row["same"] else "no", f"{row['unlike']} of {row['of']}"]
        for name, row in rows.items()
        if name.startswith("bits: ")
    ]
    return table("model, kernel|same bits twice|tensors that differ", told)
