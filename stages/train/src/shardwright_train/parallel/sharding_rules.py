"""Cutting the parameters of stock modules over a tensor-parallel axis, by rules that name the modules."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from shardwright_train.parallel.rng import Randomness
from shardwright_train.parallel.tensor import (
    TensorParallel,
    change_parameters,
    cut_parameter,
    make_row_parallel,
)

__all__ = [
    "COLUMN",
    "INSIDE",
    "ROW",
    "VOCABULARY",
    "WORDS",
    "Cut",
    "Parts",
    "Rule",
    "Split",
    "apply_activation_checkpointing",
    "cuts",
    "split_module",
]

_ENTERING = ("hidden_states", "key_value_states")


@dataclass(frozen=True)
class Rule:
    """What tensor parallelism does to a module's own parameters; those that no rule names are held whole."""

    kind: str
    fused: int = 1
    """Equal matrices side by side in one weight, such as query, key and value, each of which is cut by itself."""


COLUMN = Rule("column")
"""A matrix cut by outputs: each rank computes some heads or features (Shoeybi et al. 2019)."""
ROW = Rule("row")
"""A matrix cut by inputs: the ranks' products are summed."""
VOCABULARY = Rule("vocabulary")
"""A matrix cut by tokens or classes, padded to equal shares."""
INSIDE = Rule("inside")
"""A whole parameter applied to each rank's own heads or features: its gradient is a sum over the ranks."""

WORDS = {
    "colwise": COLUMN,
    "rowwise": ROW,
    "embedding_rowwise": VOCABULARY,
    "colwise_gather_output": VOCABULARY,
    "replicated_with_grad_allreduce": INSIDE,
}
"""The rules by the words of transformers' tensor-parallel plans; outputs are never gathered: the loss takes shares."""

Rules = Mapping[str, Rule]


class Parts(NamedTuple):
    """A type of block: the stock model's list of them, and callables inside one by dotted name."""

    path: str
    attention: tuple[str, ...]
    """What is recomputed where `recompute` says attention, and what where it says mlp."""
    mlp: tuple[str, ...]
    products: tuple[str, ...] = ()
    """Where column-parallel products begin; where there is none, with each part."""
    counted_by: str = "num_hidden_layers"
    """The key of the configuration that says how many there are."""

    @property
    def enter(self) -> tuple[str, ...]:
        """Before what all positions are needed."""
        return self.products or (*self.attention, *self.mlp)


class Cut(NamedTuple):
    """How a parameter is stored: fused matrices have a dim of their own."""

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None
    inside: bool


def cuts(module: nn.Module, rules: Rules) -> Iterator[Cut]:
    """Every parameter of a module under the rules, by its name inside the module."""
    for owner_name, owner in module.named_modules():
        rule = _rule_for(owner_name, rules)
        for name, parameter in owner.named_parameters(recurse=False):
            shape, tp_dim = _stored(owner, name, tuple(parameter.shape), rule)
            yield Cut(f"{owner_name}.{name}".lstrip("."), shape, tp_dim, rule is not None and tp_dim is None)


class Split(NamedTuple):
    """What became of a module's parameters, by name."""

    tp_dims: Mapping[str, int | None]
    """Which dim of each parameter is cut; None where it is held whole."""
    partial: frozenset[str]
    """The whole parameters whose gradients must be summed over the axis after the backward pass."""


def split_module(module: nn.Module, rules: Rules, tensor_parallel: TensorParallel) -> Split:
    """Leave every module its share of its parameters, and make it compute with that."""
    tp_dims, partial = {}, set()
    for owner_name, owner in list(module.named_modules()):
        rule = _rule_for(owner_name, rules)
        lengths = {}
        for name, parameter in list(owner.named_parameters(recurse=False)):
            lengths[name] = parameter.shape[0]
            shape, tp_dim = _stored(owner, name, tuple(parameter.shape), rule)
            owner.register_parameter(name, cut_parameter(parameter.detach().view(shape), tp_dim, tensor_parallel.size))
            full_name = f"{owner_name}.{name}".lstrip(".")
            tp_dims[full_name] = tp_dim
            if tp_dim is None and tensor_parallel.size > 1 and (rule is not None or tensor_parallel.sums_outside):
                partial.add(full_name)
        if lengths and rule is not None:
            _compute_by(owner, rule, lengths, tensor_parallel)
    return Split(tp_dims, frozenset(partial))


def enter_before(module: nn.Module, tensor_parallel: TensorParallel) -> None:
    """Give a module all positions of its input on every rank of the group."""
    stock = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = (tensor_parallel.enter(args[0]), *args[1:])
        named = {name: tensor_parallel.enter(kwargs[name]) for name in _ENTERING if kwargs.get(name) is not None}
        return stock(*args, **kwargs | named)

    module.forward = forward


def apply_activation_checkpointing(block: nn.Module, name: str, randomness: Randomness, recompute: bool) -> None:
    """Make one of a block's parts draw from a seed of its own, so that it draws the same whether recomputed or not.

    Where it is, it is computed again in the backward pass instead of keeping its activations.
    """
    owner_name, _, last = name.rpartition(".")
    part = getattr(block.get_submodule(owner_name), last)
    if isinstance(part, nn.Module):
        part.forward = _checkpointed(part.forward, name, randomness, recompute)
    else:
        setattr(block.get_submodule(owner_name), last, _checkpointed(part, name, randomness, recompute))


def _checkpointed(stock: Callable[..., Any], name: str, randomness: Randomness, recompute: bool) -> Callable[..., Any]:
    # Some stock blocks read a part's signature.
    @wraps(stock)
    def call(*args: Any, **kwargs: Any) -> Any:
        rng_key = randomness.current

        def run(*args: Any, **kwargs: Any) -> Any:
            if rng_key is None:
                return stock(*args, **kwargs)
            with randomness.seeded(*rng_key, name):
                return stock(*args, **kwargs)

        if not recompute:
            return run(*args, **kwargs)
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return call


def _rule_for(name: str, rules: Rules) -> Rule | None:
    """The rule of the longest key that is the end of a module's name."""
    keys = [key for key in rules if f".{name}".endswith(f".{key}")]
    return rules[max(keys, key=len)] if keys else None


def _stored(
    owner: nn.Module, name: str, shape: tuple[int, ...], rule: Rule | None
) -> tuple[tuple[int, ...], int | None]:
    if rule is None or rule is INSIDE or (rule.kind == "row" and name == "bias"):
        return shape, None
    outputs_last = name == "weight" and isinstance(owner, Conv1D | nn.Embedding) and rule.kind != "vocabulary"
    dim = 1 if outputs_last else 0
    if rule.kind == "row":
        dim = 1 - dim
    if rule.fused == 1:
        return shape, dim
    return (*shape[:dim], rule.fused, shape[dim] // rule.fused, *shape[dim + 1 :]), dim + 1


def _compute_by(owner: nn.Module, rule: Rule, lengths: Mapping[str, int], tensor_parallel: TensorParallel) -> None:
    if rule.kind == "row":
        make_row_parallel(owner, tensor_parallel)
    elif rule.kind == "vocabulary":
        change_parameters(owner, lambda name, local: real_rows(local, lengths[name], tensor_parallel))
    elif rule.kind == "column":
        if rule.fused > 1:
            change_parameters(owner, lambda _name, local: local.flatten(-2))
        if isinstance(owner, Conv1D):
            owner.nf = owner.nf // tensor_parallel.size


def real_rows(local: Tensor, length: int, tensor_parallel: TensorParallel) -> Tensor:
    """A vocabulary's share without its padding, of `length` rows in all."""
    return local[: max(0, min(local.shape[0], length - tensor_parallel.rank * local.shape[0]))]
