"""Models without facts, trained as the stock class: each layer is the stock forward pass with other layers bypassed.

The embedding is the stock forward pass up to its first block, the head is all of it after the last block. The other
arguments of blocks than hidden states (masks, positions, angles) come from a pass through which no states flow. No part
of a forward pass is rewritten, so that a model whose blocks `flow` finds to run one by one computes what the stock
class computes.
"""

import copy
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple, NoReturn

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers.initialization import TORCH_INIT_FUNCTIONS, no_init_weights

from shardwright.io import BadInput
from shardwright.models import traits
from shardwright.models.facts import Family as Facts
from shardwright.models.traits import AttentionFacts, Keys, Mask, StockModel
from shardwright.types import EMBEDDING, HEAD, LOW_RANK, Attention, Model, Plan, Recompute, Strategy, base_type
from shardwright_train.data.objectives import Causal
from shardwright_train.data.share import Batch
from shardwright_train.models.base import Family
from shardwright_train.models.flow import Flow, Shape, flow_of, flow_of_config
from shardwright_train.models.initial_weights import Filling, Given, low_rank_fillings, with_low_rank
from shardwright_train.models.masks import Places
from shardwright_train.models.stock import (
    States,
    StockPlan,
    UnknownFilling,
    refusals,
    stock_fillings,
    stock_plan,
    with_memory,
)
from shardwright_train.models.traced import Whole, at_place, calling, configured, plain_kernel, stock_class, whole_of
from shardwright_train.parallel.data import default_dtype
from shardwright_train.parallel.rng import seed_of
from shardwright_train.parallel.sharding_rules import Parts, Rule, cuts
from shardwright_train.parallel.vocab import loss_of_logits
from shardwright_train.torch_private import FakeTensor, TorchDispatchMode

_WHOLE = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
"""Kinds of recomputation that do not name a part of a block."""
_HUGE = 1 << 28
"""Number of elements that no constant of a model exceeds."""
_SMALL = 1 << 16
"""Largest number of elements of parameters whose values from the constructor are kept, for classes that do not
initialize them otherwise."""


class _Unmarked(Causal):
    """Causal language modelling without separate documents, which the stock class does not mask."""

    keeps_boundaries = False


class AsStock(Family):
    """The model types that transformers has and no facts describe."""

    parts: Mapping[str, Parts] = {}
    embedding = head = ()
    objective = _Unmarked

    @cached_property
    def rules(self) -> dict[str, Rule]:
        """The sharding rules of transformers' tensor-parallel plan for the class."""
        return self._plan.rules

    @property
    def plan_problem(self) -> str | None:
        """The reason why ranks cannot split blocks, whatever their sizes; None: they can."""
        return self._plan.problem

    @property
    def _plan(self) -> StockPlan:
        return stock_plan(self.stock, self.facts.model_type)

    def problem(self, model: Model) -> str | None:
        """Return the reason why a described model cannot be trained; None if it can."""
        try:
            config = self.stock_model(model).config.get_text_config(decoder=True)
            if getattr(config, "is_decoder", True) is False:
                return "is_decoder is false: its positions see the tokens that they predict"
            if getattr(config, "output_router_logits", False):
                return "output_router_logits adds a loss of its routers, which is not computed here"
            flow_of(model)
            first = [f"layers[{model.layers.index(kind)}]" for kind in dict.fromkeys(model.layers)]
            for layer in (EMBEDDING, *first, HEAD):
                self._check_names(model, layer)
        except ValueError as error:
            return str(error)
        return None

    def _check_names(self, model: Model, layer: str) -> None:
        built = {cut.name: cut.shape for cut in cuts(self._stock_layer(model, layer), self.rules)}
        told = {p.name: p.shape for p in model.type_of(layer).parameters if LOW_RANK not in p.name}
        if scalars := [p.name for p in model.type_of(layer).parameters if not p.shape and p.trained]:
            raise ValueError(f"{scalars[0]} of its {layer} is a single number, which ZeRO cannot cut")
        if built != told:
            odd = min({*built.items()} ^ {*told.items()})[0]
            raise ValueError(f"{odd} cannot be told to be of its {layer}")

    def check(self, plan: Plan, file: object) -> None:
        """Raise BadInput for parts of a plan that models without facts do not support."""
        for number, layer in enumerate(plan.layers):
            if layer.recompute not in _WHOLE:
                problem = f"layers[{number}] recomputes {layer.recompute}: the parts of a traced block are not known"
                raise BadInput(file, problem, "recompute none, selective or full")
        if plan.attention not in (kernels := (Attention.AUTO, *self.facts.kernels)):
            problem = f"attention {plan.attention} is not known of a {plan.model.family} model"
            raise BadInput(file, problem, f"use one of: {', '.join(kernels)}")
        if plan.compile:
            raise BadInput(file, "compile: blocks of traced models are not compiled", "leave it out")
        if plan.fused:
            raise BadInput(file, "fused: traced models keep their own modules", "leave it out")
        if (reason := self.problem(plan.model)) is not None:
            remedy = f"`shardwright train describe --as` a like family, or plan it for another system: {_PAGE}"
            raise BadInput(file, f"{plan.model.family!r} cannot be trained as its stock class: {reason}", remedy)

    # The stock model and its layers.

    def configured(self, config: Mapping[str, Any]) -> Any:
        """Return the transformers configuration of a config.json."""
        return configured(self.stock, {**config, "model_type": self.facts.model_type}, self.plain_kernel)

    def configuration(self, model: Model) -> Any:
        """Return the transformers configuration of a described model, with its original number of layers."""
        return self.configured(model.config)

    def dropout(self, config: Any) -> float:
        """Return the highest rate of dropout or random jitter."""
        rates = config.get_text_config(decoder=True).to_dict().items()
        drawn = [value for key, value in rates if ("drop" in key or "jitter" in key) and isinstance(value, float)]
        return max(drawn, default=0.0)

    def stock_model(self, model: Model, attention: str | None = None) -> Any:
        """Return the whole stock model, without weights, but with the constants that its modules hold."""
        return self._skeleton(model, attention).whole.model

    def _skeleton(self, model: Model, attention: str | None = None) -> "_Skeleton":
        config, kernel = msgspec.json.encode(model.config), attention or self.plain_kernel
        return _skeleton(self, config, model.family, kernel, torch.get_default_dtype())

    def _stock_layer(self, model: Model, layer: str, attention: str | None = None) -> nn.Module:
        whole, flow = self._skeleton(model, attention).whole, flow_of(model)
        if layer == EMBEDDING:
            return _embedding(whole, flow)
        if layer == HEAD:
            return _head(whole, flow)
        block: nn.Module = copy.deepcopy(whole.blocks[self._number(model, layer, whole)])
        return block

    def _number(self, model: Model, layer: str, whole: Whole) -> int:
        """Return the index of a layer's stock block; in a model cut to fewer layers, the first block of its type."""
        number = int(layer.removeprefix("layers[").removesuffix("]"))
        if len(model.layers) == len(whole.blocks):
            return number
        kind = base_type(model.layers[number])
        return whole.kinds.index(kind) if kind in whole.kinds else 0

    def build(self, model: Model, layer: str, attention: str | None = None) -> nn.Module:
        """Return the stock modules of a layer, on the meta device except for constants."""
        return self._layer(model, layer, attention)

    def parts_of(self, kind: str, strategy: Strategy) -> Parts | None:
        """Return a block as a single part."""
        return None if kind in (EMBEDDING, HEAD) else Parts("", attention=(), mlp=())

    def after_split(self, block: nn.Module, config: Any, tensor_parallel: Any) -> None:
        """Make the modules of a block compute with their shards, as the tensor-parallel plan of the class says."""
        self._plan.divide(block, tensor_parallel)

    def keeps_last_sum(self, kind: str, config: Any, compute: str) -> bool:
        """Return True: whether a block saves values after its last matrix product is not known."""
        return True

    # Names.

    def full_name(self, model: Model, layer: str, parameter: str) -> str:
        """Return a parameter's name in the stock model."""
        if layer in (EMBEDDING, HEAD):
            return parameter
        return f"{flow_of(model).path}.{layer.removeprefix('layers[').removesuffix(']')}.{parameter}"

    def hugging_face_name(self, model: Model, layer: str, parameter: str) -> str:
        """Return a parameter's name in the stock model: blocks share no parameters."""
        return self.full_name(model, layer, parameter)

    def described_name(self, kind: str, parameter: str) -> str:
        """Return the name unchanged: the description has the names of the stock model."""
        return parameter

    def _stock_name(self, model: Model, layer: str, parameter: str) -> str:
        """Return a parameter's name in the configuration's stock model, which may have more layers."""
        if layer in (EMBEDDING, HEAD):
            return parameter
        whole = self._skeleton(model).whole
        return f"{whole.path}.{self._number(model, layer, whole)}.{parameter}"

    # Weights.

    def fillings(self, model: Model, layer: str) -> Mapping[str, tuple[Filling, ...]]:
        """Return how transformers fills a layer's parameters: from distributions, or with values computed in full."""
        module = self._stock_layer(model, layer)
        constants = {name: p.detach().clone() for name, p in module.named_parameters() if not p.is_meta}
        try:
            drawn = stock_fillings(module, lambda: self._construct_and_initialize(model, layer, module))
        except UnknownFilling:
            drawn = self._drawn_whole(model, layer, constants.keys())
        given = {name: (Filling(Given(values)),) for name, values in constants.items()}
        return {**drawn, **given, **low_rank_fillings(with_low_rank(module, model, layer), model)}

    def _drawn_whole(self, model: Model, layer: str, others: Collection[str]) -> dict[str, tuple[Filling, ...]]:
        module = with_memory(self._stock_layer(model, layer), torch.device("cpu"))
        for parameter in module.parameters():
            if parameter.is_floating_point():
                nn.init.constant_(parameter, float("nan"))
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed_of(0, "weights", layer))
            self._construct_and_initialize(model, layer, module)
        values = {name: p.detach() for name, p in module.named_parameters() if name not in others}
        constructed = self._skeleton(model).constructed
        for name in filter(lambda name: _has_nan(values[name]), values):
            value = constructed.get(self._stock_name(model, layer, name))
            if value is None or _has_nan(value):
                problem = f"{name} of its {layer} has no initial values"
                raise BadInput(f"{model.family} model", problem, "pass --weights")
            values[name] = value
        return {name: (Filling(Given(x)),) for name, x in values.items()}

    def _construct_and_initialize(self, model: Model, layer: str, module: nn.Module) -> None:
        """Fill the parameters of a layer as their constructors do, and then by transformers' initialization."""
        skeleton = self._skeleton(model)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                stock = self._stock_name(model, layer, name)
                made = skeleton.constructed.get(stock)
                if made is not None and made.numel() and bool((made == made.flatten()[0]).all()):
                    nn.init.constant_(parameter, made.flatten()[0].item())
                if (fill := skeleton.fills.get(stock)) is not None:
                    fill(parameter)
        self.initialize(model, module)

    # Calls.

    def learns(self, model: Model) -> Causal:
        """Return the objective: next-token prediction."""
        text = self.configuration(model).get_text_config(decoder=True)
        return _Unmarked(text.vocab_size, model.sequence_length)

    def constants(
        self, model: Model, kind: str, places: Places, example: Tensor, kernel: str, *_: Any
    ) -> dict[str, Any]:
        """Return the arguments of blocks other than hidden states."""
        config = msgspec.json.encode(model.config)
        arguments = _arguments(
            self, config, model.family, model.sequence_length, kernel, example.dtype, f"{example.device}"
        )
        return {"arguments": arguments, "model": model}

    def call(self, block: nn.Module, states: States, batch: Batch, constants: dict[str, Any]) -> States:
        """Call a block as the stock forward pass does."""
        arguments: Arguments = constants["arguments"]
        number = self._number(constants["model"], constants["layer"], arguments.whole)
        args, kwargs = arguments.of(number, batch["tokens"])
        flow = arguments.flow
        given = flow.given(states[0])
        if isinstance(flow.place, int):
            args = (*args[: flow.place], given, *args[flow.place + 1 :])
        else:
            kwargs = {**kwargs, flow.place: given}
        output = block(*args, **kwargs)
        made: Tensor = output if flow.outputs is None else output[flow.output]
        return (flow.handed_on(made, states[0].shape[1]),)


@cache
def as_stock(kind: str) -> AsStock:
    """Return the runtime of a model type of transformers."""
    # transformers prints many warnings about defaults of classes, which a configuration replaces.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    stock = stock_class(kind)
    others = tuple(each for each in Attention if each.value not in ("auto", "eager", plain_kernel(stock)))
    return AsStock(_facts(kind, stock.__name__, others), stock)


def _facts(kind: str, name: str, without: Sequence[Attention]) -> Facts:
    """Return minimal facts of a model type: attention is causal; nothing else is known."""
    return Facts(
        model_type=kind,
        stock=StockModel(name, tied=()),
        runtime="as_stock:AsStock",
        keys=Keys({}, ()),
        parameters=lambda *_: iter(()),
        stacks=(),
        divided=traits.Divided(()),
        attention=AttentionFacts(Mask.CAUSAL, "rope", without=tuple(without)),
        norm=traits.Norm("RMSNorm", None, ends=()),
        feed_forward=lambda _: traits.FeedForward("", gated=False),
        dropouts=traits.Dropouts("", None),
    )


def _has_nan(values: Tensor) -> bool:
    return values.is_floating_point() and bool(values.isnan().any())


class _Skeleton(NamedTuple):
    """A stock model with parameters on the meta device, and the values that constructors assign."""

    whole: Whole
    constructed: Mapping[str, Tensor]
    """Values with which small parameters are made; NaN for elements that were not filled."""
    fills: Mapping[str, Callable[[Tensor], object]]
    """How constructors fill parameters that they have made, by `torch.nn.init`."""


@lru_cache(maxsize=4)
def _skeleton(family: AsStock, config: bytes, kind: str, kernel: str, dtype: torch.dtype) -> _Skeleton:
    # Grouped matrix products do not support float64.
    experts = "eager" if dtype is torch.float64 else "grouped_mm"
    parsed = configured(family.stock, {**msgspec.json.decode(config), "model_type": kind}, kernel, experts)
    values, fills = dict[int, Tensor](), dict[int, _Fill]()
    # Layers are built on the meta device, constants are not.
    with default_dtype(dtype), refusals(), torch.device("cpu"), no_init_weights(), _fills_noted(fills):
        with _parameters_on_meta(values), _Allocations():  # type: ignore[no-untyped-call]
            model = family.stock(parsed).train()
            model.tie_weights()
    whole = whole_of(model)
    for block in whole.blocks:
        files = block.state_dict().keys()
        for path, buffer in list(block.named_buffers()):
            if path in files and buffer.dim():
                owner, _, name = path.rpartition(".")
                delattr(block.get_submodule(owner), name)
                setattr(block.get_submodule(owner), name, nn.Parameter(buffer, requires_grad=False))
    named = dict(model.named_parameters())
    return _Skeleton(
        whole,
        {name: values[id(p)] for name, p in named.items() if id(p) in values},
        {name: fills[id(p)].fill for name, p in named.items() if id(p) in fills},
    )


class _Fill(NamedTuple):
    """How a constructor fills a parameter on the meta device."""

    parameter: Tensor
    """Kept, so that no other one has its id."""
    fill: Callable[[Tensor], object]


@contextmanager
def _parameters_on_meta(values: dict[int, Tensor]) -> Iterator[None]:
    """Move parameters of modules built inside to the meta device; store the values of small ones in `values`, by id."""

    def moved(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        # A plan has one format for all parameters, whatever a class has for some.
        dtype = torch.get_default_dtype() if parameter.is_floating_point() else parameter.dtype
        there = nn.Parameter(parameter.to("meta", dtype), parameter.requires_grad)
        if parameter.numel() <= _SMALL:
            values[id(there)] = parameter.detach().clone()
        return there

    hook = register_module_parameter_registration_hook(moved)  # type: ignore[arg-type]  # it may return another one
    try:
        yield
    finally:
        hook.remove()


class _Allocations(TorchDispatchMode):
    """A mode that does not allocate tensors as large as the matrices of all experts.

    Memory that is not filled is set to NaN: old contents would look like values.
    """

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator, on the meta device if it would allocate so large a tensor."""
        kwargs = kwargs or {}
        if operator.name().startswith("aten::empty.") and prod(args[0]) > _HUGE:
            kwargs = {**kwargs, "device": "meta"}
        made = operator(*args, **kwargs)
        if operator.name().startswith("aten::empty") and made.is_floating_point() and not made.is_meta:
            made.fill_(float("nan"))
        return made


@contextmanager
def _fills_noted(fills: dict[int, _Fill]) -> Iterator[None]:
    """Record how constructors fill parameters on the meta device; other small tensors are filled reproducibly."""

    def noted(fill: Callable[..., Any]) -> Callable[..., Any]:
        def filled(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if tensor.is_meta:
                fills[id(tensor)] = _Fill(tensor, lambda x: fill(x, *args, **kwargs))
            elif tensor.numel() <= _SMALL:
                fill(tensor, *args, **kwargs)
            return tensor

        return filled

    before = {name: getattr(nn.init, name) for name in TORCH_INIT_FUNCTIONS}
    functions: Mapping[str, Any] = TORCH_INIT_FUNCTIONS
    for name, fill in functions.items():
        setattr(nn.init, name, noted(fill))
    try:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            yield
    finally:
        for name, fill in before.items():
            setattr(nn.init, name, fill)


# Stand-ins, with which a stock forward pass runs only some of its modules.


class _Left(BaseException):
    """Raised to leave a stock forward pass early; a BaseException, so that no `except Exception` catches it."""

    def __init__(self, given: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        super().__init__()
        self.given = given


class _Now:
    """The number of samples and the dtype of the current pass, which stand-ins read."""

    samples = 0
    dtype = torch.float32
    device = torch.device("cpu")


class _StandIn(nn.Module):
    """A stand-in for a module: it has the module's attributes, and computes something else.

    With a `dtype` it has a weight of a single number, because stock forward passes read the format of weights.
    """

    def __init__(self, other: nn.Module, compute: Callable[..., Any], dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.other: tuple[nn.Module, ...] = ()
        if dtype is not None:
            self.register_buffer("weight", torch.zeros(1, dtype=dtype, device="cpu"), persistent=False)
        # In a tuple, so that it is no part of this module.
        self.other, self.compute = (other,), compute

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module that is replaced."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if not (other := self.__dict__.get("other")):
                raise
            return getattr(other[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the replacement's output."""
        return self.compute(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_StandIn":
        return self


def _stands_in(whole: Whole, stand_ins: Mapping[str, nn.Module], blocks: Callable[[int], Callable[..., Any]]) -> Any:
    """Return a copy of a stock model with stand-ins for some modules, by path, and for all blocks, by index."""
    memo: dict[int, nn.Module] = {
        id(block): _StandIn(block, blocks(number)) for number, block in enumerate(whole.blocks)
    }
    memo |= {id(whole.model.get_submodule(path)): stand_in for path, stand_in in stand_ins.items()}
    return copy.deepcopy(whole.model, memo)


def _absent(path: str) -> Callable[..., NoReturn]:
    def compute(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"{path} belongs to another layer")

    return compute


def _leave(*args: Any, **kwargs: Any) -> NoReturn:
    raise _Left((args, kwargs))


def _outputs(flow: Flow, states: Tensor, now: _Now) -> Any:
    """Return a block's outputs in the stock model's form, with these hidden states and otherwise zeros."""
    if flow.outputs is None:
        return states
    further = (None if shape is None else shape.zeros(now.samples, now.dtype, now.device) for shape in flow.outputs)
    return tuple(states if i == flow.output else x for i, x in enumerate(further))


def _zeros_of(whole: Whole, flow: Flow, now: _Now, dtype: torch.dtype) -> dict[str, nn.Module]:
    """Return stand-ins for the embedding's modules, which return zeros."""

    def compute(shape: Shape) -> Callable[..., Tensor]:
        return lambda *_, **__: shape.zeros(now.samples, now.dtype, now.device)

    module = whole.model.get_submodule
    ran: dict[str, nn.Module] = {
        path: _StandIn(module(path), compute(shape), dtype) for path, shape in flow.early.items()
    }
    others = {path: _StandIn(module(path), _absent(path), dtype) for path in flow.embedding - ran.keys()}
    return ran | others


def _embedding(whole: Whole, flow: Flow) -> nn.Module:
    """Return the stock model up to its first block."""
    behind = {path: _StandIn(whole.model.get_submodule(path), _absent(path)) for path in flow.head}
    model = _stands_in(whole, behind, lambda _: _leave)
    stock = model.forward

    def embed(batch: Batch) -> States:
        tokens = batch["tokens"]
        try:
            stock(**calling(stock, tokens))
        except _Left as left:
            args, kwargs = left.given
            return (flow.handed_on(at_place(args, kwargs, flow.place), tokens.shape[1]),)
        raise RuntimeError("the stock model has called no block")

    model.forward = embed
    return model  # type: ignore[no-any-return]


def _head(whole: Whole, flow: Flow) -> nn.Module:
    """Return the stock model after its last block, with the sum of the cross entropy of a batch."""
    now, last, given = _Now(), len(whole.blocks) - 1, list[Tensor]()

    def block(number: int) -> Callable[..., Any]:
        def compute(*args: Any, **kwargs: Any) -> Any:
            return _outputs(flow, given.pop() if number == last else at_place(args, kwargs, flow.place), now)

        return compute

    model = _stands_in(whole, _zeros_of(whole, flow, now, torch.get_default_dtype()), block)
    stock = model.forward

    def loss(states: States, batch: Batch) -> Tensor:
        now.samples, now.dtype, now.device = len(states[0]), states[0].dtype, states[0].device
        given[:] = [flow.given(states[0])]
        logits = stock(**calling(stock, batch["tokens"])).logits
        # The gradient overwrites the logits, which operations of the stock model on them may have saved.
        return loss_of_logits(logits.clone(), batch["labels"], logits.shape[-1], model.tensor_parallel)

    model.forward = loss
    return model  # type: ignore[no-any-return]


class Arguments:
    """The arguments of a stock model's blocks other than hidden states, for a number of samples."""

    def __init__(self, whole: Whole, flow: Flow, dtype: torch.dtype, device: torch.device) -> None:
        self.whole, self.flow, self._now = whole, flow, _Now()
        self._now.dtype, self._now.device = dtype, device
        self._kept: tuple[object, list[tuple[tuple[Any, ...], dict[str, Any]]]] = None, []
        self._taken: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        last = len(whole.blocks) - 1

        def block(number: int) -> Callable[..., Any]:
            def compute(*args: Any, **kwargs: Any) -> Any:
                self._taken.append((args, kwargs))
                if number == last:
                    raise _Left((args, kwargs))
                return _outputs(flow, at_place(args, kwargs, flow.place), self._now)

            return compute

        behind = {path: _StandIn(whole.model.get_submodule(path), _absent(path)) for path in flow.head}
        # In evaluation mode: dropout in this pass would use random numbers that a block should draw.
        self._model = _stands_in(whole, behind | _zeros_of(whole, flow, self._now, dtype), block).to(device).eval()

    def of(self, number: int, tokens: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a block for tokens [samples, positions], with zeros in place of hidden states."""
        # Fake tensors of one simulation cannot be used in another one.
        key = (len(tokens), tokens.fake_mode if isinstance(tokens, FakeTensor) else None)
        if self._kept[0] != key or self.flow.by_tokens:
            self._kept = key, self._made(tokens)
        return self._kept[1][number]

    def _made(self, tokens: Tensor) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        self._now.samples, self._taken = len(tokens), []
        with torch.no_grad():
            try:
                self._model(**calling(self._model.forward, tokens))
            except _Left:
                made, self._taken = self._taken, []
                return made
        raise RuntimeError("the stock model has not called its last block")


@lru_cache(maxsize=2)
def _arguments(
    family: AsStock, config: bytes, kind: str, length: int, kernel: str, dtype: torch.dtype, device: str
) -> Arguments:

    wide = torch.float64 if dtype is torch.float64 else torch.float32
    whole = _skeleton(family, config, kind, kernel, wide).whole
    return Arguments(whole, flow_of_config(config, kind, length), dtype, torch.device(device))


_PAGE = "docs/models.md"
