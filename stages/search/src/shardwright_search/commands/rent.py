"""`shardwright rent`: which nodes to rent, and what a faster run costs."""

from collections.abc import Sequence
from contextlib import ExitStack
from math import ceil
from pathlib import Path
from typing import NamedTuple

from shardwright.command import show
from shardwright.display.svg import document
from shardwright.io import BadInput, NothingFits, check_new, check_writable, read_document, write_bytes
from shardwright.io.hdf5 import write_profile
from shardwright.types import Cluster, Model, Plan
from shardwright_search.candidates import Candidate
from shardwright_search.commands.prediction import (
    Inputs,
    prediction_of_searched,
    prediction_path,
    progress,
    read_inputs,
    written,
)
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.rent.front import Front, check_rentable, find_front
from shardwright_search.rent.options import RentOptions
from shardwright_search.rent.page import FrontWords, front_page
from shardwright_search.rent.sub_clusters import sub_clusters
from shardwright_search.rent.table import Status, SubClusterRow, csv_of, draw_front, front_file, plan_name, rows_of
from shardwright_search.search import SearchAnswer
from shardwright_search.solver.targets import Best, Target
from shardwright_search.space.budget import budgets_of, budgets_of_stages
from shardwright_search.space.request import Offers, SearchRequest


class _LimitPoint(NamedTuple):
    """A limit, and the point of the front that is best within it."""

    limit: str
    row: SubClusterRow


def rent(options: RentOptions) -> None:
    """Find the front, and write it with a plan for each of its points."""
    request, model = read_document(options.search, SearchRequest), read_document(options.model, Model)
    cluster, inputs = read_document(options.cluster, Cluster), read_inputs(options)
    check_rentable(request, options.search)
    steps = _steps(options, request, model)
    offers = Offers() if options.offers is None else read_document(options.offers, Offers)
    offered = sub_clusters(cluster, offers, options.cluster, options.offers or options.cluster)
    check_new(options.out)
    check_writable(options.out / "front.csv")
    with progress() as report:
        given = request, model, offered, inputs.profiles
        front = find_front(*given, options.search, report, options.time_limit)
    if not front.points:
        raise NothingFits(f"{options.search}: {_why_nothing(front)}")
    simulated_s = _write_plans(front, request, inputs, options)
    rows = rows_of(front, steps, simulated_s)
    points = [row for row in rows if row.status is Status.FRONT]
    chosen, missed = _limits(options, points)
    write_bytes(options.out / "front.csv", csv_of(rows))
    write_profile(options.out / "front.h5", front_file(rows, _proof(front)))
    lines = [_proof(front), *(_point_line(*point) for point in chosen)]
    _write_page(options.out, rows, frozenset(point.row.nodes for point in chosen), (model, cluster), lines)
    show("\n".join([*_table(points, steps), *lines]))
    if missed:
        raise NothingFits("; ".join(missed))


def _write_page(
    folder: Path,
    rows: tuple[SubClusterRow, ...],
    chosen: frozenset[str],
    given: tuple[Model, Cluster],
    lines: Sequence[str],
) -> None:
    """Write the picture, and the page with the plans that are in the folder."""
    model, cluster = given
    drawing = draw_front(rows, chosen, f"{model.name} on rented nodes of {cluster.name}")
    write_bytes(folder / "front.svg", document(drawing).encode())
    plans = {row.nodes: read_document(folder / row.plan, Plan) for row in rows if row.plan}
    page = front_page(rows, plans, drawing, FrontWords(model.name, cluster.name, lines))
    write_bytes(folder / "front.html", page.encode())


def _why_nothing(front: Front) -> str:
    """Return why there is no point."""
    if front.stopped:
        return "no plan was found before the search was stopped: give it more time"
    if any(answer.is_open for answer in front.answers):
        return "no plan was found, and stages of any widths have too many places to be searched: limit pp_sizes"
    return "no plan fits on any sub-cluster: allow more memory"


def _steps(options: RentOptions, request: SearchRequest, model: Model) -> int | None:
    if options.steps is not None and options.tokens is not None:
        raise BadInput("--tokens", "cannot be combined with --steps", "give one of them")
    steps = options.steps
    if options.tokens is not None and isinstance(request.global_batch_size, int):
        steps = ceil(options.tokens / (request.global_batch_size * model.sequence_length))
    if steps is None and (options.max_hours is not None or options.max_usd is not None):
        name = "--max-usd" if options.max_hours is None else "--max-hours"
        raise BadInput(name, "says nothing without the training's length", "give --steps or --tokens")
    return steps


def _write_plans(front: Front, request: SearchRequest, inputs: Inputs, options: RentOptions) -> dict[int, float]:
    """Write the plan of each point with its prediction, and return the simulated time of each."""
    files = {"cluster": options.cluster, "model": options.model, "search": options.search} | inputs.files
    simulated_s = {}
    with ExitStack() as all_or_none:
        for number in front.points:
            answer = _answer(front, number)
            plan, evaluation = answer.chosen
            simulated_s[number] = evaluation.estimate.simulated_step_time_s
            asked = front.spaces[number].instance.request
            budgets = budgets_of_stages(plan, budgets_of(asked, plan.cluster, options.search))
            prediction = prediction_of_searched(answer, asked, budgets, files, inputs.warnings)
            path = options.out / plan_name(front.answers[number])
            check_writable(prediction_path(path))
            all_or_none.enter_context(written(path, plan, prediction))
    return simulated_s


def _answer(front: Front, number: int) -> SearchAnswer:
    """Return a point as the answer of a search that compared plans by their closed form alone."""
    answer, instance = front.answers[number], front.spaces[number].instance
    assert answer.best is not None
    target, plan_found, score = answer.best
    configuration = target.configuration.configuration
    plan = instance.plan(configuration, plan_found.solution)
    return SearchAnswer(
        chosen=Candidate(plan, evaluate(plan, instance.costs.profiles, instance.costs)),
        optimum_s=score * 1e-12,
        bound_s=min(answer.bound_s, score * 1e-12),
        examined=front.looked_at,
        solved=front.solved,
        near=1,
        simulated=0,
        stopped=front.stopped,
        best=Best(Target(configuration, target.offset_ps, target.scale), plan_found, score),
        instance=instance,
        unlisted=front.unlisted.get(number),
    )


def _limits(options: RentOptions, points: Sequence[SubClusterRow]) -> tuple[list[_LimitPoint], list[str]]:
    """Return the cheapest and the fastest point within the limits, and for limits without one what comes nearest."""
    chosen, missed, max_hours, max_usd = [], [], options.max_hours, options.max_usd
    fastest, cheapest = min(points, key=lambda row: row.hours), min(points, key=lambda row: row.usd)
    if max_hours is not None and (within := [row for row in points if row.hours <= max_hours]):
        chosen.append(_LimitPoint(f"cheapest within {max_hours:g} h", min(within, key=lambda row: row.usd)))
    elif max_hours is not None:
        more = f"the fastest, {fastest.nodes}, takes {fastest.hours - max_hours:.6g} h more"
        missed.append(f"--max-hours {max_hours:g}: {more}")
    if max_usd is not None and (within := [row for row in points if row.usd <= max_usd]):
        chosen.append(_LimitPoint(f"fastest within {max_usd:g} USD", min(within, key=lambda row: row.hours)))
    elif max_usd is not None:
        more = f"the cheapest, {cheapest.nodes}, costs {cheapest.usd - max_usd:.6g} USD more"
        missed.append(f"--max-usd {max_usd:g}: {more}")
    return chosen, missed


def _point_line(limit: str, row: SubClusterRow) -> str:
    return f"{limit}: {row.nodes}, {row.hours:.6g} h, {row.usd:.6g} USD, {row.plan}"


def _table(points: Sequence[SubClusterRow], steps: int | None) -> list[str]:
    """Return a line for each point, with the length and price of the training if they are known."""
    widest, lines = max(len(row.nodes) for row in points), []
    for row in points:
        line = f"{row.nodes:{widest}}  {row.step_s:11.6g} s  {row.usd_per_step:11.6g} USD a step"
        lines.append(line + (f"  {row.hours:.6g} h  {row.usd:.6g} USD" if steps else ""))
    return lines


def _proof(front: Front) -> str:
    """Return the proof of the front in words."""
    num_open = sum(answer.is_open for answer in front.answers)
    pruned = sum(answer.best is None and answer.price.step_s < float("inf") for answer in front.answers)
    proof = f"{len(front.points)} points of {len(front.answers)} sub-clusters, {pruned} ruled out by bounds alone; "
    proof += f"{front.solved} of {front.looked_at} configurations were solved; "
    if not num_open:
        return proof + "exact: no plan is as fast and as cheap as a point and better in one of the two"
    least = min(answer.bound_s for answer in front.answers if answer.is_open)
    why = "stopped" if front.stopped else "stages of any widths can lie on some in too many ways to be searched"
    return proof + f"{why}: plans above {least:.6g} s a step of {num_open} sub-clusters may be missing"
