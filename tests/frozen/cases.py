"""The frozen cases: command lines, in rounds; each round may read what those before it wrote."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from given import as_measured, measurement_of
from searches import SEARCHES, WORLDS

__all__ = ["DESCRIBED", "ROUNDS", "Case"]


class Case(NamedTuple):
    """A command, or something that is made between commands."""

    name: str
    """The output that the command prints is `printed/NAME.txt`."""
    arguments: tuple[str, ...] = ()
    """The program without its prefix, and its arguments, split at blanks."""
    make: Callable[[Path], None] | None = None


def _case(name: str, line: str) -> Case:
    return Case(name, tuple(line.split()))


# --- profiles -----------------------------------------------------------------------------------------------------

_FASOP = "--constants reference/fasop-constants.json"
_TIMES = f"--times reference/fasop-layer-times.csv {_FASOP} --backward-ratio 2 --micro-batch-sizes 1,2,4,8"
_G = "galvatron"
_TABLES = f"--allreduce {_G}/allreduce_bandwidth_1nodes_8gpus_per_node.json --overlap {_G}/overlap_coefficient.json"
_TABLES += f" --p2p {_G}/p2p_bandwidth_1nodes_8gpus_per_node.json --sp-time {_G}/sp_time_1nodes_8gpus_per_node.json"
_GALVATRON = (
    "profile import galvatron --device A100 --backward-ratio 2 --tp-sizes 1,2,4,8 --hardware hardware/a100-1x8.h5"
)
_LEVELS = "level1,2,3136,320,8 level2,2,784,640,16 level3,42,196,1280,32 level4,2,49,2560,64".split()
_LENGTHS = "--model models/tiny.json --model models/tiny@256.json --model models/tiny@512.json"
_DGX = "--cluster clusters/dgx-2x8.json"

HARDWARE = [
    _case(f"hardware-fasop-{gpu}", f"profile import fasop-hardware {_FASOP} --setting default --gpu {gpu.upper()}"
          f" --nodes 2 --cluster {gpu}-2x4 --device {gpu.upper()} --out hardware/{gpu}-2x4.h5")
    for gpu in ("a100", "a10")
] + [
    _case("hardware-galvatron", f"profile import galvatron-hardware --cluster a100-1x8 --device A100 {_TABLES}"
          " --out hardware/a100-1x8.h5"),
    _case("hardware-analytic", f"profile analytic {_DGX} --inter-node-gbit-s 1600 --hardware-out hardware/dgx-2x8.h5"),
    _case("hardware-toy-1x4", "profile analytic --cluster clusters/toy-1x4.json --devices toy.toml"
          " --hardware-out hardware/toy-1x4-analytic.h5"),
    _case("hardware-toy-2x4", "profile analytic --cluster clusters/toy-2x4.json --devices toy.toml"
          " --inter-node-gbit-s 8 --link-efficiency 0.5 --hardware-out hardware/toy-2x4-analytic.h5"),
    _case("profile-fasop-gpt2", f"profile import fasop {_TIMES} --model-name gpt2XL --gpu A100 --device A100"
          " --model models/gpt2-xl.json --out profiles/gpt2-xl@a100.h5"),
    _case("profile-fasop-bert", f"profile import fasop {_TIMES} --model-name bert --gpu A100 --device A100"
          " --model models/bert-large.json --out profiles/bert-large@a100.h5"),
    _case("profile-fasop-t5", f"profile import fasop {_TIMES} --model-name T5 --gpu A10 --device A10"
          " --model models/t5-3b.json --out profiles/t5-3b@a10.h5"),
    _case("profile-analytic-toy", f"profile analytic {_LENGTHS} --settings settings/toy.json --device toy"
          " --devices toy.toml --out profiles/tiny-analytic.h5"),
    _case("probes", "profile probes --model models/tiny.json --cluster clusters/toy-1x4.json --node-type n"
          " --settings settings/probes.json --out probes.json"),
    _case("devices", "profile devices"),
] + [
    _case(f"profile-analytic-{model}", f"profile analytic --model models/{model}.json --settings settings/large.json"
          f" {_DGX} --node-type n --out profiles/{model}@dgx.h5")
    for model in ("llama-7b", "gpt2-xl", "bert-large", "t5-3b", "vit-huge")
]  # fmt: skip


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1))


def _measured_probes(folder: Path) -> None:
    plans = _read(folder / "probes.json")["plans"]
    _write(folder / "measured/probes.json", measurement_of(plans, [1 + i % 3 / 16 for i in range(len(plans))]))


def _measured_profiles(folder: Path) -> None:
    for made in ("hardware/toy-1x4", "hardware/toy-2x4", "profiles/tiny"):
        as_measured(folder / f"{made}-analytic.h5", folder / f"{made}.h5")


PROFILES = [
    Case("as-measured", make=_measured_profiles),
    Case("measured-probes", make=_measured_probes),
    _case("profile-galvatron-llama", f"{_GALVATRON} --computation {_G}/llama_times.json --memory"
          f" {_G}/llama_memory.json --model models/llama-7b.json --micro-batch-sizes 1,2,4,8,16"
          " --out profiles/llama-7b@a100.h5"),
    _case("profile-galvatron-llama-refused", f"{_GALVATRON} --computation {_G}/llama_falling_times.json --memory"
          f" {_G}/llama_memory.json --model models/llama-7b.json --out profiles/refused.h5"),
    _case("profile-galvatron-llama-mended", f"{_GALVATRON} --computation {_G}/llama_falling_times.json --memory"
          f" {_G}/llama_memory.json --model models/llama-7b.json --sequence-parallel none --repair"
          " --micro-batch-sizes 2,4,8 --out profiles/llama-7b-mended@a100.h5"),
    _case("profile-galvatron-vit", f"{_GALVATRON} --computation {_G}/vit_times.json --memory {_G}/vit_memory.json"
          " --model models/vit-huge.json --micro-batch-sizes 1,2,4,8,16,32 --out profiles/vit-huge@a100.h5"),
    _case("profile-galvatron-swin", f"{_GALVATRON} --computation {_G}/swin_times.json --memory {_G}/swin_memory.json"
          f" --type {' --type '.join(_LEVELS)} --name swin --model-out models/swin.json"
          " --micro-batch-sizes 1,2,4,8,16,32,64 --out profiles/swin@a100.h5"),
]  # fmt: skip
FITTED = [_case("profile-fit", "profile fit --measurements measured/probes.json --out profiles/tiny-fit.h5")]

# --- searches, plans of one strategy, and what is done with plans -------------------------------------------------


def _profiles(world: str) -> str:
    _, _, hardware, profile, _ = WORLDS[world]
    return f"--hardware hardware/{hardware}.h5 --profile profiles/{profile}.h5"


def _inputs(world: str) -> str:
    cluster, model, *_ = WORLDS[world]
    return f"--cluster clusters/{cluster}.json --model models/{model}.json"


def _plan(name: str, more: str = "", out: str = "") -> Case:
    world, _ = SEARCHES[name]
    out = out or name
    return _case(f"plan-{out}", f"search plan --runners-up {_inputs(world)} {_profiles(world)}"
                 f" --search searches/{name}.json --out plans/{out}.json {more}")  # fmt: skip


_MEGATRON = "--sequence-parallel megatron"
UNIFORM = {
    "ddp": ("toy", "--num-microbatches 4"),
    "zero3-pp2": ("toy", "--pp 2 --num-microbatches 4 --data-parallel zero3 --recompute full"),
    "ddp-pp2": ("toy", "--pp 2 --num-microbatches 2"),
    "tp2-pp2": ("toy", f"--tp 2 --pp 2 --num-microbatches 8 {_MEGATRON} --schedule gpipe --recompute mlp"),
    "interleaved": (
        "toy",
        f"--pp 2 --tp 2 --num-microbatches 4 {_MEGATRON} --schedule interleaved_1f1b --layer-ranges 2",
    ),
    "strided": (
        "toys",
        "--tp 2 --tp-strided --data-parallel zero2 --gradient-reduction every_microbatch --num-microbatches 2",
    ),
    "vocab": (
        "toy",
        "--tp 2 --sequence-parallel ulysses --recompute attention --vocab-tp 4 --vocab-sequence-parallel megatron",
    ),
    "llama": ("llama", f"--tp 4 --pp 2 --num-microbatches 8 {_MEGATRON} --recompute full --precision-compute bfloat16"),
    "llama-zero3": ("llama", "--data-parallel zero3 --num-microbatches 1 --precision-compute bfloat16"),
    "gpt2": (
        "gpt2-dgx",
        "--pp 2 --tp 4 --num-microbatches 8 --precision-compute bfloat16 --sequence-parallel megatron",
    ),
    "refused": ("toy", "--tp 3"),
}
_SHOWN_PROFILES = ("llama-7b@a100", "llama-7b-mended@a100", "swin@a100", "t5-3b@a10", "t5-3b@dgx", "vit-huge@a100",
                   "tiny", "tiny-fit")  # fmt: skip
SHOWN = (
    *(f"hardware/{name}" for name in ("a100-1x8", "a100-2x4", "dgx-2x8", "toy-2x4")),
    *(f"profiles/{name}" for name in _SHOWN_PROFILES),
)
SEARCHED = [
    *(_plan(name, "") for name in SEARCHES),
    *(_case(f"uniform-{name}", f"search uniform {_inputs(world)} {_profiles(world)} --global-batch-size 16 {line}"
            f" --out uniform/{name}.json") for name, (world, line) in UNIFORM.items()),
    _case("import-strategy", f"search import galvatron {_G}/strategy.json --model models/tiny.json --cluster"
          " clusters/dgx-2x8.json --sequence-parallel megatron --out uniform/imported.json"),
    _case("import-strategy-refused", f"search import galvatron {_G}/strategy.json --model models/tiny.json --cluster"
          " clusters/dgx-2x8.json --out uniform/import-refused.json"),
    *(_case(f"show-{path.replace('/', '-')}", f"profile show {path}.h5") for path in SHOWN),
]  # fmt: skip


def _measured_plans(folder: Path) -> None:
    def plan(name: str) -> dict[str, Any]:
        return {key: value for key, value in _read(folder / name).items() if key not in ("format", "version")}

    uniform = [plan(f"uniform/{name}.json") for name in ("ddp", "zero3-pp2", "ddp-pp2")]
    _write(folder / "measured/uniform.json", measurement_of(uniform, [1.0, 1.125, 0.9375]))
    plans = [plan("plans/degrees.json"), *uniform[1:]]
    _write(folder / "measured/degrees.json", measurement_of(plans, [1.0, 0.75, 1.25]))


def _of(plan: str, world: str) -> str:
    return f"{plan}.json {_profiles(world)}"


def _explain(name: str, world: str, more: str = "", out: str = "") -> Case:
    return _case(f"explain-{out or name.replace('/', '-')}", f"search explain {_of(name, world)} {more}")


def _simulate(name: str, world: str, more: str = "") -> Case:
    out = f"simulated/{name.replace('/', '-')}"
    return _case(f"simulate-{name.replace('/', '-')}", f"search simulate {_of(name, world)} --svg {out}.svg --trace"
                 f" {out}.trace.json {more}")  # fmt: skip


def _evaluate(name: str, world: str, out: str, more: str = "") -> Case:
    return _case(f"evaluate-{out}", f"search evaluate {_of(name, world)} --out evaluated/{out}.json {more}")


EXPORTED = ("uniform/llama", "uniform/llama-zero3", "uniform/tp2-pp2", "uniform/gpt2", "uniform/interleaved",
            "uniform/ddp", "plans/space-3d", "plans/llama", "plans/kinds", "uniform/imported")  # fmt: skip
EXPLAINED = ("tight", "llama", "t5", "swin-tight", "interleaved")
USES = [
    Case("measured-plans", make=_measured_plans),
    *(_explain(f"plans/{name}", SEARCHES[name][0]) for name in EXPLAINED),
    *(_explain(f"plans/{name}", SEARCHES[name][0], f"--search searches/{name}.json", f"why-{name}")
      for name in ("gpipe", "every-microbatch")),
    _explain("plans/tight", "toy", "plans/roomy.json", "tight-roomy"),
    _explain("plans/llama", "llama", "uniform/llama.json", "llama-uniform"),
    *(_simulate(f"plans/{name}", SEARCHES[name][0]) for name in ("tight", "gpipe", "interleaved", "t5-dgx", "strided")),
    _simulate("uniform/interleaved", "toy", "--time-model batch"),
    _evaluate("plans/tight", "toy-analytic", "tight-analytic"),
    _evaluate("plans/tight", "toy", "tight-static", "--time-model static"),
    _evaluate("plans/kinds", "toy", "kinds-sequence", "--time-model sequence"),
    _evaluate("uniform/llama", "llama", "llama"),
    _evaluate("plans/llama", "llama-dgx", "llama-elsewhere"),
    *(_case(f"export-{system}-{name.replace('/', '-')}", f"search export {name}.json --to {system} --out"
            f" exported/{name.replace('/', '-')}.{system}") for name in EXPORTED
      for system in ("galvatron", "megatron", "torchtitan")),
]  # fmt: skip
_CORRECTION = "--correction corrections/toy.json"
LEARNED = [
    _case("correct", f"search correct measured/uniform.json {_profiles('toy')} --out corrections/toy.json"),
    _case("import-exported", "search import galvatron exported/uniform-llama.galvatron --model models/llama-7b.json"
          " --cluster clusters/a100-1x8.json --sequence-parallel megatron --out uniform/back.json"),
]  # fmt: skip
CORRECTED = [
    _plan("tight", _CORRECTION, "corrected"),
    _evaluate("plans/roomy", "toy", "roomy-corrected", _CORRECTION),
    _explain("plans/roomy", "toy", _CORRECTION, "corrected"),
    _simulate("plans/roomy", "toy", _CORRECTION),
]

ROUNDS: tuple[list[Case], ...] = (HARDWARE, PROFILES, FITTED, SEARCHED, USES, LEARNED, CORRECTED)

DESCRIBED = {
    "llama-7b": ("llama-7b", 2048),
    "tiny": ("llama-2m", 128),
    "gpt2-xl": ("gpt2-xl", 1024),
    "bert-large": ("bert-large", 512),
    "t5-3b": ("t5-3b", 512),
    "vit-huge": ("vit-huge", 197),
}
"""The committed descriptions: the preset and the sequence length of each."""
CHANGED = {
    "gpt2-xl": {"n_head": 16, "tie_word_embeddings": True},
    "bert-large": {"mask_token_id": 103, "tie_word_embeddings": True},
    "t5-3b": {"vocab_size": 30522, "feed_forward_proj": "relu"},
    "vit-huge": {"patch_size": 16},
}
"""Keys that differ from the preset."""
