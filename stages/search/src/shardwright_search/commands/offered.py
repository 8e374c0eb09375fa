"""The question of `shardwright rent`: a model by name on nodes with published figures, or files."""

import re
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import NamedTuple

from shardwright.devices.table import read_devices
from shardwright.io import BadInput, read_document
from shardwright.types import MAX_DEVICES, Cluster, Model
from shardwright_search.advise.question import group_of, question_of
from shardwright_search.commands.prediction import Inputs, read_inputs
from shardwright_search.options import AdviseOptions, ProfileOptions, RentOptions
from shardwright_search.rent.front import check_rentable
from shardwright_search.rent.sub_clusters import SubCluster, sub_clusters
from shardwright_search.space.request import Offer, Offers, SearchRequest

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
