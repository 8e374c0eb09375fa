"""Rules that name the parameters of a family's stock model which tensor parallelism shards."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import UNSET
from torch import nn
from transformers.pytorch_utils import Conv1D

from shardwright.plan.axes import ParameterAxes
from shardwright.types import Parameter


@dataclass(frozen=True)
class Rule:
    """A rule for sharding a parameter; parameters without a rule are replicated."""

    kind: str
    fused: int = 1
    """Number of equal matrices side by side in one weight, such as query, key and value, which are sharded
    separately."""
    dim: int | None = None
    """Dim that is sharded; a negative one counts from the last, and means the first of a parameter with too few dims.
    None: the default dim of its kind for the weight or bias of a stock matrix."""
    ep_dim: int | None = None
    """Dim of experts, for a parameter that stacks several experts; None for other parameters."""

    def place(self, dims: int) -> int | None:
        """Return the dim that is sharded of a parameter with `dims` dims; None: the default one."""
        return self.dim if self.dim is None or self.dim >= 0 else max(0, dims + self.dim)


COLUMN = Rule("column")
"""A matrix cut by outputs: each rank computes some heads or features (Shoeybi et al. 2019)."""
ROW = Rule("row")
"""A matrix cut by inputs: the ranks' matrix products are summed."""
VOCABULARY = Rule("vocabulary")
"""A matrix cut by tokens or classes, padded to equal shares."""
INSIDE = Rule("inside")
"""A replicated parameter applied to each rank's own heads or features: its gradient is a sum over the ranks."""
BUFFER = Rule("buffer")
"""A buffer that steps set: each rank has all of it, and it has no gradient."""

WORDS = {
    "colwise": COLUMN,
    "rowwise": ROW,
    "embedding_rowwise": VOCABULARY,
    "colwise_gather_output": VOCABULARY,
    "replicated_with_grad_allreduce": INSIDE,
}
"""The rules by the words of transformers' tensor-parallel plans; outputs are never gathered: the loss reads shards."""
OF_OUTPUTS = ("moe_tp_experts",)
"""Words of transformers' plans that refer to outputs of modules, not to their parameters."""

Rules = Mapping[str, Rule]
"""Rules by suffix of a parameter's path, or of a module's path for all of its parameters."""


class Parts(NamedTuple):
    """A type of block: the path of the stock model's list of blocks, and the names of a block's parts."""

    path: str
    attention: tuple[str, ...]
    """Callables that `recompute` attention recomputes."""
    mlp: tuple[str, ...]
    products: tuple[str, ...] = ()
    """Callables with which column-parallel matrix products begin; if empty, each part is one."""
    alone: bool = False
    """Whether the path is a single block, not a list of blocks."""

    def place(self, index: int) -> str:
        """Return the path of the block with an index in the list."""
        return self.path if self.alone else f"{self.path}.{index}"

    @property
    def enter(self) -> tuple[str, ...]:
        """The callables before which all positions are needed."""
        return self.products or (*self.attention, *self.mlp)


class Cut(NamedTuple):
    """The sharding of a parameter; fused matrices have a separate dim."""

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None
    rule: Rule | None
    trained: bool = True

    @property
    def inside(self) -> bool:
        """Return whether the parameter is replicated and applied to each rank's own heads or features."""
        return self.rule is not None and self.tp_dim is None

    @property
    def is_buffer(self) -> bool:
        """Return whether the parameter is a buffer, which steps change and which has no gradient."""
        return self.rule is BUFFER

    @property
    def owner(self) -> str:
        """Return the name of the module that has the parameter."""
        return self.name.rpartition(".")[0]

    @property
    def dims(self) -> Mapping[str, int]:
        """The dims that the axes of a mesh cut, by the axes' names."""
        dims = {"ep": None if self.rule is None else self.rule.ep_dim, "tp": self.tp_dim}
        return {axis: dim for axis, dim in dims.items() if dim is not None}

    def part_shape(self, axes: ParameterAxes) -> list[int]:
        """Return the shape of each rank's part; a length that the number of ranks does not divide is padded."""
        shape, sizes = list(self.shape), {"ep": axes.experts.size, "tp": axes.tensor.size}
        for axis, dim in self.dims.items():
            shape[dim] = -(-shape[dim] // sizes[axis])
        return shape

    @property
    def parameter(self) -> Parameter:
        """Return the parameter in the form of a model description."""
        return Parameter(
            name=self.name,
            shape=self.shape,
            tp_dim=self.tp_dim,
            inside=self.inside,
            frozen=UNSET if self.trained or self.is_buffer else True,
            ep_dim=self.dims.get("ep", UNSET),
            buffer=self.is_buffer or UNSET,
        )


def cuts(module: nn.Module, rules: Rules) -> Iterator[Cut]:
    """Yield how each parameter of a module is sharded, by the first of its names inside the module."""
    seen = set[nn.Parameter]()
    for owner_name, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter in seen:
                continue
            seen.add(parameter)
            path = f"{owner_name}.{name}".lstrip(".")
            rule = rule_for(path, rules)
            yield Cut(path, *_stored(owner, name, tuple(parameter.shape), rule), rule, parameter.requires_grad)


def rule_for(path: str, rules: Rules) -> Rule | None:
    """Return the rule of the longest key that ends a parameter's path or its module's path; None if no key does."""
    paths = f".{path}", f".{path}".rpartition(".")[0]
    keys = [key for key in rules if any(each.endswith(f".{key}") for each in paths)]
    return rules[max(keys, key=len)] if keys else None


def _stored(
    owner: nn.Module, name: str, shape: tuple[int, ...], rule: Rule | None
) -> tuple[tuple[int, ...], int | None]:
    if rule is None or rule.kind in (INSIDE.kind, BUFFER.kind) or (rule.kind == "row" and name == "bias"):
        return shape, None
    dim = rule.place(len(shape))
    if dim is None:
        outputs_last = name == "weight" and isinstance(owner, Conv1D | nn.Embedding) and rule.kind != "vocabulary"
        dim = int(outputs_last != (rule.kind == "row"))
    if rule.fused == 1:
        return shape, dim
    return (*shape[:dim], rule.fused, shape[dim] // rule.fused, *shape[dim + 1 :]), dim + 1
