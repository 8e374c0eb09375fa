"""Tensor parallelism of blocks of a stock class, by the plan that transformers has of it.

A plan names the modules and parameters of a block that are cut, each by a word of
`transformers.distributed.tensor_parallel`; classes that have one read their numbers of heads off their matrices.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright_train.models.stock import config_class
from shardwright_train.parallel.collectives import copy_to_group, gather_dim, with_transpose
from shardwright_train.parallel.sharding_rules import INSIDE, Rule, rule_for
from shardwright_train.parallel.tensor import TensorParallel, change_parameters, make_row_parallel

_COLUMNS, _ROWS = Rule("cut", dim=-2), Rule("cut", dim=-1)
_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("colwise", "colwise_gather_output"), _COLUMNS),
    **dict.fromkeys(("rowwise", "rowwise_split_input"), _ROWS),
    "packed_colwise": Rule("cut", dim=-2, fused=2),
    "packed_rowwise": Rule("cut", dim=-1, fused=2),
    "replicated_with_grad_allreduce": INSIDE,
}
"""How words cut what is so named, or the parameters of the module that is."""
_MENDED = {
    "apertus": {"mlp.act_fn": "replicated_with_grad_allreduce"},  # numbers that each rank applies to its own features
    "inkling_text": {"mlp.experts.gate_up_proj": "packed_colwise"},  # its forward pass takes two halves
}
"""Words that plans of transformers lack, or have wrong, so that they do not train what one rank does."""
_LEAVING = ("rowwise", "rowwise_split_input", "moe_tp_experts", "all_reduce")
"""Words of modules whose results are sums over the ranks."""
_TEXT = "text_config"


class StockPlan(NamedTuple):
    """What a plan of transformers says of the blocks of a type."""

    words: Mapping[str, str]
    """Words by the ends of paths in a block."""
    problem: str | None
    """Why one rank has all of a block."""

    @property
    def rules(self) -> dict[str, Rule]:
        """How parameters are cut, by the ends of their paths or of their modules'."""
        if self.problem is not None:
            return {}
        cut = {path: _RULES[word] for path, word in self.words.items() if word in _RULES}
        # What is summed over ranks has a bias added once.
        return cut | {f"{path}.bias": INSIDE for path, rule in cut.items() if rule is _ROWS}

    def leaving(self, block: nn.Module) -> list[str]:
        """The modules of a block whose results are summed over the ranks, by path."""
        return [path for path, _ in block.named_modules() if self._word(path) in _LEAVING]

    def divide(self, block: nn.Module, tensor_parallel: TensorParallel) -> None:
        """Make the modules of a block, whose parameters are cut, compute as the plan says."""
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
    """The plan of a stock class."""
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
    """Give a module that computes with matrices side by side these in one, as the stock class has them."""
    dims = dict[str, int]()
    for name, parameter in module.named_parameters(recurse=False):
        rule = rule_for(f"{path}.{name}", rules)
        place = None if rule is None else rule.place(parameter.dim() - 1)
        if rule is not None and rule.fused > 1 and place is not None:
            dims[name] = place
    if dims:
        change_parameters(module, lambda name, x: x.flatten(dims[name], dims[name] + 1) if name in dims else x)


class _Shared:
    """What the divided modules of a block share: modules that are given the same enter once."""

    def __init__(self, tensor_parallel: TensorParallel, block: nn.Module) -> None:
        self.tensor_parallel, self.block = tensor_parallel, block
        self._entered: tuple[Tensor, Tensor] | None = None

    def enter(self, x: Tensor) -> Tensor:
        """The input of products with columns, whose gradients are summed over the ranks."""
        if self._entered is None or self._entered[0] is not x:
            with self.tensor_parallel.entered(x) as (entered,):
                self._entered = x, entered
        self.tensor_parallel.randomness.inside()
        return self._entered[1]

    def leave(self, x: Tensor) -> Tensor:
        """The sum over the ranks."""
        self._entered = None
        return self.tensor_parallel.leave(x)

    def gathered(self, x: Tensor) -> Tensor:
        """The features of all ranks, in order."""
        rank, size, group = self.tensor_parallel.rank, self.tensor_parallel.size, self.tensor_parallel.group
        whole = with_transpose(x, lambda x: gather_dim(x, -1, group), lambda dx: dx.chunk(size, -1)[rank].contiguous())
        self.tensor_parallel.randomness.outside()
        return whole

    def own(self, x: Tensor) -> Tensor:
        """This rank's share of features that each rank has whole."""
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
        # Choices of experts, and weights of their results; Llama 4 has weighed what they are given.
        choices, weights = routed[:1], (copy_to_group(each, shared.tensor_parallel.group) for each in routed[1:])
        return shared.leave(stock(shared.enter(hidden), *choices, *weights))

    module.forward = forward


def _summed(module: nn.Module, shared: _Shared) -> None:
    """A module that multiplies by shares of its own: whatever it is given has a part of its gradient on each rank."""
    stock, group = module.forward, shared.tensor_parallel.group

    def forward(hidden: Tensor, **others: Tensor) -> Tensor:
        copied = {name: copy_to_group(other, group) for name, other in others.items()}
        return shared.leave(stock(shared.enter(hidden), **copied))

    module.forward = forward


def _latents(module: nn.Module, shared: _Shared) -> None:
    """A matrix that each rank has whole; of what it gives, heads read rotated features without a further product."""
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
"""How modules compute, by their words."""
