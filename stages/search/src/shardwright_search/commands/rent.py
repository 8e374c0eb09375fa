"""`shardwright rent`: which nodes to rent, and how much a faster run costs."""

import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import ceil, inf
from pathlib import Path
from typing import NamedTuple

from rich.console import Group

from shardwright.devices.table import read_devices
from shardwright.display.svg import document
from shardwright.estimate.notes import SEEN
from shardwright.io import BadInput, NothingFits, check_new, check_writable, read_document, write_bytes
from shardwright.io.hdf5 import write_profile
from shardwright.types import MAX_DEVICES, Cluster, Model, Plan
from shardwright_search.advise.question import group_of, question_of
from shardwright_search.advise.report import plan_words
from shardwright_search.candidates import Candidate
from shardwright_search.commands.given_plans import written_files
from shardwright_search.commands.prediction import (
    Inputs,
    prediction_of_searched,
    prediction_path,
    progress,
    read_inputs,
    written,
)
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.explain.printing import PLAN, Lines, show_rich, table
from shardwright_search.options import AdviseOptions, ProfileOptions, RentOptions
from shardwright_search.rent.front import Front, SubCluster, check_rentable, find_front, sub_clusters
from shardwright_search.rent.table import (
    FrontWords,
    Status,
    SubClusterRow,
    csv_of,
    draw_front,
    first_line,
    front_file,
    front_page,
    plan_name,
    rows_of,
)
from shardwright_search.search import SearchAnswer
from shardwright_search.solver.targets import Best, Target
from shardwright_search.space.budget import allowed_bytes, budgets_of
from shardwright_search.space.request import Offer, Offers, SearchRequest
from shardwright_search.systems.launch import PLAN_FILE, own_launch

# The question of `shardwright rent`: a model by name on nodes with published figures, or files.


_RANGE = re.compile(r"([\d,-]+)x(\d{1,6}:[^+]+)")
_PART = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_EXAMPLE = "write for example 0-8x8:A100-80+0-8x8:A10"
_FILES = ("cluster", "model", "search", "hardware", "profile")
_NAMED = ("gpus", "batch", "seq", "budget_gib", "inter_node_gbit_s", "price_per_gpu_hour", "spot")


class Offered(NamedTuple):
    """A rent question: the searches, the sub-clusters, and the assumptions."""

    request: SearchRequest
    model: Model
    cluster: Cluster
    """All nodes together."""
    sub_clusters: tuple[SubCluster, ...]
    inputs: Inputs
    source: Path
    """The file or option that errors name."""
    spot: frozenset[str] = frozenset()
    """Spot node types, which may be preempted."""
    assumed: tuple[str, ...] = ()


def offered_of(options: RentOptions) -> Offered:
    """Return the question that the options ask; BadInput if neither form (model name, files) is complete."""
    if options.preset is None:
        return _of_files(options)
    given = next((name for name in (*_FILES, "offers", "correction") if getattr(options, name)), None)
    if given is not None:
        raise BadInput(
            f"--{given}", f"cannot be combined with the model name {options.preset}", "pass the name, or files"
        )
    return _of_name(options)


def _of_files(options: RentOptions) -> Offered:
    cluster_file, model_file, search = options.cluster, options.model, options.search
    given = (name for name in _NAMED if getattr(options, name))
    lacking = [name for name in _FILES if not getattr(options, name)]
    if cluster_file is None or model_file is None or search is None or lacking:
        remedy = "name a model with --gpus, or give --cluster, --model, --search, --hardware and --profile"
        raise BadInput(f"--{lacking[0]}", "is not given", remedy)
    if (name := next(given, None)) is not None:
        raise BadInput(
            f"--{name.replace('_', '-')}", "applies only to a model given by name", "leave it out if you pass files"
        )
    request, model = read_document(search, SearchRequest), read_document(model_file, Model)
    profiles = ProfileOptions(
        hardware=options.hardware, profile=options.profile, correction=options.correction, imbalance=options.imbalance
    )
    cluster, inputs = read_document(cluster_file, Cluster), read_inputs(profiles)
    check_rentable(request, search)
    offers = Offers() if options.offers is None else read_document(options.offers, Offers)
    own = sub_clusters(cluster, offers, cluster_file, options.offers or cluster_file)
    files = {"cluster": cluster_file, "model": model_file, "search": search} | dict(inputs.files)
    return Offered(request, model, cluster, own, inputs._replace(files=files), search)


def _of_name(options: RentOptions) -> Offered:
    assert options.preset is not None
    if options.gpus is None:
        raise BadInput("--gpus", "is not given", _EXAMPLE)
    counts, whole = _ranges(options.gpus)
    question = question_of(
        AdviseOptions(
            model=options.preset,
            gpus=whole,
            batch=options.batch,
            seq=options.seq,
            precision=options.precision,
            budget_gib=options.budget_gib,
            inter_node_gbit_s=options.inter_node_gbit_s,
            imbalance=options.imbalance,
        )
    )
    spot = _prices("--spot", options.spot, counts)
    given = _prices("--price-per-gpu-hour", options.price_per_gpu_hour, counts) | spot
    types, offers = question.cluster.node_types, dict[str, Offer]()
    for name, own in counts.items():
        usd = given[name] * types[name].devices_per_node if name in given else types[name].usd_per_hour
        if usd is None:
            raise BadInput("--gpus", f"no price of {name} is known", f"give --price-per-gpu-hour {name}=USD")
        offers[name] = Offer(usd_per_hour=usd, counts=own)
    source = Path("--gpus")
    own_clusters = sub_clusters(question.cluster, Offers(node_types=offers), source, source)
    priced = tuple(
        f"price: {usd:g} USD a GPU hour of {name} ({'spot, ' * (name in spot)}given)" for name, usd in given.items()
    )
    inputs = Inputs(question.profiles, {}, ())
    assumed = (*priced, *question.assumed)
    return Offered(
        question.request, question.model, question.cluster, own_clusters, inputs, source, frozenset(spot), assumed
    )


def _ranges(gpus: str) -> tuple[dict[str, tuple[int, ...]], str]:
    """Return the numbers of nodes of each type, by its key, and the largest of each in the form of `advise --gpus`."""
    counts, most, table = dict[str, tuple[int, ...]](), list[str](), read_devices()
    for text in gpus.split("+"):
        match = _RANGE.fullmatch(text)
        if match is None:
            raise BadInput("--gpus", f"{text!r} is not FROM-TOxGPUS:DEVICE", _EXAMPLE)
        own = sorted({number for part in match[1].split(",") for number in _numbers(text, part)})
        key, _, _ = group_of(f"{own[-1]}x{match[2]}", table)
        if key in counts:
            raise BadInput("--gpus", f"{key} appears twice", "name each type once")
        counts[key] = tuple(own)
        most.append(f"{own[-1]}x{match[2]}")
    return counts, "+".join(most)


def _numbers(text: str, part: str) -> range:
    """Return the numbers of nodes of a part such as 4 or 0-8."""
    match = _PART.fullmatch(part)
    if match is None:
        raise BadInput("--gpus", f"{text!r} is not FROM-TOxGPUS:DEVICE", _EXAMPLE)
    low, high = int(match[1]), int(match[2] or match[1])
    if low > high or high > MAX_DEVICES:
        raise BadInput(
            "--gpus",
            f"{text}: {low}-{high} is not a range of nodes",
            f"give the smaller number first, and at most {MAX_DEVICES}",
        )
    return range(low, high + 1)


def _prices(option: str, texts: tuple[str, ...], known: Mapping[str, object]) -> dict[str, float]:
    """Return prices in USD by device key; BadInput for an unknown device, or a missing price."""
    prices, table = dict[str, float](), read_devices()
    for text in texts:
        name, _, usd = text.partition("=")
        key = table.key_of(name)
        if key not in known:
            raise BadInput(option, f"{text!r} names none of {', '.join(known)}", "write DEVICE=USD")
        try:
            price = float(usd)
        except ValueError:
            price = inf
        if not 0 <= price < 1e9:
            raise BadInput(option, f"{text!r} has no price", "write DEVICE=USD")
        prices[key] = price
    return prices


_HEADINGS, _OF_TRAINING = ("nodes", "s a step", "USD a step"), ("h", "USD")


# The command.


class _LimitPoint(NamedTuple):
    """A limit, and the best point of the front within it."""

    limit: str
    row: SubClusterRow


def rent(options: RentOptions) -> None:
    """Find and show the front; write it with a plan for each point, and the files that start one, if requested."""
    offered = offered_of(options)
    request, model = offered.request, offered.model
    steps = _steps(options, request, model)
    _check(options)
    with progress() as report:
        given = request, model, offered.sub_clusters, offered.inputs.profiles
        front = find_front(*given, offered.source, report, options.time_limit)
    if not front.points:
        raise NothingFits(f"{offered.source}: {_why_nothing(front)}")
    answers = {number: _answer(front, number) for number in front.points}
    simulated_s = {number: each.chosen.evaluation.estimate.simulated_step_time_s for number, each in answers.items()}
    rows = rows_of(front, steps, simulated_s)
    points = [row for row in rows if row.status is Status.FRONT]
    chosen, missed = _limits(options, points)
    plans = {row.nodes: answers[number].chosen.plan for row, number in zip(points, front.points, strict=True)}
    spot = _spot_words(offered)
    lines = [_proof(front), *(_point_line(*point) for point in chosen), *spot]
    words = FrontWords(model.name, offered.cluster.name, lines)
    launch = _launch(options, chosen, plans, offered)
    if options.out is not None:
        _write(options.out, front, answers, offered, rows)
        _write_page(options.out, rows, frozenset(point.row.nodes for point in chosen), plans, words)
    with written_files(launch, executable=launch):
        headings = (*_HEADINGS, *(_OF_TRAINING if steps else ()), PLAN)
        table_ = table("the front of time against price", headings, [_cells(each, plans, steps) for each in points])
        assumed = ["assumed", *(f"  {line}" for line in offered.assumed), SEEN] if offered.assumed else []
        show_rich(Group(Lines([first_line(points, words)]), table_, Lines([*lines, *assumed])))
    if missed:
        raise NothingFits("; ".join(missed))


def _check(options: RentOptions) -> None:
    """Raise BadInput for a front of files without a folder, for folders that are not new, and for no point to start."""
    if options.out is None and options.preset is None:
        raise BadInput("--out", "is not given", "name a new folder")
    if options.out is not None:
        check_new(options.out)
        check_writable(options.out / "front.csv")
    if options.launch is not None:
        if options.deadline is None and options.price is None:
            raise BadInput("--launch", "starts one point of the front", "name it: give --deadline or --price")
        check_new(options.launch)
        check_writable(options.launch / PLAN_FILE)


def _launch(
    options: RentOptions, chosen: Sequence[_LimitPoint], plans: Mapping[str, Plan], offered: Offered
) -> dict[Path, str]:
    """Return the files that start the first of the points that limits select; nothing if not requested."""
    if options.launch is None or not chosen:
        return {}
    plan = plans[chosen[0].row.nodes]
    spot = any(group.node_type in offered.spot for group in plan.cluster.nodes)
    launch = own_launch(plan, "--launch", spot)
    for note in launch.notes:
        print(note, file=sys.stderr)
    return {options.launch / name: text for name, text in launch.files.items()}


def _spot_words(offered: Offered) -> list[str]:
    if not offered.spot:
        return []
    names = ", ".join(sorted(offered.spot))
    return [f"spot prices: {names}; such nodes may be taken away at any time, and what that costs is not counted"]


def _write_page(
    folder: Path,
    rows: tuple[SubClusterRow, ...],
    chosen: frozenset[str],
    plans: Mapping[str, Plan],
    words: FrontWords,
) -> None:
    """Write the picture, and the page with the plans of the points by their nodes."""
    drawing = draw_front(rows, chosen, f"{words.model} on rented nodes of {words.cluster}")
    write_bytes(folder / "front.svg", document(drawing).encode())
    write_bytes(folder / "front.html", front_page(rows, plans, drawing, words).encode())


def _why_nothing(front: Front) -> str:
    """Return why the front has no point."""
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
    if steps is None and (options.deadline is not None or options.price is not None):
        name = "--price" if options.deadline is None else "--deadline"
        raise BadInput(name, "needs the length of the training", "give --steps or --tokens")
    return steps


def _write(
    folder: Path,
    front: Front,
    answers: Mapping[int, SearchAnswer],
    offered: Offered,
    rows: tuple[SubClusterRow, ...],
) -> None:
    """Write the plan of each point with its prediction, all or none, and then the tables."""
    inputs = offered.inputs
    with ExitStack() as all_or_none:
        for number, answer in answers.items():
            plan, asked = answer.chosen.plan, front.spaces[number].instance.request
            budgets = budgets_of(asked, plan.cluster, offered.source)
            allowed = allowed_bytes(plan, answer.chosen.evaluation.estimate, budgets)
            prediction = prediction_of_searched(answer, asked, allowed, inputs.files, inputs.warnings)
            path = folder / plan_name(front.answers[number])
            check_writable(prediction_path(path))
            all_or_none.enter_context(written(path, plan, prediction))
    write_bytes(folder / "front.csv", csv_of(rows))
    write_profile(folder / "front.h5", front_file(rows, _proof(front)))


def _answer(front: Front, number: int) -> SearchAnswer:
    """Return a point of the front as the answer of a search."""
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
    """Return the cheapest and the fastest point within the limits, and messages for limits that no point meets."""
    chosen, missed, max_hours, max_usd = [], [], options.deadline, options.price
    fastest, cheapest = min(points, key=lambda row: row.hours), min(points, key=lambda row: row.usd)
    if max_hours is not None and (within := [row for row in points if row.hours <= max_hours]):
        chosen.append(_LimitPoint(f"cheapest within {max_hours:g} h", min(within, key=lambda row: row.usd)))
    elif max_hours is not None:
        more = f"the fastest, {fastest.nodes}, takes {fastest.hours - max_hours:.6g} h more"
        missed.append(f"--deadline {max_hours:g}: {more}")
    if max_usd is not None and (within := [row for row in points if row.usd <= max_usd]):
        chosen.append(_LimitPoint(f"fastest within {max_usd:g} USD", min(within, key=lambda row: row.hours)))
    elif max_usd is not None:
        more = f"the cheapest, {cheapest.nodes}, costs {cheapest.usd - max_usd:.6g} USD more"
        missed.append(f"--price {max_usd:g}: {more}")
    return chosen, missed


def _point_line(limit: str, row: SubClusterRow) -> str:
    return f"{limit}: {row.nodes}, {row.hours:.6g} h, {row.usd:.6g} USD"


def _cells(row: SubClusterRow, plans: Mapping[str, Plan], steps: int | None) -> tuple[str, ...]:
    """Return the table cells of a point, with duration and price of the training if they are known."""
    training = (f"{row.hours:,.4g}", f"{row.usd:,.6g}") if steps else ()
    return (row.nodes, f"{row.step_s:.4g}", f"{row.usd_per_step:.4g}", *training, plan_words(plans[row.nodes]))


def _proof(front: Front) -> str:
    """Return, in words, what is proven about the front."""
    num_open = sum(answer.is_open for answer in front.answers)
    pruned = sum(answer.best is None and answer.price.step_s < float("inf") for answer in front.answers)
    proof = f"{len(front.points)} points of {len(front.answers)} sub-clusters, {pruned} ruled out by bounds alone; "
    proof += f"{front.solved} of {front.looked_at} configurations were solved; "
    if not num_open:
        return proof + "exact: no plan is as fast and as cheap as a point and better in one of the two"
    least = min(answer.bound_s for answer in front.answers if answer.is_open)
    why = "stopped" if front.stopped else "stages of any widths can lie on some in too many ways to be searched"
    return proof + f"{why}: plans above {least:.6g} s a step of {num_open} sub-clusters may be missing"
