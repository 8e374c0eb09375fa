"""The initialization of stock modules by transformers, observed on the meta device, where nothing is drawn."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.initialization import TORCH_INIT_FUNCTIONS

from shardwright_train.models.initial_weights import Constant, Distribution, Filling, Normal, TruncatedNormal, Uniform
from shardwright_train.torch_private import TorchDispatchMode

_DRAWS: dict[str, Callable[..., Distribution]] = {
    "aten::normal_": lambda mean=0.0, std=1.0: Normal(mean, std),
    "aten::uniform_": lambda low=0.0, high=1.0: Uniform(low, high),
    "aten::fill_": Constant,
    "aten::zero_": lambda: Constant(0.0),
}


def stock_fillings(module: nn.Module, initialize: Callable[[], object]) -> dict[str, tuple[Filling, ...]]:
    """Return how `initialize` fills each parameter of a module on the meta device, in order.

    Raises RuntimeError, naming the parameter, for what it leaves as it was or changes otherwise.
    """
    fillings = _Noted(module)
    with fillings, _truncated_normal_noted(fillings):
        initialize()
    found = fillings.by_name
    if missing := [name for name in (*found, *dict(module.named_buffers())) if not found.get(name)]:
        raise RuntimeError(f"{', '.join(missing)} of {type(module).__name__}: has no initial values")
    return {name: tuple(fillings) for name, fillings in found.items()}


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
        name, rows = next((name, rows) for part, name, rows in self._parts if part is x)
        if rows is None:
            self.by_name[name].clear()
        self.by_name[name].append(Filling(distribution, rows))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        if name in _DRAWS:
            self.note(args[0], _DRAWS[name](*args[1:]))
            return args[0]
        if name.endswith("_"):
            raise RuntimeError(f"initial weights by {name} are not known")
        made = func(*args, **(kwargs or {}))
        if name == "aten::select" and args[1] == 0:
            whole = next(name for part, name, _ in self._parts if part is args[0])
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
