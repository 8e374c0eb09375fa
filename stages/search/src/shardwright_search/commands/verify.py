"""`shardwright verify`: a plan and the certificate of its search's bound, checked without searching."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from math import ceil, floor
from pathlib import Path
from time import monotonic

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from shardwright.command import show
from shardwright.display.plan_words import shape_words, strategy_words
from shardwright.io import BadInput, read_document, sha256_of_file
from shardwright.types import EMBEDDING, HEAD, Certificate, Cluster, ConfigurationProof, Model, Plan
from shardwright_search.certificate.check import Way, Ways, confirms
from shardwright_search.commands.prediction import read_inputs
from shardwright_search.cost_model.plan import Evaluation, cost_model_of, evaluate
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.options import VerifyOptions
from shardwright_search.solver.problem import Problem, Solution
from shardwright_search.solver.targets import Target
from shardwright_search.space.budget import allowed_bytes, budgets_of, over_bytes, with_spare
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.instance import Instance
from shardwright_search.space.request import SearchRequest
from shardwright_search.space.search_space import SearchSpace, space_of
from shardwright_search.space.split_problem import SplitConfiguration, split_targets

IN_PLAN = ("cluster", "model")
"""Roles of files that a plan contains: a certificate pins the hashes of all others."""
_Target = Target[Configuration]
_ANEW = "make it again with plan --certificate"
_SEARCHED = "give the plan that the search wrote"


def verify(options: VerifyOptions) -> None:
    """Confirm a plan and its certificate, with all numbers priced again; raise BadInput if they do not hold."""
    started = monotonic()
    plan, certificate = read_document(options.plan, Plan), read_document(options.certificate, Certificate)
    asked, inputs = read_document(options.search, SearchRequest), read_inputs(options)
    request = with_spare(asked, plan.cluster, inputs.profiles)
    _check_pinned(options, certificate, plan, {"search": options.search} | inputs.files)
    _check_given(options, plan)
    check_certifiable(request, options.search)
    space = space_of(request, plan.model, plan.cluster, inputs.profiles, options.search)
    if (difference := outside(space, plan)) is not None:
        raise BadInput(options.plan, f"is outside the space of {options.search}: {difference}", _SEARCHED)
    evaluation, samples = _evaluated(options, plan, request, inputs.profiles), plan.global_batch_size
    file, proofs = options.certificate, certificate.configurations
    count = _check_proofs(file, proofs, problems_of(space, samples), certificate.bound_ps)
    lines = [_claim(options, certificate.bound_ps, plan, None if plan.schedule.splits else evaluation.objective_ps)]
    if certificate.split_bound_ps is not UNSET:
        proofs, bound_ps = certificate.split_configurations, certificate.split_bound_ps
        count += _check_proofs(file, proofs, split_problems_of(space, samples), bound_ps)
        simulated_ps = round(evaluation.estimate.simulated_step_time_s * 1e12)
        lines.append(_split_claim(options, bound_ps, plan, simulated_ps))
    lines.append(f"{count} configurations confirmed in {monotonic() - started:.1f} s{_not_compared(options)}")
    show("\n".join(lines))


def _claim(options: VerifyOptions, bound_ps: float, plan: Plan, plan_ps: int | None) -> str:
    """Return, in words, what is confirmed of plans without split backward passes.

    `plan_ps`: the closed form of the plan's step; None: the plan has split backward passes.
    """
    others = " without split backward passes" if plan_ps is None else ""
    words = f"verified: no plan{others} takes less than {_least_ms(bound_ps)} ms a step of "
    words += f"{plan.global_batch_size} samples (closed form)"
    if plan_ps is None:
        return words
    if plan_ps < bound_ps:
        raise BadInput(options.certificate, f"its bound exceeds the step time of {options.plan}", _ANEW)
    more = f"no plan is more than {_most_percent(plan_ps, bound_ps)}% faster"
    return f"{words}\nthis plan takes {plan_ps * 1e-9:.6f} ms: {more}"


def _split_claim(options: VerifyOptions, bound_ps: float, plan: Plan, plan_ps: int) -> str:
    """Return, in words, what is confirmed of plans with split backward passes, compared with a plan's time."""
    if plan.schedule.splits and plan_ps < bound_ps:
        raise BadInput(options.certificate, f"its bound exceeds the simulated step time of {options.plan}", _ANEW)
    more = f"more than {_most_percent(plan_ps, bound_ps)}% " if plan_ps > bound_ps else ""
    return (
        f"verified: no plan with split backward passes takes less than {_least_ms(bound_ps)} ms (simulated)\n"
        f"this plan takes {plan_ps * 1e-9:.6f} ms (simulated): none of them is {more}faster"
    )


def _least_ms(bound_ps: float) -> str:
    """Return a bound, rounded to the safe side."""
    return f"{floor(bound_ps / 1000) * 1e-6:.6f}"


def _most_percent(plan_ps: int, bound_ps: float) -> str:
    """Return by how much another plan may be faster, rounded to the safe side."""
    return f"{ceil((plan_ps / Fraction(bound_ps) - 1) * 10**6) * 1e-4:.4f}"


def _check_pinned(options: VerifyOptions, certificate: Certificate, plan: Plan, files: Mapping[str, Path]) -> None:
    if certificate.plan_sha256 != plan.sha256:
        raise BadInput(options.certificate, f"is the certificate of another plan than {options.plan}", _ANEW)
    for role in dict.fromkeys((*files, *certificate.inputs_sha256)):
        given = sha256_of_file(files[role]) if role in files else None
        if certificate.inputs_sha256.get(role) != given:
            other = f"another {role} than {files[role]}" if role in files else f"a {role}"
            raise BadInput(options.certificate, f"was made with {other}", f"give that {role}, or {_ANEW}")


def _check_given(options: VerifyOptions, plan: Plan) -> None:
    """Raise BadInput if the plan is for another model or cluster than the given files."""
    if options.cluster is not None and read_document(options.cluster, Cluster) != plan.cluster:
        raise BadInput(options.plan, f"is for another cluster than {options.cluster}", _SEARCHED)
    if options.model is not None and read_document(options.model, Model) != plan.model:
        raise BadInput(options.plan, f"is for another model than {options.model}", _SEARCHED)


def _evaluated(options: VerifyOptions, plan: Plan, request: SearchRequest, profiles: Profiles) -> Evaluation:
    """Return the plan as in `evaluate`; raise BadInput if it exceeds the budget."""
    evaluation = evaluate(plan, profiles, cost_model_of(plan, profiles, request.time_model), timeline=False)
    budgets = budgets_of(request, plan.cluster, options.search)
    allowed = allowed_bytes(plan, evaluation.estimate, budgets)
    for number, (stage, most) in enumerate(zip(evaluation.estimate.stages, allowed, strict=True)):
        if stage.memory_bytes > most:
            problem = f"stage {number} takes {stage.memory_bytes} bytes a rank, the budget is {most}"
            raise BadInput(options.plan, problem, _SEARCHED)
    if max(over_bytes(plan, evaluation.estimate, budgets)) > 0:
        raise BadInput(options.plan, "keeps more in host memory than its node types have", _SEARCHED)
    return evaluation


def _not_compared(options: VerifyOptions) -> str:
    """Return a line that names what was read from the plan instead of from files; empty if nothing was."""
    left = [name for name in IN_PLAN if getattr(options, name) is None]
    given = " and ".join(f"--{name}" for name in left)
    return f"\nthe {' and the '.join(left)} are the plan's: {given} compare them with files" if left else ""


def _check_proofs(
    file: Path, given: Sequence[ConfigurationProof], configurations: Iterable[tuple[str, Ways]], bound_ps: float
) -> int:
    """Return the number of configurations; BadInput if one is missing, or its proof does not hold."""
    proofs = {proof.configuration: proof for proof in given}
    if len(proofs) < len(given):
        raise BadInput(file, "has several proofs of one configuration", _ANEW)
    count = 0
    for name, ways in configurations:
        each = [(way, proofs.pop(way.name)) for way in ways(Fraction(bound_ps)) if way.name in proofs]
        if not each:
            raise BadInput(file, f"leaves out a configuration of the space: {name}", _ANEW)
        if not any(confirms(way.problem, proof, way.below_ps) for way, proof in each):
            raise BadInput(file, f"does not confirm its bound: {name}", _ANEW)
        count += 1
    if proofs:
        raise BadInput(file, f"has a configuration that the space does not have: {next(iter(proofs))}", _ANEW)
    return count


def check_certifiable(request: SearchRequest, file: Path) -> None:
    """Raise BadInput for a request whose space no certificate covers."""
    if len(request.optimizers) > 1:
        problem = f"optimizer: a certificate covers only one, not {len(request.optimizers)}"
        raise BadInput(file, problem, "name one, or search without --certificate")
    if open_ := [each for each in request.schedules if each.interleaves]:
        problem = f"schedules: certificates do not cover {open_[0]}"
        raise BadInput(file, problem, "leave it out, or search without --certificate")


def problems_of(space: SearchSpace, batch_size: int) -> Iterator[tuple[str, Ways]]:
    """Yield each configuration's name, and the one way to prove a bound of it.

    The bound is on the time of a step of the given batch size; for other batch sizes it is the same per sample.
    """
    space.check_listed("no certificate")
    for target in space.targets:
        name, problem = _configuration_name(target.configuration), space.instance.problem(target.configuration)

        def way(
            bound_ps: Fraction, name: str = name, problem: Problem = problem, target: _Target = target
        ) -> list[Way]:
            return [Way(name, problem, _limit_ps(target, batch_size, bound_ps))]

        yield name, way


def split_problems_of(space: SearchSpace, batch_size: int) -> Iterator[tuple[str, Ways]]:
    """Yield each pipeline's name with split backward passes, and its ways: by a mean of stages, and by the slowest."""
    space.check_listed("no certificate")
    for schedule in (each for each in space.instance.request.schedules if each.splits):
        for target in split_targets(space, schedule) or ():
            split, name = (
                SplitConfiguration(space.instance, target.configuration),
                _configuration_name(target.configuration),
            )

            def ways(
                bound_ps: Fraction, split: SplitConfiguration = split, name: str = name, target: _Target = target
            ) -> Iterator[Way]:
                below_ps = _limit_ps(target, batch_size, bound_ps)
                alone, weights = split.most_alone(below_ps), split.weights
                more_ps = below_ps + alone * Fraction(split.too_much_ps(weights))
                yield Way(f"{name}, mean", split.weighted_problem(weights), more_ps)
                yield Way(f"{name}, slowest", split.largest_problem(alone == 0), below_ps)

            yield name, ways


def _limit_ps(target: _Target, batch_size: int, bound_ps: Fraction) -> Fraction:
    """Return the T of a configuration that a bound of a step of the given batch size implies."""
    return bound_ps * Fraction(target.configuration.global_batch_size, batch_size) - Fraction(target.offset_ps)


def _configuration_name(configuration: Configuration) -> str:
    """Return the text of a configuration, with choices of layers and buffers that the text leaves out."""
    fixed = configuration.layers, configuration.buffer_tokens
    return str(configuration) + ("" if fixed == (None, None) else f", {msgspec.json.encode(fixed).decode()}")


# Whether a given plan is in a search's space, and if not, which part of it is outside.


_REQUESTED = "gradient_reduction", "precision", "attention", "compile"


def outside(space: SearchSpace, plan: Plan) -> str | None:
    """Return which part of a plan the space does not contain, in words; None: the plan is in it."""
    reasons = list[str]()
    for reason in _outside(space, plan):
        if reason is None:
            return None
        reasons.append(reason)
    return reasons[-1] if reasons else f"batch {plan.global_batch_size}, {shape_words(plan)}"


def _outside(space: SearchSpace, plan: Plan) -> Iterator[str | None]:
    """Yield, for each configuration of the plan's shape, which part of the plan it does not contain."""
    instance, request = space.instance, space.instance.request
    for field in _REQUESTED:
        if getattr(plan, field) != getattr(request, field):
            yield f"another {field} than the search file's"
            return
    if (plan.loss_chunks or 1) != request.loss_chunks:
        yield "other loss_chunks than the search file's"
        return
    if plan.optimizer not in request.optimizers:
        yield "another optimizer than the search file's"
        return
    if plan.schedule.splits and plan.schedule not in request.schedules:
        yield "another schedule than the search file's"
        return
    targets = (split_targets(space, plan.schedule) or ()) if plan.schedule.splits else space.targets
    for configuration in (target.configuration for target in targets):
        if _shape(plan) == configuration[: len(_shape(plan))]:
            solution = _solution(instance, configuration, plan)
            if isinstance(solution, str):
                yield solution
            else:
                same = instance.plan(configuration, solution) == replace(plan, name=request.name)
                yield None if same else "options that no search sets"


def _shape(plan: Plan) -> tuple[object, ...]:
    """Return the plan's shape, as a configuration's first fields."""
    shape = Configuration(
        plan.global_batch_size, plan.num_microbatches, len(plan.stages), plan.schedule, len(plan.stages[0].layers)
    )
    return shape[:5]


def _solution(instance: Instance, configuration: Configuration, plan: Plan) -> Solution | str:
    """Return the solution that equals a plan, or which part of the plan the configuration does not contain."""
    placed, groups = instance.choices.placed(configuration), list[int]()
    (position,) = placed.moves[0]
    for number, (stage, moves) in enumerate(zip(plan.stages, placed.moves, strict=True)):
        ways = (way for way in moves[position] if placed.ranks_behind(position, way[0]) == stage.ranks)
        if (way := next(ways, None)) is None:
            return f"the ranks of stage {number}"
        group, position = way
        groups.append(group)
    shardings, options = instance.choices.layers.shardings(instance.choices.choice(configuration)), list[int]()
    blocks = ((f"layers[{i}]", layer.type, layer) for i, layer in enumerate(plan.layers))
    for place, name, strategy in ((EMBEDDING, EMBEDDING, plan.embedding), *blocks, (HEAD, HEAD, plan.head)):
        listed = shardings.of_type(name, len(plan.stages[plan.stage_of(place)].ranks))
        if strategy not in listed:
            return f"{place} as {strategy_words(strategy)}"
        options.append(listed.index(strategy))
    ends = (*(stage.layers[-1][1] + 1 for stage in plan.stages[:-1]), len(options))
    return Solution(ends, tuple(options), tuple(groups))
