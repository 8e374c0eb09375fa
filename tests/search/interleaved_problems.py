"""Tiny random problems of the interleaved schedule, and every plan of them walked through action by action."""

from collections.abc import Callable
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from shardwright.plan.schedules.passes import Action, Pass
from shardwright.plan.schedules.registry import schedule_of
from shardwright.types import Schedule
from shardwright_search.solver.branch_and_bound import optimize
from shardwright_search.solver.interleaved import Interleaved
from shardwright_search.solver.interleaved_problem import InterleavedProblem, moments_in_flight
from shardwright_search.solver.problem import DeviceGroup, Options
from shardwright_search.solver.targets import Target

__all__ = [
    "Priced",
    "bare_interleaved",
    "every_interleaved",
    "mistake",
    "mistakes",
    "options_of",
    "random_interleaved",
    "with_budget",
]

Element = tuple[int, int]
"""Type and option."""


class Priced(NamedTuple):
    """A plan: options of the embedding, of each position of a chunk and of the head; T, and the most of any stage."""

    options: tuple[int, ...]
    time_ps: float
    """Infinity where embedding and head cannot be tied."""
    memory_bytes: int
    host_bytes: int = 0
    """The most of any stage."""


@lru_cache(maxsize=2_000)
def random_interleaved(seed: int) -> InterleavedProblem:
    """Chunks of 1 to 3 layers of 1 or 2 types, 2 or 3 on each of 2 to 4 stages; the first and last may lack some."""
    rng = np.random.default_rng(seed)
    pp_size, num_chunks = int(rng.integers(2, 5)), int(rng.integers(2, 4))
    count, layouts, classes = int(rng.integers(1, 10)), int(rng.integers(1, 4)), int(rng.integers(1, 3))
    sharding = int(rng.choice([4, 40, 1000]))

    def options(kind: int) -> Options:
        n = int(rng.integers(1, 4))
        times, ends, states, activations, transients = rng.integers(0, sharding, (5, n)).astype(float)
        late = rng.integers(0, sharding, n).astype(float)
        (apart,) = rng.spawn(1)
        sums = apart.integers(0, 2, n) * late
        layout = rng.integers(0, layouts, n)
        classed = rng.integers(0, classes, n)
        input_layout, output_layout = (classed if kind == 0 else layout), (classed if kind == 3 else layout)
        held = late, sums, activations, transients, *np.zeros((2, n))
        return Options(times + 1, ends, states, *held, input_layout, output_layout)

    moves = rng.integers(0, 1 + sharding // 2, (4, layouts, layouts)).astype(float)
    moves[:, np.arange(layouts), np.arange(layouts)] = 0
    shape = classes, classes
    schedule = schedule_of(Schedule.INTERLEAVED_1F1B)
    frees_outputs = seed % 4 > 0
    positions = tuple(int(kind) for kind in rng.integers(1, 3, rng.integers(1, 4)))
    problem = InterleavedProblem(
        embedding=0,
        positions=positions,
        head=3,
        group=DeviceGroup(tuple(options(kind) for kind in range(4)), moves, 1 << 40),
        pp_size=pp_size,
        num_chunks=num_chunks,
        num_microbatches=count,
        closed_forms=schedule.closed_forms(count, num_chunks),
        sends_ps=rng.integers(0, 1 + sharding // 4, (pp_size, 4, layouts)).astype(float),
        boundary_bytes=rng.integers(0, 1 + sharding // 8, (4, layouts)).astype(float),
        moments_in_flight=moments_in_flight(schedule, pp_size, count, num_chunks, frees_outputs),
        tied_ps=np.where(rng.random(shape) < 0.1, np.inf, rng.integers(0, 1 + sharding // 2, shape)),
        frees_outputs=frees_outputs,
    )
    problem = _with_lacking(np.random.default_rng([seed, 1]), problem)
    needs = sorted(plan.memory_bytes for plan in every_interleaved(problem)) or [0]
    return with_budget(problem, needs[int(len(needs) * rng.choice([0, 0.1, 0.5, 0.999]))] - int(rng.random() < 0.05))


def _with_lacking(rng: np.random.Generator, problem: InterleavedProblem) -> InterleavedProblem:
    """Every other problem has a first and a last chunk that may lack positions; without any there are few layouts."""
    every = len(problem.positions)
    ahead, behind = rng.integers(0, every + 1, 2).tolist()
    if rng.random() < 0.5:
        return problem
    group, kind = problem.group, problem.positions[-1]
    if ahead == every:  # the embedding hands on what layers do
        for priced in (group.redistribution_ps, problem.boundary_bytes, problem.sends_ps.swapaxes(0, 1)):
            priced[problem.embedding] = priced[kind]
    return _with(problem, lacking=(ahead, behind))


def bare_interleaved(pp_size: int, num_chunks: int, num_microbatches: int, gradient_bytes: int) -> InterleavedProblem:
    """The case of one plan, whose embedding and head hold nothing, and of which messages are a large part."""
    schedule, one = schedule_of(Schedule.INTERLEAVED_1F1B), np.ones(1)
    held = moments_in_flight(schedule, pp_size, num_microbatches, num_chunks, True)
    layout = np.zeros(1, np.int64)
    end = Options(one, *np.zeros((8, 1)), layout, layout)
    block = end._replace(late_bytes=gradient_bytes * one, activation_bytes=12 * one, workspace_bytes=7 * one)
    return InterleavedProblem(
        embedding=0,
        positions=(1,),
        head=2,
        group=DeviceGroup((end, block, end), np.zeros((3, 1, 1)), 1 << 40),
        pp_size=pp_size,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        closed_forms=schedule.closed_forms(num_microbatches, num_chunks),
        sends_ps=np.zeros((pp_size, 3, 1)),
        boundary_bytes=np.full((3, 1), 7.0),
        moments_in_flight=held,
        tied_ps=np.zeros((1, 1)),
    )


def with_budget(problem: InterleavedProblem, budget_bytes: int) -> InterleavedProblem:
    """The same case with another budget."""
    return _with(problem, group=replace(problem.group, budget_bytes=budget_bytes))


def _with(problem: InterleavedProblem, **changes: object) -> InterleavedProblem:
    fields = {name: getattr(problem, name) for name in InterleavedProblem.__struct_fields__}
    return InterleavedProblem(**fields | changes)


def every_interleaved(problem: InterleavedProblem) -> list[Priced]:
    """All plans with chunks alike; an embedding alone in its chunk hands on the layout that chunks do."""
    kinds = (problem.embedding, *problem.positions, problem.head)
    options = problem.group.options
    every = product(*(range(len(options[kind].input_layout)) for kind in kinds))
    if problem.lacking[0] == len(problem.positions):
        outer, last = options[problem.embedding].output_layout, options[problem.positions[-1]].output_layout
        every = (chosen for chosen in every if outer[chosen[0]] == last[chosen[-2]])
    return [
        Priced(chosen, _time_ps(problem, chosen), _memory_bytes(problem, chosen), _host_bytes(problem, chosen))
        for chosen in every
    ]


def options_of(problem: InterleavedProblem, chosen: tuple[int, ...]) -> tuple[int, ...]:
    """The option of each layer of a plan, embedding and head included."""
    ahead, behind = problem.lacking
    layers = chosen[1:-1] * (problem.pp_size * problem.num_chunks)
    return (chosen[0], *layers[ahead : len(layers) - behind], chosen[-1])


def mistake(problem: InterleavedProblem) -> str | None:
    """What the solver or its bounds get wrong, or None."""
    group = problem.group
    fitting = [
        plan
        for plan in every_interleaved(problem)
        if plan.memory_bytes <= group.budget_bytes and plan.host_bytes <= group.host_budget_bytes
    ]
    best = min((plan.time_ps for plan in fitting), default=np.inf)
    answer = optimize([Target(0, 0.0, 1.0)], lambda _: Interleaved(problem), 0.01, 8)
    found, asked = np.inf if answer.best is None else answer.best.score, Interleaved(problem)
    if not asked.relaxed_bound_ps <= asked.lower_ps <= best:
        return f"bounded by {asked.relaxed_bound_ps} and {asked.lower_ps}, the best of all plans takes {best}"
    if found != best or answer.bound != best or any(bound > best for bound, _ in answer.bounds):
        return f"found {found}, bounds {answer.bound} and {answer.bounds}, the best of all plans takes {best}"
    times = {options_of(problem, plan.options): plan.time_ps for plan in fitting}
    for one in answer.near:
        if (takes := times.get(one.priced.solution.options)) != one.score:
            return f"{one} takes {takes}"
    return None


def mistakes(seeds: range, made: Callable[[int], InterleavedProblem] = random_interleaved) -> dict[int, str]:
    """What the solver gets wrong, by the seed of the problem."""
    found = ((seed, mistake(made(seed))) for seed in seeds)
    return {seed: what for seed, what in found if what is not None}


def _chain(problem: InterleavedProblem, chosen: tuple[int, ...], stage: int, chunk: int) -> list[Element]:
    """What a chunk of a stage holds, in order."""
    elements = list(zip(problem.positions, chosen[1:-1], strict=True))
    ahead, behind = problem.lacking
    if (stage, chunk) == (0, 0):
        elements = [(problem.embedding, chosen[0]), *elements[ahead:]]
    if (stage, chunk) == (problem.pp_size - 1, problem.num_chunks - 1):
        elements = [*elements[: len(elements) - behind], (problem.head, chosen[-1])]
    return elements


def _host_bytes(problem: InterleavedProblem, chosen: tuple[int, ...]) -> int:
    stages = (
        [each for chunk in range(problem.num_chunks) for each in _chain(problem, chosen, stage, chunk)]
        for stage in range(problem.pp_size)
    )
    return max(sum(int(problem.group.options[kind].host_bytes[row]) for kind, row in held) for held in stages)


def _time_ps(problem: InterleavedProblem, chosen: tuple[int, ...]) -> float:
    p, v, m, group = problem.pp_size, problem.num_chunks, problem.num_microbatches, problem.group
    time, end, before = [0] * p, [0] * p, None
    for number in range(p * v):  # the chunks in the order a microbatch goes through them
        stage = number % p
        for position, (kind, option) in enumerate(_chain(problem, chosen, stage, number // p)):
            own = group.options[kind]
            time[stage] += int(own.time_ps[option])
            end[stage] += int(own.exposed_ps[option])
            if before is not None:
                output_layout = group.options[before[0]].output_layout[before[1]]
                time[stage] += int(group.redistribution_ps[before[0], output_layout, own.input_layout[option]])
                if position == 0:
                    send = int(problem.sends_ps[(stage - 1) % p, before[0], output_layout])
                    time[stage] += send
                    time[stage - 1] += send
            before = kind, option
    slowest, total = max(time), sum(time)
    full = slowest * m - (slowest - total) // v
    few = total - (1 - m) * slowest // v
    options = group.options
    tie = problem.tied_ps[
        options[problem.embedding].input_layout[chosen[0]], options[problem.head].output_layout[chosen[-1]]
    ]
    return max(full, few) + max(end) + float(tie)


def _gradients(own: Options, option: int) -> int:
    return int(own.late_bytes[option] + own.sum_bytes[option])


def _received(p: int, v: int, m: int, stage: int) -> list[set[tuple[int, int]]]:
    """Return, by action of a stage, the microbatch and chunk of each output that the next stage is known to have.

    Its messages show that. A gradient is sent after the next stage's backward pass, and of two stages an input after
    its forward pass.
    """
    schedule = schedule_of(Schedule.INTERLEAVED_1F1B)
    other = (stage + 1) % p
    there = schedule.actions(p, m, other, v)
    around = int(stage == p - 1)
    shown, found = -1, []
    for kind, microbatch, chunk in schedule.actions(p, m, stage, v):
        if kind is Pass.BACKWARD and chunk + around < v:
            shown = max(shown, there.index(Action(kind, microbatch, chunk + around)))
        if kind is Pass.FORWARD and p == 2 and chunk + stage > 0:
            shown = max(shown, there.index(Action(kind, microbatch, chunk + stage - 1)))
        inputs = [(i, c - around) for way, i, c in there[: shown + 1] if way is Pass.FORWARD]
        found.append({(i, c) for i, c in inputs if c >= 0})
    return found


def _memory_bytes(problem: InterleavedProblem, chosen: tuple[int, ...]) -> int:
    """The most that any stage holds at any action; a chunk's first backward pass makes its gradients layer by layer.

    A chunk keeps what it received of each microbatch, and no output that the next stage has; beside that there is the
    largest message of each direction, and one that comes for the next pass.
    """
    p, v, m, options = problem.pp_size, problem.num_chunks, problem.num_microbatches, problem.group.options
    kind, option = problem.positions[-1], chosen[-2]
    message = int(problem.boundary_bytes[kind, options[kind].output_layout[option]])
    most = 0
    for stage in range(p):
        chains = [_chain(problem, chosen, stage, chunk) for chunk in range(v)]
        received = [0 if (stage, chunk) == (0, 0) else message for chunk in range(v)]
        given = [0 if (stage, chunk) == (p - 1, v - 1) else message for chunk in range(v)]
        kept = [received[c] + sum(int(options[k].activation_bytes[o]) for k, o in chains[c]) for c in range(v)]
        gradients = [[_gradients(options[k], o) for k, o in chain] for chain in chains]
        static = sum(int(options[k].state_bytes[o]) for c in chains for k, o in c)
        static += max(received) + max(given) + message
        flying: set[tuple[int, int]] = set()
        made: set[int] = set()
        actions = schedule_of(Schedule.INTERLEAVED_1F1B).actions(p, m, stage, v)
        for action, gone in zip(actions, _received(p, v, m, stage), strict=True):
            own = action.microbatch, action.chunk
            flying.discard(own)
            resident = static + sum(kept[chunk] for _, chunk in flying) + received[action.chunk]
            resident -= message * len(flying & gone) * problem.frees_outputs
            last = len(chains[action.chunk]) - 1 - (stage == p - 1 and action.chunk == v - 1)
            resident += sum(sum(gradients[chunk]) for chunk in made)
            makes = action.kind is Pass.BACKWARD and action.chunk not in made
            for number, (kind, option) in enumerate(chains[action.chunk]):
                resident += int(options[kind].activation_bytes[option])
                behind = sum(gradients[action.chunk][number:]) if makes else 0
                workspace = int(options[kind].workspace_bytes[option])
                if number == last and problem.frees_outputs:  # the gradient of the output is there instead of it
                    output = problem.boundary_bytes[kind, options[kind].output_layout[option]]
                    workspace = max(0, workspace - int(output))
                most = max(most, resident + workspace + behind)
            if action.kind is Pass.FORWARD:
                flying.add(own)
            else:
                made.add(action.chunk)
    return most
