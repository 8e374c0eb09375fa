"""S2: measured rates that estimates assume: matrix products, attention by kernel, memory, the host's time, copies."""

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
from gpu_kit.configurations import configuration
from gpu_kit.loops import between, mark, wait
from gpu_kit.rows import Row, Values
from gpu_kit.setting import Setting
from gpu_kit.workbench import any_kernel, described, row_counts
from gpu_kit.worlds import device_of
from harness import table
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, rms_norm, scaled_dot_product_attention, silu
from torch.profiler import ProfilerActivity, profile

from shardwright.optimizers.registry import ADAMW, Shard
from shardwright.types import Precision
from shardwright_train.models.base import family_named
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
"""Rows, inputs and outputs of matrix products in Llama-3-8B and in a Llama of 1 B parameters."""
_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_LENGTHS, _FEATURES, _POSITIONS, _WIDTH = (512, 2048, 8192, 32768), (64, 128), 32768, 4096
_TINY = 32
_LONG_ENOUGH_S = 0.05


def rows(setting: Setting, stack: ExitStack) -> list[Row]:
    """Return the rows; those on which most constants depend come first."""
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
    """Return the constants that estimates assumed on the day of the measurement."""
    found = assumptions(setting.device, {})
    return {"device": setting.device, "entry": entry_of(setting.device)[0], **{one.name: one.assumed for one in found}}


def clock(setting: Setting, do: Callable[[], object]) -> float:
    """Return the median seconds of some calls, after two calls that are not part of it."""
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
    """Return the rates of a matrix product of random numbers, as in models, and of ones, which take less power."""
    rows, inputs, outputs = (setting.size(n, _TINY) for n in (rows, inputs, outputs))
    x, weight = _random(setting, rows, inputs), _random(setting, outputs, inputs)
    flops = 2 * rows * inputs * outputs
    found = {"random_flops_per_s": flops / clock(setting, lambda: x @ weight.T)}
    x.fill_(1.0), weight.fill_(1.0)
    return found | {"ones_flops_per_s": flops / clock(setting, lambda: x @ weight.T), "flops": flops}


def _attention(setting: Setting, kernel: str, length: int, features: int) -> Values:
    """Return the rates of causal attention, forward and backward; only pairs that are not masked are counted."""
    heads, length = setting.size(_WIDTH, 64) // features, setting.size(length, _TINY)
    samples = max(1, setting.size(_POSITIONS, _TINY) // length)
    shape = samples, heads, length, features
    q, k, v = (_random(setting, *shape).requires_grad_() for _ in range(3))
    gradient = _random(setting, *shape)
    # A processor has neither cuDNN's kernel nor the memory-efficient one: a rehearsal uses those that it has.
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
    """Return an RMSNorm of single operators, as in transformers."""
    wide = x.float()
    return y[0] * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


_OPERATIONS: Mapping[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "copy": (lambda x, y: y.copy_(x), 2),
    "add": (lambda x, y: x + y, 3),
    "SwiGLU of two operators": (lambda x, y: silu(x) * y, 5),
    "RMSNorm, fused": (_norm, 2),
    "RMSNorm of single operators": (_eager_norm, 2),
}
"""Operations, and the minimum number of tensors that each reads and writes."""


def _moved(setting: Setting, name: str) -> Values:
    do, tensors = _OPERATIONS[name]
    x, y = (_random(setting, setting.size(32768, _TINY), setting.size(_WIDTH, 64)) for _ in range(2))
    return {"bytes_per_s": tensors * x.nbytes / clock(setting, lambda: do(x, y))}


def _grouped(setting: Setting, experts: int) -> Values:
    """Return the rates of grouped matrix products, forward and backward, with uneven numbers of rows per expert."""
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
    """Return AdamW's bytes per second: parameters, gradients and moments are read, all but the gradients written."""
    weights = [torch.zeros(setting.size(2**26, 2**10), device=device_of(setting)) for _ in range(8)]
    for weight in weights:
        weight.grad = torch.full_like(weight, 1e-3)
    adamw = torch.optim.AdamW(weights, fused=True)
    moved = ADAMW.moved_bytes([Shard(weight.numel()) for weight in weights], Precision())
    return {"bytes_per_s": moved / clock(setting, adamw.step)}


def _loss(setting: Setting) -> Values:
    """Return the time of a head of 128,256 tokens on 4,096 positions, forward and backward, with float32 logits."""
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
    """Return a table that compares assumed and measured constants, then the tables of all rates."""
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


# S2: the host's time per kernel of an eager block, the device's time for a small kernel, and copies between them.


_FEW_LAYERS, _MORE_LAYERS = 2, 6
_CALLS = 20
_IN_A_GRAPH = 1000


def host_rows(setting: Setting) -> list[Row]:
    """Return the rows of host times, small kernels and copies."""
    ways = [(place, way) for place in ("pinned", "pageable") for way in ("to the device", "to the host")]
    return [
        Row("host: an eager Llama block", partial(_block, setting)),
        Row("device: a small kernel", partial(_small_kernel, setting)),
        *(Row(f"copy: {place}, {way}", partial(_copied, setting, place, way)) for place, way in ways),
    ]


def _block(setting: Setting) -> Values:
    """Return kernels and host seconds of a block's passes: differences between two numbers of blocks of a tiny size."""
    few, more = (_passes(setting, layers) for layers in (_FEW_LAYERS, _MORE_LAYERS))
    blocks = _MORE_LAYERS - _FEW_LAYERS
    found = {name: (more[name] - few[name]) / blocks for name in few}
    kernels = {way: found[f"{way}_kernels"] for way in ("forward", "backward")}
    return found | {f"{way}_s_per_kernel": found[f"{way}_s"] / max(1, n) for way, n in kernels.items()}


def _passes(setting: Setting, layers: int) -> dict[str, float]:
    device, length = device_of(setting), 32
    model = described(configuration("llama", 256, layers, 64, length), "host", length)
    family = family_named("llama", "host")
    config = family.configuration(model)
    config._attn_implementation = "sdpa"
    with device:
        stock: Any = family.stock(config).bfloat16().model
    states = torch.randn(1, length, 256, device=device, dtype=torch.bfloat16).requires_grad_()

    def forward() -> Any:  # noqa: ANN401
        return stock(inputs_embeds=states, use_cache=False).last_hidden_state.sum()

    with any_kernel():
        for _ in range(3):
            forward().backward()
        forward_s, losses = _host_s(device, forward)
        backward_s, _ = _host_s(device, lambda: losses.pop().backward())
        found = {"forward_s": forward_s, "backward_s": backward_s}
        found["forward_kernels"], loss = _kernels(setting, forward)
        found["backward_kernels"], _ = _kernels(setting, loss.backward)
    return found


def _host_s(device: torch.device, do: Callable[[], Any]) -> tuple[float, list[Any]]:
    """Return the seconds that a call takes the host, which does not wait for the device, and the calls' results."""
    wait(device)
    began = time.perf_counter()
    returned = [do() for _ in range(_CALLS)]
    took_s = (time.perf_counter() - began) / _CALLS
    wait(device)
    return took_s, returned


def _kernels(setting: Setting, do: Callable[[], Any]) -> tuple[float, Any]:
    """Return the number of kernels of a call, or of operators on a processor, and the call's result."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * setting.on_cuda
    with profile(activities=activities) as profiler:
        returned = do()
        wait(device_of(setting))
    events = profiler.events()
    if setting.on_cuda:
        return float(sum(e.device_type is DeviceType.CUDA for e in events)), returned
    return float(sum(e.name.startswith("aten::") for e in events)), returned


def _small_kernel(setting: Setting) -> Values:
    """Return the seconds of one of many dependent small kernels, replayed by a CUDA graph if there are graphs."""
    device = device_of(setting)
    x, kernels = torch.zeros(256, device=device), setting.size(_IN_A_GRAPH, 10)

    def chain() -> None:
        for _ in range(kernels):
            x.add_(1.0)

    replay: Callable[[], object] = chain
    if setting.on_cuda and not setting.null:
        chain()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
        replay = graph.replay
    replay()
    wait(device)
    began = time.perf_counter()
    replay()
    wait(device)
    return {"s_per_kernel": (time.perf_counter() - began) / kernels}


def _copied(setting: Setting, place: str, way: str) -> Values:
    size = setting.size(2**30, 2**12)
    host = torch.ones(size, dtype=torch.uint8)
    if place == "pinned" and setting.on_cuda:
        host = host.pin_memory()
    there = torch.ones(size, dtype=torch.uint8, device=device_of(setting))
    target, source = (there, host) if way == "to the device" else (host, there)
    took = []
    for _ in range(3):
        wait(there.device)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        wait(there.device)
        took.append(time.perf_counter() - began)
    return {"bytes_per_s": size / min(took)}
