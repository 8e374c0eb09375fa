"""S2: the rates that estimates assume, measured: products, attention by kernel, memory, the host's time, copies."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import pairwise, product
from statistics import median
from typing import Any

import torch
from gpu_kit import compile_ahead
from gpu_kit.assumed import assumptions, entry_of, lines_of
from gpu_kit.loops import between, mark, wait
from gpu_kit.page import table
from gpu_kit.rates_host import host_rows
from gpu_kit.rows import Row, Values
from gpu_kit.setting import Setting
from gpu_kit.workbench import row_counts
from gpu_kit.worlds import device_of
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, rms_norm, scaled_dot_product_attention, silu

from shardwright.optimizers.registry import ADAMW, Shard
from shardwright.types import Precision
from shardwright_train.parallel.experts import expert_products

_PRODUCTS = {
    "8B query, key and value": ((1024, 4096, 16384, 65536), 4096, 6144),
    "8B gate": ((1024, 4096, 16384, 65536), 4096, 14336),
    "8B down": ((4096, 16384), 14336, 4096),
    "8B head": ((4096,), 4096, 128256),
    "1B query, key and value": ((16384,), 2048, 2560),
    "1B gate": ((16384,), 2048, 5632),
    "1B down": ((16384,), 5632, 2048),
}
"""Rows, inputs and outputs of products of Llama-3-8B and a Llama of 1 B parameters."""
_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_LENGTHS, _FEATURES, _POSITIONS, _WIDTH = (512, 2048, 8192, 32768), (64, 128), 32768, 4096
_TINY = 32
_LONG_ENOUGH_S = 0.05


def rows(setting: Setting, stack: ExitStack) -> list[Row]:
    """The rows, those first that most constants hang on."""
    products = [
        Row(f"product: {name}, {n} rows", partial(_product, setting, n, inputs, outputs))
        for name, (several, inputs, outputs) in _PRODUCTS.items()
        for n in several
    ]
    attention = [
        Row(f"attention: {kernel}, {length} of {features}", partial(_attention, setting, kernel, length, features))
        for length, features, kernel in product(_LENGTHS, _FEATURES, _KERNELS)
    ]
    return [
        Row("assumed", partial(_assumed, setting)),
        Row("compiling ahead ended", lambda: {"how": compile_ahead.wait(setting.size(25.0, 1.0))}),
        *products,
        *attention,
        *(Row(f"memory: {name}", partial(_moved, setting, name)) for name in _OPERATIONS),
        *(Row(f"experts: {n}", partial(_grouped, setting, n)) for n in (8, 128)),
        Row("fused AdamW", partial(_adamw, setting)),
        Row("logits and cross entropy", partial(_loss, setting)),
        *host_rows(setting),
    ]


def _assumed(setting: Setting) -> Values:
    """What estimates assumed on the day of the measurement."""
    found = assumptions(setting.device, {})
    return {"device": setting.device, "entry": entry_of(setting.device)[0], **{one.name: one.assumed for one in found}}


def clock(setting: Setting, do: Callable[[], object]) -> float:
    """The median seconds of some calls, after two that are not timed."""
    device = device_of(setting)
    do()
    wait(device)
    began = time.perf_counter()
    do()
    wait(device)
    once_s = max(1e-6, time.perf_counter() - began)
    calls = setting.size(max(3, min(20, int(_LONG_ENOUGH_S / once_s))), 2)
    marks = [mark(device)]
    for _ in range(calls):
        do()
        marks.append(mark(device))
    wait(device)
    return median(between(a, b) for a, b in pairwise(marks))


def _random(setting: Setting, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device_of(setting), dtype=torch.bfloat16)


def _product(setting: Setting, rows: int, inputs: int, outputs: int) -> Values:
    """Random numbers take more power than ones, so that clocks fall: models compute with the former."""
    rows, inputs, outputs = (setting.size(n, _TINY) for n in (rows, inputs, outputs))
    x, weight = _random(setting, rows, inputs), _random(setting, outputs, inputs)
    flops = 2 * rows * inputs * outputs
    found = {"random_flops_per_s": flops / clock(setting, lambda: x @ weight.T)}
    x.fill_(1.0), weight.fill_(1.0)
    return found | {"ones_flops_per_s": flops / clock(setting, lambda: x @ weight.T), "flops": flops}


def _attention(setting: Setting, kernel: str, length: int, features: int) -> Values:
    """Causal attention, forward and backward; operations of pairs that are seen."""
    heads, length = setting.size(_WIDTH, 64) // features, setting.size(length, _TINY)
    samples = max(1, setting.size(_POSITIONS, _TINY) // length)
    shape = samples, heads, length, features
    q, k, v = (_random(setting, *shape).requires_grad_() for _ in range(3))
    gradient = _random(setting, *shape)
    # A processor has neither cuDNN's kernel nor the memory-efficient one: its rehearsal takes what it has.
    backends = [_KERNELS[kernel]] if setting.on_cuda else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(backends):
        forward_s = clock(setting, lambda: scaled_dot_product_attention(q, k, v, is_causal=True))

        def both() -> None:
            scaled_dot_product_attention(q, k, v, is_causal=True).backward(gradient)

        both_s = clock(setting, both)
    flops = 2 * samples * heads * length**2 * features
    return {
        "forward_flops_per_s": flops / forward_s,
        "backward_flops_per_s": 2.5 * flops / max(1e-9, both_s - forward_s),
        "chosen_by_itself": SDPBackend(torch._fused_sdp_choice(q, k, v, None, 0.0, True)).name,
    }


def _norm(x: Tensor, y: Tensor) -> Tensor:
    return rms_norm(x, x.shape[-1:], y[0], 1e-5)


def _eager_norm(x: Tensor, y: Tensor) -> Tensor:
    """As transformers has it."""
    wide = x.float()
    return y[0] * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


_OPERATIONS: Mapping[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "copy": (lambda x, y: y.copy_(x), 2),
    "add": (lambda x, y: x + y, 3),
    "SwiGLU of two operators": (lambda x, y: silu(x) * y, 5),
    "RMSNorm, fused": (_norm, 2),
    "RMSNorm of single operators": (_eager_norm, 2),
}
"""Operations and the tensors that they read and write at least."""


def _moved(setting: Setting, name: str) -> Values:
    do, tensors = _OPERATIONS[name]
    x, y = (_random(setting, setting.size(32768, _TINY), setting.size(_WIDTH, 64)) for _ in range(2))
    return {"bytes_per_s": tensors * x.nbytes / clock(setting, lambda: do(x, y))}


def _grouped(setting: Setting, experts: int) -> Values:
    """Forward and backward, unevenly many rows for each expert."""
    rows, inputs, outputs = setting.size((32768, 2048, 1024), (4 * experts, 32, 16))
    x = _random(setting, rows, inputs).requires_grad_()
    weights = _random(setting, experts, outputs, inputs).requires_grad_()
    share = torch.rand(experts, generator=torch.Generator().manual_seed(0)) + 0.5
    counts = (share / share.sum() * rows).floor().long()
    counts[0] += rows - counts.sum()
    counts, gradient = counts.to(x.device), _random(setting, rows, outputs)
    flops = 2 * rows * inputs * outputs
    forward_s = clock(setting, lambda: expert_products(x, weights, row_counts(counts)))
    both_s = clock(setting, lambda: expert_products(x, weights, row_counts(counts)).backward(gradient))
    return {
        "forward_flops_per_s": flops / forward_s,
        "backward_flops_per_s": 2 * flops / max(1e-9, both_s - forward_s),
    }


def _adamw(setting: Setting) -> Values:
    """Bytes of parameter, gradient and moments, read, and all but the gradient written."""
    weights = [torch.zeros(setting.size(2**26, 2**10), device=device_of(setting)) for _ in range(8)]
    for weight in weights:
        weight.grad = torch.full_like(weight, 1e-3)
    adamw = torch.optim.AdamW(weights, fused=True)
    moved = ADAMW.moved_bytes([Shard(weight.numel()) for weight in weights], Precision())
    return {"bytes_per_s": moved / clock(setting, adamw.step)}


def _loss(setting: Setting) -> Values:
    """Forward and backward of a head of 128,256 tokens on 4,096 positions, logits in float32."""
    positions, width, vocabulary = setting.size((4096, 4096, 128256), (_TINY, 32, 61))
    states = _random(setting, positions, width).requires_grad_()
    head = (_random(setting, vocabulary, width) / width**0.5).requires_grad_()
    labels = torch.randint(0, vocabulary, (positions,), device=states.device)

    def both() -> None:
        cross_entropy((states @ head.T).float(), labels).backward()

    took_s = clock(setting, both)
    return {
        "took_s": took_s,
        "product_flops": 6 * positions * width * vocabulary,
        "logits_bytes": 4 * labels.numel() * vocabulary,
    }


def lines(rows: Mapping[str, Any]) -> list[str]:
    """What is assumed beside what was found, then every rate."""
    products = [
        [
            name.removeprefix("product: "),
            f"{row['random_flops_per_s'] / 1e12:.0f}",
            f"{row['ones_flops_per_s'] / 1e12:.0f}",
        ]
        for name, row in rows.items()
        if name.startswith("product: ")
    ]
    attention = [
        [name.removeprefix("attention: ")]
        + [f"{row[f'{way}_flops_per_s'] / 1e12:.0f}" for way in ("forward", "backward")]
        + [row["chosen_by_itself"]]
        for name, row in rows.items()
        if name.startswith("attention: ")
    ]
    grouped = [
        [name] + [f"{row[f'{way}_flops_per_s'] / 1e12:.0f}" for way in ("forward", "backward")]
        for name, row in rows.items()
        if name.startswith("experts: ")
    ]
    moved = [[name, f"{row['bytes_per_s'] / 1e9:,.0f}"] for name, row in rows.items() if "bytes_per_s" in row]
    return [
        *lines_of(assumptions(rows.get("assumed", {"device": ""})["device"], rows)),
        "",
        *table("product|TFLOP/s, random|ones", products),
        "",
        *table("attention, causal|forward, TFLOP/s|backward|the kernel chosen without a word", attention),
        "",
        *table("products in groups|forward, TFLOP/s|backward", grouped),
        "",
        *table("moved|GB/s", moved),
    ]
