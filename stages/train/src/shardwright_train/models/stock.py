"""Stock models of transformers without weights: modules taken from them, their initial weights, their sharding."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.initialization import TORCH_INIT_FUNCTIONS

from shardwright_train.models.initial_weights import Constant, Distribution, Filling, Normal, TruncatedNormal, Uniform
from shardwright_train.parallel.collectives import copy_to_group, gather_dim, with_transpose
from shardwright_train.parallel.sharding_rules import INSIDE, Rule, rule_for
from shardwright_train.parallel.tensor import TensorParallel, change_parameters, make_row_parallel
from shardwright_train.torch_private import TorchDispatchMode

States = tuple[Tensor, ...]
"""The output of a layer: tensors [samples, positions, features], in the order of the description's `outputs`."""


class WithLoss(NamedTuple):
    """The output of a block that has an auxiliary loss.

    The auxiliary loss is this rank's part of a sum over samples; the runtime adds its mean over a step to the loss.
    Ranks with replicas of the block's states compute the same value, ranks with other positions other parts.
    """

    states: States
    loss: Tensor
    counts: Tensor | None = None
    """How often each expert was chosen for this rank's positions [experts]; None without experts."""


_REFUSALS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError),
    StrictDataclassError,
)


class Pieces(nn.Module):
    """Some modules of a stock model, under their original paths, with the family's function that calls them."""

    tensor_parallel: TensorParallel
    """Tensor parallelism of the pieces; set when they are sharded."""

    def __init__(self, stock: Any, paths: tuple[str, ...], compute: Callable[..., Any]) -> None:
        super().__init__()
        self.config, self.compute = stock.config, compute
        for path in paths:
            owner: nn.Module = self
            *above, last = path.split(".")
            for name in above:
                if not hasattr(owner, name):
                    owner.add_module(name, nn.Module())
                owner = owner.get_submodule(name)
            owner.add_module(last, copy.deepcopy(stock.get_submodule(path)))

    def through(self, paths: tuple[str, ...], states: Tensor) -> Tensor:
        """Return the states after the modules at these paths, applied in order."""
        for path in paths:
            states = self.get_submodule(path)(states)
        return states

    def forward(self, *inputs: Any) -> Any:
        """Call the family's function with the pieces and the inputs."""
        return self.compute(self, *inputs)


class Stacked(nn.Module):
    """Separate matrices instead of one stacked matrix, so that tensor parallelism can shard each of them."""

    def __init__(self, matrix: nn.Linear, rows: Mapping[str, int]) -> None:
        super().__init__()
        if sum(rows.values()) != matrix.out_features:
            raise ValueError(f"{dict(rows)} are not the {matrix.out_features} rows of the stock matrix")
        like = {"device": matrix.weight.device, "dtype": matrix.weight.dtype}
        for name, count in rows.items():
            self.add_module(name, nn.Linear(matrix.in_features, count, matrix.bias is not None, **like))

    def forward(self, states: Tensor) -> Tensor:
        """Return the outputs of all matrices, concatenated."""
        return torch.cat([matrix(states) for matrix in self.children()], -1)


def unstack(block: nn.Module, stacked: Mapping[str, Sequence[str]], shapes: Mapping[str, Sequence[int]]) -> None:
    """Replace stacked matrices of a block by separate ones: `stacked` maps a path to the paths of its parts.

    `shapes`: the shape of each of the block's parameters, by name; matrices are [outputs, inputs].
    """
    for path, parts in stacked.items():
        matrix = dict(block.named_modules()).get(path)
        if isinstance(matrix, nn.Linear):
            rows = {part.removeprefix(f"{path}."): shapes[f"{part}.weight"][0] for part in parts}
            block.set_submodule(path, Stacked(matrix, rows))


def config_class(stock: Any, kind: str) -> Any:
    """Return the configuration class of a model type; for a composite type, the class of its text model."""
    named, own = CONFIG_MAPPING[kind], getattr(stock, "config_class", None)
    return own if own is not None and not issubclass(named, own) else named


def skeleton(stock: Any, config: Any) -> Any:
    """Return a stock model with parameters on the meta device; raise ValueError if transformers cannot build it."""
    with refusals(), torch.device("meta"):
        return stock(config)


def with_memory(module: nn.Module, device: torch.device) -> nn.Module:
    """Allocate a module's parameters on a device, shared ones once; buffers that have values keep them."""
    kept = {name: buffer.clone() for name, buffer in module.named_buffers() if not buffer.is_meta}
    first: dict[nn.Parameter, str] = {}
    names = {name: first.setdefault(p, name) for name, p in module.named_parameters(remove_duplicate=False)}
    module.to_empty(device=device)
    for name, one in names.items():
        if name != one:
            owner, _, own = name.rpartition(".")
            module.get_submodule(owner).register_parameter(own, module.get_parameter(one))
    for name, buffer in module.named_buffers():
        if name in kept:
            buffer.copy_(kept[name])
    return module


@contextmanager
def refusals(problem: str = "transformers cannot build it") -> Iterator[None]:
    """Convert errors of transformers about a configuration to ValueErrors of one line, beginning with `problem`."""
    try:
        yield
    except _REFUSALS as error:
        words = " ".join(str(error).split())
        raise ValueError(f"{problem} ({type(error).__name__}: {words})") from None


_DRAWS: dict[str, Callable[..., Distribution]] = {
    "aten::normal_": lambda mean=0.0, std=1.0: Normal(mean, std),
    "aten::uniform_": lambda low=0.0, high=1.0: Uniform(low, high),
    "aten::fill_": Constant,
    "aten::zero_": lambda: Constant(0.0),
}


class UnknownFilling(RuntimeError):
    """Initial weights that a class does not draw element by element from a known distribution."""


def stock_fillings(module: nn.Module, initialize: Callable[[], object]) -> dict[str, tuple[Filling, ...]]:
    """Return how `initialize` fills each parameter of a module on the meta device, in order.

    Parameters that have values keep them. Raises UnknownFilling naming a parameter that it leaves uninitialized or
    changes in an unknown way.
    """
    fillings = _Noted(module)
    with fillings, _truncated_normal_noted(fillings):
        initialize()
    noted = {name: tuple(fillings) for name, fillings in fillings.by_name.items()}
    held = [*module.named_parameters(), *module.named_buffers()]
    if missing := [name for name, x in held if x.is_meta and not noted.get(name)]:
        raise UnknownFilling(f"{', '.join(missing)} of {type(module).__name__}: has no initial values")
    return noted


class _Noted(TorchDispatchMode):
    """A mode that records random draws instead of making them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_name: dict[str, list[Filling]] = {name: [] for name, _ in module.named_parameters()}
        self._parts: list[tuple[Tensor, str, tuple[int, int] | None]] = [
            (parameter, name, None) for name, parameter in module.named_parameters()
        ]
        """Parameters and single rows of them, each with the parameter's name and the range of rows."""

    def note(self, x: Tensor, distribution: Distribution) -> None:
        """Record that a part of a parameter is filled, and drop records that it overwrites."""
        name, rows = next(((name, rows) for part, name, rows in self._parts if part is x), ("", None))
        if not name:
            raise UnknownFilling("initial weights of parts of a parameter are not known")
        if rows is None:
            self.by_name[name].clear()
        self.by_name[name].append(Filling(distribution, rows))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        if name in _DRAWS and args[0].is_meta:
            self.note(args[0], _DRAWS[name](*args[1:]))
            return args[0]
        if name.endswith("_") and args[0].is_meta:  # a tensor with values is no parameter
            raise UnknownFilling(f"initial weights by {name} are not known")
        made = func(*args, **(kwargs or {}))
        if name == "aten::select" and args[1] == 0:
            whole = next((name for part, name, _ in self._parts if part is args[0]), None)
            if whole is not None:  # else it is a row of a constant
                self._parts.append((made, whole, (args[2], args[2] + 1)))
        return made


@contextmanager
def _truncated_normal_noted(fillings: _Noted) -> Iterator[None]:
    """Record truncated normal draws, which dispatch no operation on the meta device."""

    def noted(x: Tensor, mean: float, std: float, a: float, b: float, generator: None = None) -> Tensor:
        fillings.note(x, TruncatedNormal(mean, std, a, b))
        return x

    stock = TORCH_INIT_FUNCTIONS["trunc_normal_"]
    TORCH_INIT_FUNCTIONS["trunc_normal_"] = noted
    try:
        yield
    finally:
        TORCH_INIT_FUNCTIONS["trunc_normal_"] = stock


# Tensor parallelism of blocks of a stock class, by transformers' plan for the class.
#
# A plan names the modules and parameters of a block that are sharded, each with a word of
# `transformers.distributed.tensor_parallel`; classes with a plan infer their numbers of heads from their matrices.


_COLUMNS, _ROWS = Rule("cut", dim=-2), Rule("cut", dim=-1)
_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("colwise", "colwise_gather_output"), _COLUMNS),
    **dict.fromkeys(("rowwise", "rowwise_split_input"), _ROWS),
    "packed_colwise": Rule("cut", dim=-2, fused=2),
    "packed_rowwise": Rule("cut", dim=-1, fused=2),
    "replicated_with_grad_allreduce": INSIDE,
}
"""The rule of each word, for the parameter with that word, or for the parameters of a module with it."""
_MENDED = {
    "apertus": {"mlp.act_fn": "replicated_with_grad_allreduce"},  # numbers that each rank applies to its own features
    "inkling_text": {"mlp.experts.gate_up_proj": "packed_colwise"},  # its forward pass takes two halves
}
"""Words that are missing or wrong in transformers' plans, which would then train another model than a single rank."""
_LEAVING = ("rowwise", "rowwise_split_input", "moe_tp_experts", "all_reduce")
"""Words of modules whose results are sums over the ranks."""
_TEXT = "text_config"


class StockPlan(NamedTuple):
    """What transformers' tensor-parallel plan says about the blocks of a model type."""

    words: Mapping[str, str]
    """Words by the ends of paths in a block."""
    problem: str | None
    """The reason why blocks cannot be sharded; None if they can."""

    @property
    def rules(self) -> dict[str, Rule]:
        """The sharding rules of parameters, by the ends of their paths or of their modules' paths."""
        if self.problem is not None:
            return {}
        cut = {path: _RULES[word] for path, word in self.words.items() if word in _RULES}
        # The bias of a sum over ranks is added once.
        return cut | {f"{path}.bias": INSIDE for path, rule in cut.items() if rule is _ROWS}

    def leaving(self, block: nn.Module) -> list[str]:
        """Return the paths of a block's modules whose results are summed over the ranks."""
        return [path for path, _ in block.named_modules() if self._word(path) in _LEAVING]

    def divide(self, block: nn.Module, tensor_parallel: TensorParallel) -> None:
        """Make the modules of a block, whose parameters are sharded, compute as the plan says."""
        shared = _Shared(tensor_parallel, block)
        for path, module in block.named_modules():
            _join_matrices(module, path, self.rules)
            if tensor_parallel.size > 1 and (compute := _COMPUTE.get(self._word(path))) is not None:
                compute(module, shared)

    def _word(self, path: str) -> str:
        ends = [key for key in self.words if f".{path}".endswith(f".{key}")]
        return self.words[max(ends, key=len)] if ends else ""


@cache
def stock_plan(stock: Any, kind: str) -> StockPlan:
    """Return the tensor-parallel plan of a stock class."""
    made = config_class(stock, kind)
    text = (made.sub_configs or {}).get(_TEXT)
    plan = made.base_model_tp_plan or getattr(text, "base_model_tp_plan", None) or {}
    words = {path.partition(".*.")[2]: word for path, word in plan.items() if ".*." in path}
    words |= _MENDED.get(kind, {})
    known = {*_RULES, *_COMPUTE, "local_params", "replicate"}
    if not words:
        return StockPlan({}, "transformers has no plan of tensor parallelism for it")
    odd = (path for path, word in words.items() if word not in known or "*" in path)
    asked = next((f"its plan of tensor parallelism asks for {words[path]} of {path}" for path in odd), None)
    return StockPlan(words, None if asked is None else f"{asked}, which is not done here")


def _join_matrices(module: nn.Module, path: str, rules: Mapping[str, Rule]) -> None:
    """Make a module compute with fused matrices joined in one, as in the stock class, if they have a separate dim."""
    dims = dict[str, int]()
    for name, parameter in module.named_parameters(recurse=False):
        rule = rule_for(f"{path}.{name}", rules)
        place = None if rule is None else rule.place(parameter.dim() - 1)
        if rule is not None and rule.fused > 1 and place is not None:
            dims[name] = place
    if dims:
        change_parameters(module, lambda name, x: x.flatten(dims[name], dims[name] + 1) if name in dims else x)


class _Shared:
    """What the sharded modules of a block share: an input that several modules read enters tensor parallelism once."""

    def __init__(self, tensor_parallel: TensorParallel, block: nn.Module) -> None:
        self.tensor_parallel, self.block = tensor_parallel, block
        self._entered: tuple[Tensor, Tensor] | None = None

    def enter(self, x: Tensor) -> Tensor:
        """Return the input of column-parallel matrix products, whose gradients are summed over the ranks."""
        if self._entered is None or self._entered[0] is not x:
            with self.tensor_parallel.entered(x) as (entered,):
                self._entered = x, entered
        self.tensor_parallel.randomness.inside()
        return self._entered[1]

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks."""
        self._entered = None
        return self.tensor_parallel.leave(x)

    def gathered(self, x: Tensor) -> Tensor:
        """Return the features of all ranks, in order."""
        rank, size, group = self.tensor_parallel.rank, self.tensor_parallel.size, self.tensor_parallel.group
        whole = with_transpose(x, lambda x: gather_dim(x, -1, group), lambda dx: dx.chunk(size, -1)[rank].contiguous())
        self.tensor_parallel.randomness.outside()
        return whole

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's share of features that are whole on each rank."""
        rank, size, group = self.tensor_parallel.rank, self.tensor_parallel.size, self.tensor_parallel.group
        return with_transpose(x, lambda x: x.chunk(size, -1)[rank].contiguous(), lambda dx: gather_dim(dx, -1, group))


def _columns(module: nn.Module, shared: _Shared) -> None:
    stock = module.forward
    module.forward = lambda x, *args, **kwargs: stock(shared.enter(x), *args, **kwargs)


def _gathered_columns(module: nn.Module, shared: _Shared) -> None:
    _columns(module, shared)
    stock = module.forward
    module.forward = lambda *args, **kwargs: shared.gathered(stock(*args, **kwargs))


def _rows(module: nn.Module, shared: _Shared) -> None:
    make_row_parallel(module, shared.tensor_parallel, shared.leave)


def _rows_of_whole(module: nn.Module, shared: _Shared) -> None:
    _rows(module, shared)
    stock = module.forward
    module.forward = lambda x, *args, **kwargs: stock(shared.own(x), *args, **kwargs)


def _experts(module: nn.Module, shared: _Shared) -> None:
    stock = module.forward

    def forward(hidden: Tensor, *routed: Tensor) -> Tensor:
        # `routed`: chosen experts, and weights of their results; Llama 4 weights the experts' inputs instead.
        choices, weights = routed[:1], (copy_to_group(each, shared.tensor_parallel.group) for each in routed[1:])
        return shared.leave(stock(shared.enter(hidden), *choices, *weights))

    module.forward = forward


def _summed(module: nn.Module, shared: _Shared) -> None:
    """Change a module that multiplies by its own shards: each rank has a part of the gradients of all its inputs."""
    stock, group = module.forward, shared.tensor_parallel.group

    def forward(hidden: Tensor, **others: Tensor) -> Tensor:
        copied = {name: copy_to_group(other, group) for name, other in others.items()}
        return shared.leave(stock(shared.enter(hidden), **copied))

    module.forward = forward


def _latents(module: nn.Module, shared: _Shared) -> None:
    """Change a replicated matrix whose last outputs, the rotated features, heads read without a further matrix."""
    stock, owner = module.forward, next(each for each in shared.block.modules() if module in each.children())
    rotated: Any = owner.qk_rope_head_dim

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        latents, read = stock(*args, **kwargs).tensor_split([-rotated], -1)
        return torch.cat([latents, copy_to_group(read, shared.tensor_parallel.group)], -1)

    module.forward = forward


_COMPUTE: Mapping[str, Callable[[nn.Module, _Shared], None]] = {
    "colwise": _columns,
    "packed_colwise": _columns,
    "colwise_gather_output": _gathered_columns,
    "rowwise": _rows,
    "rowwise_split_input": _rows_of_whole,
    "moe_tp_experts": _experts,
    "all_reduce": _summed,
    "mla_kv_a_proj": _latents,
}
"""Function that changes a module's computation, by the module's word."""
