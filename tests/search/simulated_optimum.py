"""Hostile worlds, small enough to simulate every plan of them: how far the chosen one is from the best."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
from made_up import make_cluster, make_hardware, make_model, make_profile, make_request
from random_problems import Enumerated, every_plan, fitting
from random_requests import FILE, World

from shardwright.io.table import Table
from shardwright.plan.schedules.passes import Pass
from shardwright.plan.schedules.registry import schedule_of
from shardwright.types import GIB
from shardwright.types.model_profile import LayerRow, ModelProfile
from shardwright_search.cost_model.profiles import index_profiles
from shardwright_search.search import SearchAnswer, find_best
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.instance import Instance

__all__ = ["WITHIN", "excess", "excesses", "hostile_world", "simulated_steps", "too_slow", "without_order"]

WITHIN = 0.005
"""The chosen plan's simulated time is no more than this share above that of the best plan."""


def hostile_world(seed: int) -> World:
    """Layers whose options differ in ways that no real ones do, on links as slow as layers, with few microbatches.

    Without ZeRO-3: what of its gathers is exposed depends on the neighbouring layers.
    """
    rng = np.random.default_rng(seed)
    devices = int(rng.choice([2, 4]))
    model, cluster = make_model(int(rng.integers(1, 5 if devices == 2 else 4))), make_cluster(devices)
    hardware = make_hardware(cluster, latency_s=float(rng.choice([1e-6, 2e-5, 2e-4])), bytes_per_s=1e9)
    profile = make_profile(model, tp_sizes=(1, 2, 4), micro_batch_sizes=(1, 2, 4, 8))
    profile = without_order(rng, profile)
    request = make_request(
        global_batch_size=int(rng.choice([2, 4, 8])),
        schedules=[str(rng.choice(["1f1b", "gpipe"]))],
        data_parallel=["ddp", "zero2"] if rng.random() < 0.5 else ["ddp"],
        sequence_parallel=["none"],
        recompute=["none", "full"],
    )
    return World(request, model, cluster, index_profiles(hardware, FILE, profile, FILE))


def without_order(rng: np.random.Generator, profile: ModelProfile) -> ModelProfile:
    """The profile with times that each option has at random, forward and backward."""
    rows = profile.layers.columns
    keys = list(zip(*(np.asarray(rows[name]).tolist() for name in ("type", "tp_size", "recompute")), strict=True))
    kinds: dict[tuple[object, ...], np.ndarray] = {}
    # Sets of parts have draws of their own: worlds that do not use them stay as they were without them.
    own = np.random.default_rng(0)
    for key in keys:
        kinds.setdefault(key, (own if "norms" in str(key[2]) else rng).uniform(0.3, 3.0, 2))
    factors = np.array([kinds[key] for key in keys])
    changed = {"forward_s": rows["forward_s"] * factors[:, 0], "backward_s": rows["backward_s"] * factors[:, 1]}
    return replace(profile, layers=Table(LayerRow, dict(rows) | changed))


class _Times(NamedTuple):
    """Of the stages of some plans that are cut alike [stages, plans], in picoseconds."""

    forward: np.ndarray
    backward: np.ndarray
    send: np.ndarray
    end: np.ndarray
    optimizer: np.ndarray


def excess(world: World) -> float:
    """By which share the chosen plan's simulated score is above the least of all plans that fit."""
    found = find_best(world.request, world.model, world.cluster, world.profiles, FILE, lambda line: None)
    assert isinstance(found, SearchAnswer)
    instance = world.instance
    best = min(
        float(times[fits].min()) * target.scale
        for target in world.targets(instance)
        for plans, times in simulated_steps(instance, target.configuration)
        if (fits := fitting(instance.problem(target.configuration), plans)).any()
    )
    estimate = found.chosen.evaluation.estimate
    return estimate.simulated_step_time_s * 1e12 / found.chosen.plan.global_batch_size / best - 1


def excesses(seeds: Iterable[int], tight: bool = False) -> dict[int, float]:
    """By the seed of the world; `tight`: with memory for few of its plans."""
    return {seed: excess(_tight(hostile_world(seed)) if tight else hostile_world(seed)) for seed in seeds}


def too_slow(seeds: range) -> dict[int, str]:
    """The chosen plans that are further from the best than they may be, by the seed of the world."""
    return {seed: f"{more:.2%} above the best plan" for seed, more in excesses(seeds).items() if more > WITHIN}


def _tight(world: World) -> World:
    """A budget that one plan in 20 fits in."""
    instance = world.instance
    every = [
        plans for target in world.targets(instance) for plans in every_plan(instance.problem(target.configuration))
    ]
    needs = np.sort(np.concatenate([plans.memory.max(0) for plans in every]))
    asked = (needs[len(needs) // 20] + world.profiles.process_bytes) / GIB
    return world._replace(request=msgspec.structs.replace(world.request, memory_gib=asked))


def simulated_steps(instance: Instance, configuration: Configuration) -> Iterator[tuple[Enumerated, np.ndarray]]:
    """All plans of a configuration, cut by cut, and the simulated step of each."""
    overhead = round(instance.costs.profiles.step_overhead_s * 1e12)
    for plans in every_plan(instance.problem(configuration)):
        times = _times(instance, configuration, plans)
        yield plans, overhead + _simulated(configuration, times)


def _times(instance: Instance, configuration: Configuration, plans: Enumerated) -> _Times:
    """Added up layer by layer, from what each takes."""
    problem, choice = instance.problem(configuration), instance.choices.choice(configuration)
    topologies, shardings = instance.choices.placed(configuration).topologies, instance.choices.layers.shardings(choice)
    names, single_microbatch = instance.prices.types, configuration.num_microbatches == 1
    chosen = [index.ravel() for index in np.indices(plans.shape)]
    found = _Times(*np.zeros((5, configuration.pp_size, len(chosen[0]))))
    for stage, (first, end) in enumerate(pairwise((0, *plans.ends))):
        topology = topologies[plans.device_groups[stage]]
        for number in range(first, end):
            name = names[problem.layers[number]]
            own = [
                instance.costs.layer(name, s, topology, configuration.microbatch_samples, single_microbatch)
                for s in shardings.of_type(name, topology.size)
            ]
            rows = chosen[number]
            found.forward[stage] += np.array([o.forward_ps + o.gather_forward_ps for o in own])[rows]
            backward = np.array([o.backward_ps + o.gather_backward_ps + o.sync_every_ps for o in own])
            found.backward[stage] += backward[rows]
            found.end[stage] += np.array([o.sync_ps for o in own])[rows]
            found.optimizer[stage] += np.array([o.optimizer_ps for o in own])[rows]
            if number == 0:
                continue
            before = problem.device_groups[plans.device_groups[stage - (number == first)]]
            gave = before.options[problem.layers[number - 1]].output_layout[chosen[number - 1]]
            takes = problem.device_groups[plans.device_groups[stage]].options[problem.layers[number]].input_layout[rows]
            moves = _one_way(instance, configuration, names[problem.layers[number - 1]], topology)
            found.forward[stage] += moves[gave, takes]
            found.backward[stage] += moves[takes, gave]
            if number == first:
                ((_, sends),) = ((c, s) for c, s in problem.sends_ps.items() if c.position == (stage * topology.size,))
                found.send[stage - 1] += sends[problem.layers[number - 1], gave, gave]
    return found


def _one_way(instance: Instance, configuration: Configuration, name: str, topology: object) -> np.ndarray:
    layouts = instance.choices.layers.shardings(instance.choices.choice(configuration)).layouts
    samples = configuration.microbatch_samples
    move = instance.costs.redistribution
    return np.array([[move(name, a, b, topology, samples).time_ps for b in layouts] for a in layouts])


def _simulated(configuration: Configuration, times: _Times) -> np.ndarray:
    """All plans at once, action by action: asynchronous sends, one message of a direction at a time on a link."""
    p, m = configuration.pp_size, configuration.num_microbatches
    lists = [list(schedule_of(configuration.schedule).actions(p, m, stage)) for stage in range(p)]
    nothing = np.zeros(times.forward.shape[1])
    free, link = [nothing] * p, {(kind, stage): nothing for kind in Pass for stage in range(p)}
    come: dict[tuple[Pass, int, int], np.ndarray] = {(Pass.FORWARD, i, 0): nothing for i in range(m)}
    while any(lists):
        for stage, own in enumerate(lists):
            while own and (at := (own[0].kind, own[0].microbatch, stage)) in come:
                kind, microbatch, _ = own.pop(0)
                forward = kind is Pass.FORWARD
                over = np.maximum(free[stage], come[at]) + (times.forward if forward else times.backward)[stage]
                free[stage] = over + (0 if forward or microbatch < m - 1 else times.end[stage])
                there = stage + 1 if forward else stage - 1
                if forward and there == p:
                    come[Pass.BACKWARD, microbatch, stage] = over
                elif there >= 0:
                    link[kind, stage] = np.maximum(over, link[kind, stage]) + times.send[min(stage, there)]
                    come[kind, microbatch, there] = link[kind, stage]
    return np.maximum.reduce(free) + times.optimizer.max(0)
