"""From the options of `shardwright-search advise` to what a search needs, by shapes and published figures alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shardwright_estimate.devices import Device, DeviceTable, read_devices
from shardwright_estimate.overlap import overlap_slowdowns
from shardwright_estimate.profile import hardware_profile, model_profile
from shardwright_estimate.rates import Efficiencies, rates_of
from shardwright_estimate.settings import ProfileSettings
from shardwright_formats.io import BadInput, read_object
from shardwright_formats.types import GIB, Cluster, Estimate, Model, Plan, Precision, Recompute
from shardwright_models.description import model_of_config
from shardwright_models.presets import read_presets
from shardwright_search.advise.machines import Machines, machines_of
from shardwright_search.cost_model.profiles import Profiles, index_profiles, together
from shardwright_search.options import AdviseOptions
from shardwright_search.space.budget import budgets_of_stages
from shardwright_search.space.request import SearchRequest

_PACKAGE = "shardwright-search"


class Question(NamedTuple):
    """A search without files: what is searched, with what it is priced, and what was assumed."""

    request: SearchRequest
    model: Model
    cluster: Cluster
    profiles: Profiles
    devices: dict[str, Device]
    """By node type."""
    budgets: dict[str, int]
    """What a plan may use of a GPU, in bytes, by node type."""
    tp_sizes: tuple[int, ...]
    """Within a node of every type."""
    assumed: tuple[str, ...]

    def left_bytes(self, plan: Plan, estimate: Estimate) -> tuple[int, ...]:
        """What a plan leaves of the budget of a rank of each pipeline stage; negative where it does not fit."""
        budgets = budgets_of_stages(plan, self.budgets)
        return tuple(own - stage.memory_bytes for own, stage in zip(budgets, estimate.stages, strict=True))

    def fits(self, plan: Plan, estimate: Estimate) -> bool:
        """Whether each stage does."""
        return min(self.left_bytes(plan, estimate)) >= 0

    @property
    def budget_words(self) -> str:
        """What a plan may use, for people."""
        if len(self.budgets) == 1:
            return f"{next(iter(self.budgets.values())) / GIB:.1f} GiB a GPU"
        return " and ".join(f"{size / GIB:.1f} GiB of {name}" for name, size in self.budgets.items())


def question_of(options: AdviseOptions) -> Question:
    """Read the model and the devices, and estimate profiles of both.

    Raises BadInput naming the option at fault.
    """
    model, source = _model(options)
    table = read_devices()
    machines = machines_of(options, table)
    request = SearchRequest(
        name="advise",
        global_batch_size=options.batch,
        memory_gib=machines.budgets_gib,
        tp_sizes=machines.tp_sizes,
        recompute=(Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL),
        fine_grained=not options.uniform,
        precision=Precision(compute=options.precision),
    )
    profiles = together([_profiles(request, model, machines, key, table, options) for key in machines.devices])
    budgets = {key: int(gib * GIB) for key, gib in machines.budgets_gib.items()}
    assumed = (f"shapes: {source}", *machines.assumed)
    return Question(request, model, machines.cluster, profiles, machines.devices, budgets, machines.tp_sizes, assumed)


def _profiles(
    request: SearchRequest,
    model: Model,
    machines: Machines,
    node_type: str,
    table: DeviceTable,
    options: AdviseOptions,
) -> Profiles:
    """Estimates for the nodes of one type."""
    settings = ProfileSettings(
        tp_sizes=machines.tp_sizes,
        sequence_parallel=request.sequence_parallel,
        recompute=request.recompute,
        micro_batch_sizes=tuple(_doubled(options.batch)),
        precision=request.precision or Precision(),
    )
    rates, efficiencies, of = rates_of(table, node_type), Efficiencies(), table.revised
    made = model_profile([(Path(options.model), model)], settings, rates, efficiencies, of, _PACKAGE)
    alone, across = machines.alone(node_type), machines.networks.get(node_type)
    overlap = None if options.overlap_slowdowns is None else overlap_slowdowns(options.overlap_slowdowns)
    hardware = hardware_profile(alone, [rates], efficiencies, across, of, _PACKAGE, overlap)
    return index_profiles(hardware, Path("--gpus"), made.profile, Path("--model"))


def _model(options: AdviseOptions) -> tuple[Model, str]:
    """The description of a preset, a config.json or its folder, and where its shapes come from."""
    presets, path = read_presets(), Path(options.model)
    if options.model in presets:
        preset = presets[options.model]
        length = options.seq or preset.sequence_length
        return model_of_config(preset.config, options.model, length, f"preset {options.model}"), preset.source
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        known = f"give a config.json, or one of {', '.join(presets)}"
        raise BadInput("MODEL", f"{options.model} is no file and no preset", known)
    if options.seq is None:
        raise BadInput("--seq", "a config.json does not say how long samples are", "give it, in tokens")
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    return model_of_config(read_object(file), name, options.seq, file), str(file)


def _doubled(largest: int) -> Iterator[int]:
    size = 1
    while size <= largest:
        yield size
        size *= 2
