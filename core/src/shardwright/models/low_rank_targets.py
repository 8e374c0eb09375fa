"""The modules of a model that get low-rank matrices, chosen as peft (version 0.21) does from an adapter's targets.

Regular expressions from a file are matched only after a child process has done the same matches within limits of time
and memory.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import NamedTuple

from msgspec import UNSET

from shardwright.io import BadInput
from shardwright.models.facts import Family
from shardwright.models.frozen import Place, layers_of
from shardwright.models.registry import facts_of
from shardwright.models.traits import ExpertKeys
from shardwright.types.model import EMBEDDING, HEAD, LOW_RANK, Model, Parameter, Traced, base_type

_CPU_S = 2
"""Limit of CPU time in seconds for all matches of an adapter; published adapters take milliseconds."""
_MEMORY_BYTES = 2**30
_SHOWN = 80
"""Largest number of characters of an expression in a message."""
_PLAIN = re.compile(r"[\w.-]*")
_CHILD = f"""
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({_CPU_S}, {_CPU_S}))
resource.setrlimit(resource.RLIMIT_AS, ({_MEMORY_BYTES}, {_MEMORY_BYTES}))
sys.setrecursionlimit(500)
expressions, names = json.load(sys.stdin)
for text, expression, how in expressions:
    try:
        re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        json.dump([text, str(error)], sys.stdout)
        sys.exit(0)
for name in names:
    for _, expression, how in expressions:
        getattr(re, how)(expression, name)
"""
"""The child's recursion limit is below this process's, so that what it compiles can be compiled here, too."""


class Expression(NamedTuple):
    """A regular expression, and whether it must match a whole name."""

    text: str
    """The text in the file."""
    whole: str
    """The expression to match, which contains that text."""
    is_full: bool = False
    """Whether it must match the whole name instead of its beginning."""

    def match(self, name: str) -> re.Match[str] | None:
        """Return the match with a name; `check_expressions` must have accepted the expression."""
        return re.fullmatch(self.whole, name) if self.is_full else re.match(self.whole, name)


def check_expressions(expressions: Iterable[Expression], names: Iterable[str], file: object) -> None:
    """Raise BadInput, naming `file`, if an expression is invalid, or takes too long to match these names."""
    risky = [each for each in expressions if _PLAIN.fullmatch(each.text) is None]
    if not risky:
        return
    asked = json.dumps([[(x.text, x.whole, "fullmatch" if x.is_full else "match") for x in risky], [*names]])
    child = subprocess.run([sys.executable, "-I", "-S", "-c", _CHILD], input=asked, capture_output=True, text=True)
    if child.returncode != 0:
        named = " or ".join(_shown(each.text) for each in risky)
        problem = f"{named} takes over {_CPU_S} s or 1 GiB to match the names of modules"
        raise BadInput(file, problem, "list names, or use an expression without nested repetitions")
    if child.stdout:
        text, why = json.loads(child.stdout)
        raise BadInput(file, f"{_shown(text)} is not a regular expression ({why})", "correct it")


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


_WEIGHT = ".weight"


class StockModule(NamedTuple):
    """A module of the stock model that holds parameters of a layer."""

    place: Place
    module: str
    """The module's name in the layer, as in the description."""
    name: str
    """The module's full name in the stock model."""
    is_linear: bool
    """Whether the module is a Linear or a Conv1D, and not the matrix that computes a model's logits."""
    obstacle: str | None
    """Why the module cannot have low-rank matrices; None if it can."""


def stock_modules(model: Model) -> Iterator[StockModule]:
    """Yield the modules of all layers that hold matrices or norms; matrices that files fuse have the fused name."""
    facts, paths = None if model.is_traced else facts_of(model), paths_of(model)
    for place, kind in layers_of(model):
        parameters = model.types[kind].parameters
        logits = _logits(parameters) if kind == HEAD and (facts is None or facts.labels is None) else None
        for weight in parameters:
            module = weight.name.removesuffix(_WEIGHT)
            if module == weight.name or LOW_RANK in module:
                continue
            linear, obstacle = (
                _traced_form(model, kind, module) if facts is None else _form(facts, kind, weight, module)
            )
            if weight is logits:
                linear, obstacle = False, "gives the logits, and low-rank matrices are not supported there"
            stacked = {} if facts is None else facts.stock.stacked
            whole = next((each for each, parts in stacked.items() if module in parts), module)
            if whole != module:
                parts = " and ".join(part.rpartition(".")[2] for part in stacked[whole])
                obstacle = f"is held here as {parts}, which cannot have one pair of low-rank matrices together"
            yield StockModule(place, module, f"{paths[place]}{whole}", linear, obstacle)


def paths_of(model: Model) -> dict[Place, str]:
    """Return the prefix of each layer's module names in the stock model, which may have several lists of blocks."""
    if model.is_traced:
        lists = (traced_of(model, kind).path for kind in model.layers)
        places = [f"{path}.{{}}" if path else "" for path in lists]
    else:
        places = [facts_of(model).stock.places.get(base_type(kind), "model.layers.{}") for kind in model.layers]
    numbers = {place: count() for place in places}
    blocks = (f"{place.format(next(numbers[place]))}." if place else "" for place in places)
    return {EMBEDDING: "", HEAD: "", **dict(enumerate(blocks))}


def traced_of(model: Model, kind: str) -> Traced:
    """Return what a trace recorded of a block type, or of the head, of a model without facts."""
    traced = model.types[kind].traced
    assert traced is not UNSET
    return traced


def expert_keys(model: Model) -> ExpertKeys | None:
    """Return how a model's experts are named; None if it has no experts, or no facts."""
    return None if model.is_traced else facts_of(model).experts


_OF_EMBEDDING = "is a part of the embedding, and low-rank matrices are not supported there"


def _traced_form(model: Model, kind: str, module: str) -> tuple[bool, str | None]:
    """Return the same as `_form` for a module of a model without facts."""
    seen = traced_of(model, HEAD if kind == EMBEDDING else kind)
    if module in seen.like_linear:
        return True, "is a Linear of a class of its own, and low-rank matrices are not supported there"
    if module not in seen.linear:
        return False, "is not a Linear"
    return True, _OF_EMBEDDING if kind == EMBEDDING else None


def _form(facts: Family, kind: str, weight: Parameter, module: str) -> tuple[bool, str | None]:
    """Return whether a module is linear, and why it cannot have low-rank matrices (None if it can)."""
    keys = facts.experts
    if kind == EMBEDDING:
        return False, _OF_EMBEDDING
    if len(weight.shape) == 1 or module.endswith("norm") or weight.shared:
        return False, "is not a Linear"
    if keys is not None and module == keys.router and base_type(kind) in keys.types:
        if keys.router_is_linear:
            return True, "returns its scores twice, which peft cannot run with low-rank matrices"
        return False, "is a router, and not a Linear"
    return True, None


def _logits(parameters: tuple[Parameter, ...]) -> Parameter:
    """Return the matrix of a head that computes its logits: the last one."""
    return [p for p in parameters if len(p.shape) > 1 and LOW_RANK not in p.name][-1]


ALL_LINEAR = "all-linear"
"""peft's word for all matrices of a model except the one that computes its logits."""
GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""The parameters of experts: their first matrices, side by side, and their last matrix."""
ROUTER = "gate.weight"
"""peft's name of a router's matrix as a parameter."""
_PARAMETERS = (f"experts.{GATE_UP}", f"experts.{DOWN}", ROUTER)
"""Paths of parameters of the feed-forward part that are adapted although they are not modules."""
Names = tuple[str, ...]
_NUMBERED = Expression("", r".*?\.[^.]*\.(?P<number>\d+)\.")


class Targets(NamedTuple):
    """The choice of modules with low-rank matrices in an adapter's configuration."""

    modules: str | Names
    """Names, or their ends after a dot; a string is a regular expression for whole names, or `all-linear`."""
    excluded: str | Names = ()
    """Modules that are excluded, in the same notation."""
    layers: frozenset[int] | None = None
    """Numbers of the blocks that are adapted, unless a module is named in full; None for all blocks."""
    patterns: Names = ()
    """Regular expressions for the lists of blocks that `layers` counts; if empty, the first numbered list."""
    parameters: Names = ()
    """Parameters that are adapted although they are not modules, by the ends of their names."""

    @property
    def are_all(self) -> bool:
        """Return whether all linear modules are targets (`all-linear`)."""
        return isinstance(self.modules, str) and self.modules.lower() == ALL_LINEAR

    @property
    def expressions(self) -> tuple[Expression, ...]:
        """Return the targets that are regular expressions."""
        whole = (each for each in (self.modules, self.excluded) if isinstance(each, str))
        return (*(Expression(each, each, is_full=True) for each in whole), *map(_list, self.patterns))

    def names(self, name: str) -> bool:
        """Return whether the targets name a module, regardless of layers and exclusions."""
        return _named(name, self.modules)

    def take(self, name: str) -> bool:
        """Return whether a module that the targets name is in a selected block, and not excluded."""
        if _named(name, self.excluded):
            return False
        if self.layers is None or name in self.modules:
            return True
        lists = [_list(each) for each in self.patterns] or [_NUMBERED]
        found = next(filter(None, (each.match(name) for each in lists)), None)
        return found is not None and int(found["number"]) in self.layers


class Selection(NamedTuple):
    """The modules of a model that get low-rank matrices."""

    modules: Mapping[Place, Mapping[str, str]]
    """Names in the layer, with full names in the stock model, of the adapted modules of each layer."""
    parameters: frozenset[str]
    """Parameters among `GATE_UP`, `DOWN` and `ROUTER` that are adapted in each block with experts."""
    doubled: bool
    """Whether rank and alpha of `GATE_UP` are doubled, because it is two matrices side by side."""


def selected(model: Model, targets: Targets, file: object) -> Selection:
    """Return the modules that targets select; raise BadInput, naming `file` and a target, if peft would differ.

    This is the case if the target does not exist, or if the module cannot have low-rank matrices here.
    `check_expressions` must have accepted the regular expressions of the targets.
    """
    known, doubled = tuple(stock_modules(model)), False
    if model.is_traced:
        _check_no_experts(traced_of(model, HEAD).of_experts, targets, file)
    parameters = frozenset(_parameter(name, model, file) for name in targets.parameters)
    if (keys := expert_keys(model)) is not None and keys.older_names:
        targets = _resolved(targets, model, known, keys)
        targets, older = _without_experts(targets, keys, file)
        parameters, doubled = parameters | older, GATE_UP in older
    if targets.are_all:
        named = [each for each in known if each.is_linear]
    else:
        known = (*known, *_containers(known))
        _check_names(targets, known, file)
        named = [each for each in known if targets.names(each.name)]
    chosen = [each for each in named if targets.take(each.name)]
    if not chosen and not parameters:
        raise BadInput(file, "target_modules match no module that is not excluded", "name modules of the model")
    for each in chosen:
        if each.obstacle is not None:
            remedy = "name other target_modules, or exclude it by exclude_modules"
            raise BadInput(file, f"target_modules: {each.name} {each.obstacle}", remedy)
    places: dict[Place, dict[str, str]] = {}
    for each in chosen:
        places.setdefault(each.place, {})[each.module] = each.name
    return Selection(places, parameters, doubled)


def _check_no_experts(names: Names, targets: Targets, file: object) -> None:
    """Raise BadInput, naming `file`, for targets that peft may treat as parameters of experts."""
    named = (targets.modules,) if isinstance(targets.modules, str) else targets.modules
    if not names or (named == targets.modules and not any(_ends(each, names) for each in named)):
        return
    problem = f"target_modules: peft takes {', '.join(names)} for experts' parameters, which are not adapted here"
    raise BadInput(file, problem, "list other modules by name, such as q_proj")


def matched_names(model: Model) -> tuple[str, ...]:
    """Return all names that an adapter's regular expressions are matched with."""
    known, keys = tuple(stock_modules(model)), expert_keys(model)
    modules = [each.name for each in (*known, *_containers(known))]
    older = () if keys is None else keys.older_names
    experts = (f"{name}.{each}" for name in modules if name.endswith(".experts") for each in older)
    parameters = (f"{path}mlp.{each}" for path in paths_of(model).values() for each in _PARAMETERS)
    return (*modules, *experts, *parameters)


def _named(name: str, names: str | Names) -> bool:
    if isinstance(names, str):
        return Expression(names, names, is_full=True).match(name) is not None
    return _ends(name, names)


def _list(pattern: str) -> Expression:
    """Return the expression for the list of blocks that a pattern names."""
    return Expression(pattern, rf"(?:^|.*?\.){pattern}\.(?P<number>\d+)\.")


def _ends(name: str, names: Iterable[str]) -> bool:
    return any(name == each or name.endswith(f".{each}") for each in names)


def _containers(known: Sequence[StockModule]) -> Iterator[StockModule]:
    """Yield the modules that only contain other modules."""
    names = dict.fromkeys(each.name for each in known)
    held = dict.fromkeys(name[: match.start()] for name in names for match in re.finditer(r"\.", name))
    for name in (each for each in held if each not in names):
        yield StockModule("", "", name, False, "is not a Linear")


def _check_names(targets: Targets, known: Sequence[StockModule], file: object) -> None:
    """Raise BadInput for a target that matches nothing; peft skips it silently if other targets match."""
    each = (targets.modules,) if isinstance(targets.modules, str) else targets.modules
    for target in each:
        alone = targets._replace(modules=target if isinstance(targets.modules, str) else (target,))
        if not any(alone.names(module.name) for module in known):
            raise BadInput(file, f"target_modules: {target} is not a module of the model", "name modules that it has")


def _parameter(name: str, model: Model, file: object) -> str:
    """Return the experts' parameter that a target means, in all blocks with experts."""
    keys = expert_keys(model)
    known = {f"mlp.{path}": each for path, each in zip(_PARAMETERS, (GATE_UP, DOWN, ROUTER), strict=True)}
    for path, parameter in known.items() if keys is not None and keys.older_names else ():
        if _ends(path, (name,)) and _ends(name, (parameter,)):
            return parameter
    problem, remedy = "is not a parameter that gets low-rank matrices here", "leave it out, and name target_modules"
    if keys is not None and keys.older_names:
        remedy = "name experts' gate_up_proj and down_proj, or gate.weight, of all blocks"
    elif keys is not None:
        problem = f"is refused: experts and routers of {model.family} get no low-rank matrices here"
    raise BadInput(file, f"target_parameters: {name} {problem}", remedy)


def _resolved(targets: Targets, model: Model, known: Sequence[StockModule], keys: ExpertKeys) -> Targets:
    """Return targets as last parts of names, instead of a regular expression or `all-linear`.

    peft does this for models whose experts were modules in transformers 4: a module that is named in one block is meant
    in all blocks.
    """
    if not isinstance(targets.modules, str):
        return targets
    if targets.are_all:
        return targets._replace(
            modules=(*_last_parts(each.name for each in known if each.is_linear), *keys.older_names)
        )
    names = [each.name for each in (*known, *_containers(known))]
    experts = [name for name in names if name.endswith(".experts")]
    older = [last for last in keys.older_names[1:] if any(_meant(targets, f"{name}.{last}") for name in experts)]
    found = (*_last_parts(name for name in names if _meant(targets, name)), *older)
    return targets._replace(modules=found) if found else targets


def _meant(targets: Targets, name: str) -> bool:
    return targets.names(name) and targets.take(name)


def _last_parts(names: Iterable[str]) -> dict[str, None]:
    return dict.fromkeys(name.rpartition(".")[2] for name in names)


def _without_experts(targets: Targets, keys: ExpertKeys, file: object) -> tuple[Targets, frozenset[str]]:
    """Return targets without the older names of expert and router matrices, and the parameters that these names mean.

    peft then adapts experts and routers of all blocks, but no dense feed-forward part, whose matrices have the same
    names.
    """
    if isinstance(targets.modules, str):
        return targets, frozenset()
    router, gate, up, down = keys.older_names
    older = {name for name in keys.older_names if any(_ends(each, (name,)) for each in targets.modules)}
    if len(pair := {gate, up} & older) == 1:
        problem = f"target_modules: {gate} and {up} are one matrix of all experts, and only {pair.pop()} is named"
        raise BadInput(file, problem, "name both, or neither")
    meant = {router: ROUTER, gate: GATE_UP, down: DOWN}
    rest = tuple(each for each in targets.modules if not any(_ends(each, (name,)) for name in keys.older_names))
    return targets._replace(modules=rest), frozenset(meant[name] for name in older if name in meant)
