"""The differences between an accelerator and a CPU for a rank; everything else uses `torch.accelerator`.

PyTorch names devices of NVIDIA and AMD (ROCm) `cuda`, and their collectives `nccl`. This file imports torch, so that
only ranks import it, not the launcher.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity

from shardwright.launch.accelerator import CPU, GPU


def on_accelerator(device: torch.device) -> bool:
    """Return whether a device is an accelerator, which computes asynchronously and counts its memory."""
    return device.type == GPU


def take_device(local_rank: int) -> torch.device:
    """Make a device of this node the default accelerator of this process, and return it."""
    device = torch.device(GPU, local_rank)
    torch.accelerator.set_device_index(device)
    return device


def device_name(device: torch.device) -> str:
    """Return the name of a device, as in cluster files."""
    return torch.cuda.get_device_name(device) if on_accelerator(device) else CPU


def synchronize(device: torch.device) -> None:
    """Wait for all work on a device; on a CPU, work is complete when its call returns."""
    if on_accelerator(device):
        torch.accelerator.synchronize(device)


def random_state(device: torch.device) -> Tensor:
    """Return the state of a device's default random generator."""
    if not on_accelerator(device):
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def restore_random_state(state: Tensor, device: torch.device) -> None:
    """Set the state of a device's default random generator."""
    if on_accelerator(device):
        torch.get_device_module(device).set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def edge_options(device: torch.device, channels: int) -> "dist.ProcessGroupNCCL.Options | None":
    """Return NCCL's options for the process group of a pipeline edge with a number of channels; None for gloo.

    A waiting receive occupies one multiprocessor per channel.
    """
    if not on_accelerator(device):
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = options.config.max_ctas = channels
    return options


def profiled_activities(device: torch.device) -> list[ProfilerActivity]:
    """Return the activities that PyTorch's profiler records for a device."""
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_accelerator(device) else [])]
