"""Stock models of transformers without weights: the modules taken from them, and their initial distributions."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.initialization import TORCH_INIT_FUNCTIONS

from shardwright_train.models.initial_weights import Constant, Distribution, Filling, Normal, TruncatedNormal, Uniform
from shardwright_train.parallel.tensor import TensorParallel
from shardwright_train.torch_private import TorchDispatchMode

States = tuple[Tensor, ...]
"""The output of a layer: tensors [samples, positions, features], in the order of the description's `outputs`."""


class WithLoss(NamedTuple):
    """The output of a block that has an auxiliary loss.

    The auxiliary loss is this rank's part of a sum over samples; the runtime adds its mean over a step to the loss.
    Ranks with replicas of the block's states compute the same value, ranks with other positions compute other parts of
    it.
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
    """Tensor parallelism of the pieces; set if they are sharded."""

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
        """The states after some of the pieces, one after the other."""
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
        """The outputs of all, side by side."""
        return torch.cat([matrix(states) for matrix in self.children()], -1)


def unstack(block: nn.Module, stacked: Mapping[str, Sequence[str]], shapes: Mapping[str, Sequence[int]]) -> None:
    """Replace stacked matrices of a block by separate ones: `stacked` maps a path to the paths of its parts.

    `shapes` has the shape of each of the block's parameters; matrices are [outputs, inputs].
    """
    for path, parts in stacked.items():
        matrix = dict(block.named_modules()).get(path)
        if isinstance(matrix, nn.Linear):
            rows = {part.removeprefix(f"{path}."): shapes[f"{part}.weight"][0] for part in parts}
            block.set_submodule(path, Stacked(matrix, rows))


def config_class(stock: Any, kind: str) -> Any:
    """The configuration class of a type, or, under the name of a composite, of the text's class that it has."""
    named, own = CONFIG_MAPPING[kind], getattr(stock, "config_class", None)
    return own if own is not None and not issubclass(named, own) else named


def skeleton(stock: Any, config: Any) -> Any:
    """A stock model with parameters on the meta device; raises ValueError if transformers cannot build it."""
    with refusals(), torch.device("meta"):
        return stock(config)


def with_memory(module: nn.Module, device: torch.device) -> nn.Module:
    """Give parameters memory on a device, those with several names once; buffers that have values keep them."""
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
    """Raise any error of transformers about a configuration as a ValueError of one line."""
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
    """How `initialize` fills each parameter of a module on the meta device, in order.

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
        """Parameters and single rows of them."""

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
        if name.endswith("_") and args[0].is_meta:  # what has values is no parameter
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
