"""A model without facts, described by its stock class: no weights, and one pass of fake tensors in bfloat16.

The structure is observed, not known: the blocks are the list of modules with the configured number of layers, the one
with the most parameters if there are several. What runs before the first block is the embedding, what runs after the
last is the head.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from math import isfinite
from typing import Any, NamedTuple

import torch
import transformers
from msgspec import UNSET
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from shardwright.io import NOT_FINITE
from shardwright.models.alike import is_known
from shardwright.models.config_keys import ALIKE, NOTES, read_keys
from shardwright.models.traits import BLOCK, Config
from shardwright.types import EMBEDDING, HEAD, BoundaryTensor, Heads, LayerType, Model, Parameter, Region
from shardwright_train.models.configuration import MAX_BUILT_LAYERS, keys_of
from shardwright_train.models.operators import TRACED, Seen, Trace
from shardwright_train.models.stock import StockPlan, config_class, refusals, stock_plan
from shardwright_train.parallel.data import default_dtype
from shardwright_train.parallel.sharding_rules import Cut, Rule, cuts
from shardwright_train.torch_private import FakeTensorMode, tree_leaves

STATES = "hidden_states"
_LAYERS = "num_hidden_layers"
_TOKENS = frozenset(("bos_token_id", "eos_token_id", "pad_token_id"))
"""Keys for text generation that classes read nevertheless: the row of the padding token has no gradient."""
_MOST_MODULES = 200_000
"""Largest number of modules of a stock model: DeepSeek-V3 would have 60,000 if each expert were a module."""
_EXPERTS, _ROUTER = ".experts.", "gate"
_ATTENDS = "att"
"""Part of the names of modules that attend."""
UNDIVIDED = "undivided_blocks"
"""Name of the number 1, which a degree that splits a traced layer must divide: one rank has all of the layer."""


class Whole(NamedTuple):
    """A stock model, its blocks with their path, and the type of each."""

    model: Any
    path: str
    blocks: nn.ModuleList
    kinds: tuple[str, ...]


def is_traced(config: Config) -> bool:
    """Return whether a config.json's model type has a causal language model in transformers, but no family here."""
    kind = config.get("model_type")
    return isinstance(kind, str) and not is_known(config) and kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def describe_by_trace(config: Mapping[str, Any], name: str, sequence_length: int) -> Model:
    """Describe the model of a config.json whose type transformers has a causal language model for.

    Raises ValueError saying what cannot be built or traced.
    """
    config = {key: _number(value) for key, value in config.items()}
    with FakeTensorMode(allow_non_fake_inputs=True), _registered(Trace()) as trace:
        whole = built(config)
        _check_length(whole.model.config, sequence_length)
        with refusals("a pass of the stock model cannot be traced"):
            plan = stock_plan(stock_class(config["model_type"]), config["model_type"])
            seen = _traced(whole, trace, sequence_length, plan.rules)
    return _model(config, name, sequence_length, whole, seen, plan)


def built(config: Mapping[str, Any], *, plain: bool = False) -> Whole:
    """Return the stock model of a config.json in bfloat16, to be called with fake tensors.

    If it calls kernels by name and needs no mask, it uses the attention of a `Trace`, unless `plain`; otherwise a
    kernel of torch. Raises ValueError saying what is wrong.
    """
    kind = config["model_type"]
    stock = stock_class(kind)
    made = config_class(stock, kind)
    check_keys(config, keys_of(made))
    _check_layers(config, made)
    by_name = stock._supports_attention_backend and stock._supports_flash_attn
    parsed = configured(stock, config, TRACED if by_name and not plain else plain_kernel(stock))
    with refusals():
        model = _skeleton(stock, parsed)
    return whole_of(model)


def configured(stock: Any, config: Mapping[str, Any], kernel: str, experts: str = "grouped_mm") -> Any:
    """Return the configuration of a stock class, with the names of its attention kernel and its experts' kernel."""
    made = config_class(stock, config["model_type"])
    with refusals():
        parsed = made(**{key: _number(value) for key, value in config.items() if key not in ("model_type", "dtype")})
        parsed._attn_implementation = kernel
        if stock._can_set_experts_implementation():
            parsed._experts_implementation = experts
    return parsed


def _number(value: Any) -> Any:
    """Return a value of a config.json with its non-finite numbers, which transformers writes as objects, as floats."""
    if isinstance(value, list):
        return [_number(each) for each in value]
    if isinstance(value, dict):
        return float(value[NOT_FINITE]) if value.keys() == {NOT_FINITE} else {k: _number(x) for k, x in value.items()}
    return value


def stock_class(kind: str) -> Any:
    """Return transformers' class for causal language models of a type."""
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])


def plain_kernel(stock: Any) -> str:
    """Return the attention kernel of a stock class that needs no further package."""
    return "sdpa" if stock._supports_sdpa else "eager"


def whole_of(model: Any) -> Whole:
    """Return a stock model with its blocks; raise ValueError if it has none."""
    text = model.config.get_text_config(decoder=True)
    if not isinstance(number := getattr(text, _LAYERS, None), int):
        raise ValueError("its configuration does not say how many layers it has")
    path = _path_of_blocks(model, number)
    blocks = model.get_submodule(path)
    return Whole(model, path, blocks, _kinds(blocks, getattr(text, "layer_types", None)))


def calling(forward: Callable[..., Any], tokens: Tensor) -> dict[str, Any]:
    """Return the arguments of a stock forward pass in training."""
    taken = inspect.signature(forward).parameters
    return {"input_ids": tokens} | ({"use_cache": False} if {"use_cache", "kwargs"} & taken.keys() else {})


def _skeleton(stock: Any, config: Any) -> Any:
    """Return a stock model in bfloat16 without values, in training mode, with dropout."""
    with default_dtype(torch.bfloat16), no_init_weights(), _bounded():
        model = stock(config).train()
        model.tie_weights()  # not done for a model without initial values
        return model


@contextmanager
def _bounded() -> Iterator[None]:
    """Raise ValueError if a model being built has more modules than any published one."""
    registered = 0

    def count(*_: object) -> None:
        nonlocal registered
        registered += 1
        if registered > _MOST_MODULES:
            raise ValueError(f"its class has over {_MOST_MODULES} modules")

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _check_layers(config: Mapping[str, Any], config_class: Any) -> None:
    """Raise ValueError before a class lists the types of more layers than are built."""
    key = config_class.attribute_map.get(_LAYERS, _LAYERS)
    if isinstance(number := config.get(key), int) and not 1 <= number <= MAX_BUILT_LAYERS:
        raise ValueError(f"{key} {number} is not from 1 to {MAX_BUILT_LAYERS}")


def check_keys(config: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raise ValueError for a key that looks like a misspelled one; other unknown keys have no effect."""
    declared = known | NOTES | read_keys().others
    for key in sorted(config.keys() - declared):
        if meant := get_close_matches(key, known, n=1, cutoff=ALIKE):
            raise ValueError(f"unknown key {key!r}: did you mean {meant[0]!r}?")


def _path_of_blocks(model: nn.Module, number: int) -> str:
    """Return the path of the list of blocks; lists inside another list do not count."""
    lists: dict[str, nn.ModuleList] = {
        path: each for path, each in model.named_modules() if isinstance(each, nn.ModuleList)
    }
    outer = (path for path in lists if not any(path.startswith(f"{other}.") for other in lists))
    sizes = {path: sum(p.numel() for p in lists[path].parameters()) for path in outer if len(lists[path]) == number}
    if not sizes:
        raise ValueError(f"its class has no list of {number} blocks")
    return max(sizes, key=lambda path: sizes[path])


def _kinds(blocks: nn.ModuleList, listed: list[str] | None) -> tuple[str, ...]:
    """Return the type of each block: equal class, parameters, settings and entry in layer_types mean equal type."""
    typed = listed if listed is not None and len(listed) == len(blocks) else [BLOCK] * len(blocks)
    alike = [
        (str(word), type(block), tuple((name, p.shape) for name, p in block.named_parameters()), _settings(block))
        for word, block in zip(typed, blocks, strict=True)
    ]
    if len(set(alike)) == 1:
        return (BLOCK,) * len(blocks)
    names: dict[Any, str] = {}
    for each in alike:
        if each not in names:
            same = sum(word == each[0] for word, *_ in names)
            names[each] = f"{each[0]}_{same + 1}" if same else each[0]
    return tuple(names[each] for each in alike)


def _settings(block: nn.Module) -> tuple[Any, ...]:
    """Return the settings in which blocks of one class may differ, such as Gemma 3n's blocks that pass on their keys.

    Integers are left out: one of them is the block's index.
    """
    return tuple(
        (path, key, value)
        for path, module in block.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, bool | float | str)
    )


def _check_length(config: Any, sequence_length: int) -> None:
    longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if isinstance(longest, int) and 0 < longest < sequence_length:
        raise ValueError(f"sequence length {sequence_length} is over {longest} positions (max_position_embeddings)")


@contextmanager
def _registered(trace: Trace) -> Iterator[Trace]:
    """Make the trace's attention known to transformers, which then builds no masks."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS[TRACED] = trace.attention
    ALL_MASK_ATTENTION_FUNCTIONS[TRACED] = lambda *_, **__: None
    try:
        yield trace
    finally:
        del ALL_ATTENTION_FUNCTIONS[TRACED], ALL_MASK_ATTENTION_FUNCTIONS[TRACED]


class _Pass(NamedTuple):
    """The record of a pass by layer type, and the paths of modules that ran before and after the blocks."""

    seen: Mapping[str, Seen]
    states: Tensor
    logits: int
    """Number of elements of a sample's logits."""
    early: frozenset[str]
    late: frozenset[str]


def _traced(whole: Whole, trace: Trace, length: int, rules: Mapping[str, Rule]) -> _Pass:
    """Call the stock model with one sample; the first block of each type runs, the others return the same output."""
    given: dict[str, Any] = {}
    early, late, states = set[str](), set[str](), list[Tensor]()
    last = len(whole.blocks) - 1

    def around(block: nn.Module, index: int) -> None:
        kind, forward = whole.kinds[index], block.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            if not states:
                states.append(at_place(args, kwargs, states_place(args, kwargs)))
            if kind not in given:
                divided = [block.get_parameter(cut.name) for cut in cuts(block, rules) if cut.tp_dim is not None]
                with trace.of(kind, block, (args, kwargs), divided):
                    given[kind] = forward(*args, **kwargs)
            if index == last:
                trace.begin(HEAD, whole.model)
            return given[kind]

        block.forward = run

    def noted(path: str) -> Any:
        return lambda *_: (late if trace.name == HEAD else early).add(path)

    for index, block in enumerate(whole.blocks):
        around(block, index)
    for path, module in whole.model.named_modules():
        if next(module.parameters(recurse=False), None) is not None and not path.startswith(f"{whole.path}."):
            module.register_forward_hook(noted(path))
    if (head := whole.model.get_output_embeddings()) is not None:
        trace.keep_nothing_of(head)  # the gradient of its input overwrites the input
    ids = torch.zeros((1, length), dtype=torch.long)
    trace.begin(EMBEDDING, whole.model)
    with trace.watching():
        logits: Tensor = whole.model(**calling(whole.model.forward, ids)).logits
    if missing := [kind for kind in whole.kinds if kind not in given]:
        raise ValueError(f"blocks of type {missing[0]} do not run on text alone")
    return _Pass(trace.seen, states[0], logits.numel(), frozenset(early), frozenset(late))


def at_place(args: Any, kwargs: Any, place: int | str) -> Tensor:
    """Return the argument with an index or a name: a block's hidden states."""
    return args[place] if isinstance(place, int) else kwargs[place]  # type: ignore[no-any-return]


def states_place(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | str:
    """Return the index or name of a block's argument with the hidden states, among those with a gradient.

    It is the first positional argument or the one named `hidden_states`, if any of these has one, or else the first.
    Raises ValueError if there is none.
    """
    reached: list[int | str] = [
        place
        for place, x in list[tuple[int | str, Any]]([*enumerate(args), *kwargs.items()])
        if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad
    ]
    if not reached:
        raise ValueError("its blocks take no hidden states")
    return next((place for place in reached if place in (0, STATES)), reached[0])


def _model(config: Mapping[str, Any], name: str, length: int, whole: Whole, found: _Pass, plan: StockPlan) -> Model:
    outputs = (BoundaryTensor(name=STATES, sequence_length=length, features=found.states.numel() // length),)
    embedding, head = _ends(whole, found)
    first = {kind: whole.blocks[whole.kinds.index(kind)] for kind in dict.fromkeys(whole.kinds)}
    blocks = {kind: _block_type(block, found.seen[kind], outputs, whole, plan) for kind, block in first.items()}
    # Blocks that differ in nothing that was seen, such as in windows that hold a whole sample, have one type.
    alike = {kind: next(other for other in blocks if blocks[other] == blocks[kind]) for kind in blocks}
    names = {kind: BLOCK if len(set(alike.values())) == 1 else alike[kind] for kind in blocks}
    types = {
        EMBEDDING: _layer_type(_described(embedding), found.seen[EMBEDDING], outputs, UNSET),
        **{names[kind]: blocks[alike[kind]] for kind in blocks},
        HEAD: _head_type(_described(head), found, length, whole, config["model_type"]),
    }
    pairs = tuple((one, other) for other, p in head.items() for one, q in embedding.items() if p is q)
    noted = NOTES - _TOKENS
    kept = {key: value for key, value in config.items() if key not in noted and not _is_default(config, key)}
    return Model(
        name=name,
        family=config["model_type"],
        config=kept,
        sequence_length=length,
        layers=tuple(names[kind] for kind in whole.kinds),
        types=types,
        tied=pairs,
    )


def _is_default(config: Mapping[str, Any], key: str) -> bool:
    """Return whether a key has the same non-finite number as its class's default, so that it can be left out.

    Raises ValueError for another one.
    """
    if all(not isinstance(x, float) or isfinite(x) for x in tree_leaves(config[key])):
        return False
    default = getattr(config_class(stock_class(config["model_type"]), config["model_type"])(), key, None)
    if tree_leaves(default) != tree_leaves(config[key]):
        raise ValueError(f"{key} {config[key]} is not finite")
    return True


def ends_of(whole: Whole, early: Collection[str], late: Collection[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the paths of modules outside of blocks with parameters: first the embedding's, then the head's.

    Modules belong to the end in which they ran; if they did not run, to the one in which they are registered.
    """
    embedding, head, behind = set[str](), set[str](), False
    for name, _ in whole.model.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        if name.startswith(f"{whole.path}."):
            behind = True
            continue
        (head if owner not in early and (behind or owner in late) else embedding).add(owner)
    return frozenset(embedding), frozenset(head - embedding)


def _ends(whole: Whole, found: _Pass) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Return the parameters of embedding and head, each once, by the first of its names there."""
    ends = tuple(dict[str, nn.Parameter]() for _ in range(2))
    for owners, parameters in zip(ends_of(whole, found.early, found.late), ends, strict=True):
        names: dict[int, str] = {}
        for name, parameter in whole.model.named_parameters(remove_duplicate=False):
            if name.rpartition(".")[0] in owners and not name.startswith(f"{whole.path}."):
                names.setdefault(id(parameter), name)
        parameters |= {name: whole.model.get_parameter(name) for name in names.values()}
    return ends[0], ends[1]


def _described(parameters: Mapping[str, nn.Parameter]) -> tuple[Parameter, ...]:
    return tuple(
        Parameter(name=name, shape=tuple(p.shape), frozen=UNSET if p.requires_grad else True)
        for name, p in parameters.items()
    )


def _parameters(block: nn.Module, found: Sequence[Cut]) -> tuple[Parameter, ...]:
    """Return the parameters of a block, as tensor parallelism shards them, and the buffers that files have."""
    files, buffers = block.state_dict(), dict(block.named_buffers())
    kept = [
        Parameter(name=name, shape=tuple(b.shape), buffer=True, frozen=True)
        for name, b in buffers.items()
        if name in files and b.dim()
    ]
    return (*(cut.parameter for cut in found), *kept)


def _block_type(
    block: nn.Module, seen: Seen, outputs: tuple[BoundaryTensor, ...], whole: Whole, plan: StockPlan
) -> LayerType:
    """Return the type of a block, which ranks split as the plan of its class says."""
    found, leaving = tuple(cuts(block, plan.rules)), plan.leaving(block)
    counted = replace(seen.counted(outputs[0].features), path=whole.path, **_linear(block))
    made = _layer_type(_parameters(block, found), seen, outputs, counted)
    divided = {cut.name: cut.shape[cut.tp_dim] for cut in found if cut.tp_dim is not None}
    if not divided:
        return made
    attention, regions = next((region.attention for region in made.regions), None), list[Region]()
    for path in leaving:
        attends = attention is not None and not regions and _ATTENDS in path
        named: Any = {"name": "attention", "attention": attention} if attends else {"name": "mlp"}
        regions.append(Region(enters=(STATES,), leaves=STATES, **named))
    if attention is not None and (not regions or regions[0].attention is None):
        regions.insert(0, made.regions[0])
    first = {length: name for name, length in reversed(divided.items())}
    heads = _heads(whole.model.config) if any(_ATTENDS in name for name in divided) else {}
    return replace(
        made, tp_must_divide={name: length for length, name in first.items()} | heads, regions=tuple(regions)
    )


def _heads(config: Any) -> dict[str, int]:
    """Return every number of heads of a configuration, by key: a degree must divide them, so that no head is cut."""
    of_text = config.get_text_config(decoder=True).to_dict().items()
    return {key: value for key, value in of_text if key.endswith("heads") and type(value) is int and value > 0}


def _layer_type(
    parameters: tuple[Parameter, ...], seen: Seen, outputs: tuple[BoundaryTensor, ...], traced: Any
) -> LayerType:
    heads = seen.heads
    attention = (
        () if heads is None else (Region(name="attention", attention=Heads(queries=STATES, keys=STATES, **heads)),)
    )
    one_rank = {UNDIVIDED: 1}
    return LayerType(
        parameters=parameters,
        forward_flops_per_sample=seen.product_flops + seen.attention_flops,
        tp_must_divide=one_rank,
        ulysses_must_divide=one_rank,
        sequence_must_divide=one_rank,
        outputs=outputs,
        regions=attention,
        traced=traced,
    )


def _head_type(parameters: tuple[Parameter, ...], found: _Pass, length: int, whole: Whole, kind: str) -> LayerType:
    seen, of_ends = found.seen[HEAD], _linear(whole.model, besides=f"{whole.path}.")
    of_ends |= {"of_experts": _of_experts(kind)}
    made = _layer_type(parameters, seen, (), replace(seen.counted(), widest=found.logits, **of_ends))
    return replace(made, labels=length)


def _of_experts(kind: str) -> tuple[str, ...]:
    """Return the names of modules of older files whose matrices are experts' parameters now, and of their router."""
    conversions = get_checkpoint_conversion_mapping(kind)  # type: ignore[no-untyped-call]
    patterns = [
        pattern
        for conversion in conversions or ()
        for pattern in conversion.source_patterns
        if isinstance(conversion, WeightConverter) and _EXPERTS in pattern
    ]
    names = dict.fromkeys(pattern.removesuffix(".weight").rpartition(".")[2] for pattern in patterns)
    return (_ROUTER, *names) if names else ()


def _linear(module: nn.Module, besides: str | None = None) -> dict[str, tuple[str, ...]]:
    """Return the paths of Linear modules, and of modules that peft treats like them, by `Traced`'s names of both."""
    found = [
        (type(each) is nn.Linear, path)
        for path, each in module.named_modules()
        if isinstance(each, nn.Linear | Conv1D) and not (besides is not None and path.startswith(besides))
    ]
    return {
        "linear": tuple(path for is_plain, path in found if is_plain),
        "like_linear": tuple(path for is_plain, path in found if not is_plain),
    }
