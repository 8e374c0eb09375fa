"""The start of a process: deterministic kernels, if a run requests them, and a faster import of PyTorch."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

from shardwright.io import BadInput
from shardwright.types import Attention, Plan

# Runs whose steps are reproducible to the bit on GPUs, at the price of slower kernels (`--deterministic`).


OPTION = "--deterministic"
_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}
"""Variables that cuBLAS reads when a process first uses a GPU, and transformers when it calls flash-attn."""
_NONE = "does not have a deterministic implementation"
"""Words of PyTorch's error for an operation that adds in any order, or chooses its kernel by timing."""


def check_deterministic(plan: Plan, file: object) -> None:
    """Raise BadInput naming the first part of a plan that has no deterministic form, or may not have one."""
    if plan.attention is Attention.SDPA_CUDNN:
        raise BadInput(file, f"attention {plan.attention} has no deterministic form ({OPTION})", "use sdpa_flash")
    if plan.compile:
        problem = f"compile: the compiler may choose other kernels in each start ({OPTION})"
        raise BadInput(file, problem, "leave one of them out")
    if plan.fused:
        problem = f"fused {plan.fused[0]}: flash-attn promises no deterministic form of it ({OPTION})"
        raise BadInput(file, problem, "leave one of them out")


def prepare_environment() -> None:
    """Set this process's environment for deterministic kernels, before PyTorch is imported."""
    os.environ.update(_ENVIRONMENT)


@contextmanager
def deterministic(file: object, asked: bool) -> Iterator[None]:
    """Restrict PyTorch to deterministic kernels, if a run requests that.

    An operation without one raises BadInput, naming the plan's file.
    """
    if not asked:
        yield
        return
    import torch

    torch.use_deterministic_algorithms(True)
    # PyTorch would fill uninitialized memory otherwise, but it is never read.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    try:
        yield
    except RuntimeError as error:
        if _NONE not in str(error):
            raise
        operation = str(error).split(maxsplit=1)[0]
        problem = f"{operation} has no deterministic form here ({OPTION})"
        raise BadInput(file, problem, "leave the option out, or choose another attention kernel") from None
    finally:
        torch.use_deterministic_algorithms(False)


# A faster import of PyTorch and transformers: pausing garbage collection saves a third of the time.


@contextmanager
def without_collection() -> Iterator[None]:
    """Disable garbage collection during imports: they create no garbage, but collections take a third of their time.

    Later collections do not scan these objects, either.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collected:
            gc.enable()
