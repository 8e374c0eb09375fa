"""S2: the host's time for each kernel of an eager block, the device's for a small one, and copies between them."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpu_kit.configurations import configuration
from gpu_kit.loops import wait
from gpu_kit.rows import Row, Values
from gpu_kit.setting import Setting
from gpu_kit.workbench import any_kernel, described
from gpu_kit.worlds import device_of
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from shardwright_train.models.base import family_named

_FEW_LAYERS, _MORE_LAYERS = 2, 6
_CALLS = 20
_IN_A_GRAPH = 1000


def host_rows(setting: Setting) -> list[Row]:
    """The rows."""
    ways = [(place, way) for place in ("pinned", "pageable") for way in ("to the device", "to the host")]
    return [
        Row("host: an eager Llama block", partial(_block, setting)),
        Row("device: a small kernel", partial(_small_kernel, setting)),
        *(Row(f"copy: {place}, {way}", partial(_copied, setting, place, way)) for place, way in ways),
    ]


def _block(setting: Setting) -> Values:
    """Kernels and the host's seconds of a block's passes, as differences of two numbers of blocks of a tiny size."""
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
    """Seconds of a call as the host sees it, who waits for nothing, and what the calls returned."""
    wait(device)
    began = time.perf_counter()
    returned = [do() for _ in range(_CALLS)]
    took_s = (time.perf_counter() - began) / _CALLS
    wait(device)
    return took_s, returned


def _kernels(setting: Setting, do: Callable[[], Any]) -> tuple[float, Any]:
    """The kernels of a call; on a processor, its operators."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * setting.on_cuda
    with profile(activities=activities) as profiler:
        returned = do()
        wait(device_of(setting))
    events = profiler.events()
    if setting.on_cuda:
        return float(sum(e.device_type is DeviceType.CUDA for e in events)), returned
    return float(sum(e.name.startswith("aten::") for e in events)), returned


def _small_kernel(setting: Setting) -> Values:
    """Seconds of one of many small kernels that depend on one another, replayed by a graph where there are such."""
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
