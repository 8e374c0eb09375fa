"""The runtimes of published runs: those of the systems that plans are made for, and two that no plan is made for."""

from accuracy_parts.public.runs import Run
from msgspec.structs import replace

from shardwright.estimate.runtimes import RUNTIMES as KNOWN
from shardwright.estimate.runtimes import SHARDWRIGHT, Runtime, RuntimeName
from shardwright_search.options import System
from shardwright_search.systems.registry import SYSTEMS

RUNTIMES = {
    "megatron_core": SYSTEMS[System.MEGATRON].runtime,
    "torchtitan": SYSTEMS[System.TORCHTITAN].runtime,
    "nanotron": KNOWN[RuntimeName.NANOTRON],
    "megatron_deepspeed": KNOWN[RuntimeName.MEGATRON_DEEPSPEED],
    "llm_foundry": KNOWN[RuntimeName.LLM_FOUNDRY],
}


def runtime_of(run: Run) -> Runtime:
    """The runtime of a run, without what the run leaves uncounted."""
    return replace(RUNTIMES[run.runtime], **{name: getattr(SHARDWRIGHT, name) for name in run.uncounted})
