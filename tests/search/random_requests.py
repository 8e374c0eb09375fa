"""Random models, clusters, profiles and requests, with everything that a plan can have."""

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from made_up import HIDDEN, LENGTH, VOCABULARY, make_cluster, make_curve, make_hardware, make_profiles, make_request
from msgspec.structs import replace

from shardwright.io import BadInput
from shardwright.key import LayerKey
from shardwright.types import BoundaryTensor, Cluster, Heads, LayerType, Model, Parameter, Region
from shardwright.types.hardware_profile import Collective
from shardwright.types.model_profile import FitMode, FitRow, Quantity
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.solver.problem import Problem, Solution
from shardwright_search.solver.targets import Target
from shardwright_search.space.configurations import Configuration, divisors
from shardwright_search.space.instance import Instance
from shardwright_search.space.request import SearchRequest
from shardwright_search.space.search_space import SearchSpace, space_of

__all__ = ["FILE", "World", "random_model", "random_solution", "random_world"]

FILE = Path("s.json")
_HEADS = {"heads": 24}


class World(NamedTuple):
    """What a search is given."""

    request: SearchRequest
    model: Model
    cluster: Cluster
    profiles: Profiles

    @property
    def instance(self) -> Instance:
        """What prices its plans."""
        return space_of(self.request, self.model, self.cluster, self.profiles, FILE).instance

    @property
    def with_muon(self) -> "World":
        """The world trained with Muon, whose products are priced by what a forward pass computes."""
        types = {
            name: replace(kind, forward_flops_per_sample=2 * LENGTH * kind.parameter_count())
            for name, kind in self.model.types.items()
        }
        request, model = replace(self.request, optimizer="muon"), replace(self.model, types=types)
        return self._replace(request=request, model=model)

    def targets(self, instance: Instance) -> tuple[Target[Configuration], ...]:
        """Its cases."""
        return SearchSpace(instance, FILE).targets


def random_model(rng: np.random.Generator, layers: int, tied: bool) -> Model:
    """Blocks of one type or, towards the end, of another that hands on a second tensor and shares a parameter."""
    stream = BoundaryTensor(name="hidden", sequence_length=LENGTH, features=HIDDEN)
    second = BoundaryTensor(name="memory", sequence_length=LENGTH // 2, features=HIDDEN)
    heads = Heads(queries="hidden", keys="hidden", heads=24, kv_heads=8, head_features=HIDDEN // 8)
    regions = (
        Region(name="attention", enters=("hidden",), leaves="hidden", attention=heads),
        Region(name="mlp", enters=("hidden",), leaves="hidden"),
    )
    table, logits = (Parameter(name=name, shape=(VOCABULARY, HIDDEN), tp_dim=0) for name in ("weight", "lm_head"))
    norm = Parameter(name="norm", shape=(HIDDEN,))
    matrices = (Parameter(name="up", shape=(4 * HIDDEN, HIDDEN), tp_dim=0), norm)
    other = (
        Parameter(name="down", shape=(HIDDEN, 6 * HIDDEN), tp_dim=1),
        Parameter(name="bias", shape=(30, 24), tp_dim=1, shared=True),
        Parameter(name="inner", shape=(HIDDEN,), inside=True),
    )
    limits = {"tp_must_divide": _HEADS, "ulysses_must_divide": _HEADS}
    types = {
        "embedding": LayerType(parameters=(table,), forward_flops_per_sample=0, outputs=(stream, second)),
        "block": LayerType(
            parameters=matrices, forward_flops_per_sample=1, outputs=(stream,), regions=regions, **limits
        ),
        "other": LayerType(
            parameters=other, forward_flops_per_sample=1, outputs=(stream, second), regions=regions, **limits
        ),
        "head": LayerType(parameters=(logits, norm), forward_flops_per_sample=1),
    }
    others = int(rng.integers(0, layers)) if rng.random() < 0.5 else 0
    return Model(
        name="random",
        family="llama",
        config={},
        sequence_length=LENGTH,
        layers=("block",) * (layers - others) + ("other",) * others,
        types=types,
        tied=(("weight", "lm_head"),) if tied else (),
    )


@lru_cache(maxsize=200)
def random_world(seed: int, devices: tuple[int, ...] = (2, 3, 4, 6, 8), most_layers: int = 6) -> World:
    """A request that has a plan, with every option at random."""
    rng = np.random.default_rng(seed)
    while True:
        world = _random_world(rng, devices, most_layers)
        try:
            world.targets(world.instance)
        except BadInput:
            continue
        return world


def _random_world(rng: np.random.Generator, devices: tuple[int, ...], most_layers: int) -> World:
    def some(*names: str) -> list[str]:
        kept = [name for name in names if rng.random() < 0.6]
        return kept or [str(rng.choice(names))]

    count = int(rng.choice(devices))
    cluster = make_cluster(count, nodes=int(rng.choice(divisors(count))))
    model = random_model(rng, int(rng.integers(2, most_layers + 1)), bool(rng.random() < 0.5))
    precision = {"compute": "bfloat16"} if rng.random() < 0.5 else {}
    overlap = [(Collective.ALL_REDUCE, 2, 1.25, 1.5), (Collective.ALL_GATHER, 4, 1.125, 2.0)]
    profiles = make_profiles(
        model,
        cluster,
        make_hardware(cluster, overlap=overlap if rng.random() < 0.6 else ()),
        tp_sizes=divisors(count) if count != 6 else (1, 2, 3, 6),
        precision=f"float32/{precision.get('compute', 'float32')}/float32",
        reduction_s_per_parameter=float(rng.choice([0, 2e-9])),
        slow=float(rng.choice([0.02, 1.0])),
    )
    batch = int(rng.choice([4, 6, 8, 12]))
    outer = {"tp_sizes": [1, count]} if rng.random() < 0.3 else {}
    request = make_request(
        global_batch_size=batch if rng.random() < 0.7 else {"min": batch, "max": 2 * batch, "step": batch},
        schedules=["1f1b", *some("gpipe", "interleaved_1f1b")],
        data_parallel=some("ddp", "zero2", "zero3"),
        sequence_parallel=some("none", "megatron", "ulysses"),
        recompute=_with_parts(some("none", "full", "mlp", "selective"), rng),
        tp_consecutive=[bool(kept == "true") for kept in some("true", "false")],
        gradient_reduction=str(rng.choice(["deferred", "every_microbatch"])),
        fine_grained=bool(rng.random() < 0.8),
        megatron_gather_buffer=bool(rng.random() < 0.2),
        chunks_per_stage=[2, 3],
        precision=precision,
        embedding=outer if rng.random() < 0.5 else {},
        head=outer,
    )
    # Of a generator of its own: all else stays what it was before there were shard groups.
    if np.random.default_rng(count + batch).random() < 0.5:
        request = replace(request, shard_sizes=tuple(divisors(count)))
    if np.random.default_rng([count, batch]).random() < 0.4:
        request, profiles = replace(request, cp_sizes=(1, 2)), with_lengths(profiles)
    return World(request, model, cluster, profiles)


def with_lengths(profiles: Profiles) -> Profiles:
    """Profiles with curves over lengths through their points, a third of whose times attention takes."""
    shares = {"linear": 2 / 3 / LENGTH, "quadratic": 1 / 3 / LENGTH**2}
    curves: dict[LayerKey, list[FitRow]] = {}
    for key, points in profiles.layers.items():
        for quantity, values in zip(Quantity, points.values.T, strict=False):
            slope = (values[-1] - values[0]) / (points.micro_batch_sizes[-1] - points.micro_batch_sizes[0])
            constant = max(0.0, float(values[0] - slope * points.micro_batch_sizes[0]))
            terms = {name: slope * share for name, share in shares.items()}
            row = make_curve(constant, **terms, **key.columns | _JOINT | {"quantity": quantity})
            curves.setdefault(key.without("sequence_length"), []).append(row)
    return profiles._replace(fits=curves)


_JOINT = {"mode": FitMode.JOINT, "micro_batch_size": 0, "sequence_length": 0}


def random_solution(rng: np.random.Generator, problem: Problem) -> Solution:
    """Any cut and any options."""
    total, p = len(problem.layers), problem.pp_size
    cuts = sorted(rng.choice(np.arange(1, total), p - 1, replace=False).tolist())
    device_groups = _places(rng, problem)
    stage_of = np.searchsorted(cuts, np.arange(total), side="right")
    options = tuple(
        int(rng.integers(len(problem.device_groups[device_groups[stage]].options[kind].input_layout)))
        for stage, kind in zip(stage_of, problem.layers, strict=True)
    )
    return Solution((*cuts, total), options, device_groups)


def _places(rng: np.random.Generator, problem: Problem) -> tuple[int, ...]:
    """Where stages can be: each on one kind of place."""
    groups, at = list[int](), problem.start_position
    for moves in problem.placements:
        group, at = moves[at][int(rng.integers(len(moves[at])))]
        groups.append(group)
    return tuple(groups)


def _with_parts(kinds: list[str], rng: np.random.Generator) -> list[str]:
    """Return the kinds of recomputation, at times with sets of parts; other draws stay as they were."""
    own = np.random.default_rng(int(rng.bit_generator.state["state"]["state"]) % 2**32)
    return [*kinds, *(kind for kind in ("norms", "norms+activations") if own.random() < 0.3)]
