"""Mixtral (Jiang et al. 2024) and Qwen3-MoE (Qwen team 2025): Llama with experts in some blocks or in all."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright_formats.semantics.expert_messages import shares_experts
from shardwright_formats.types import LayerStrategy, Strategy
from shardwright_models.experts import DENSE, SPARSE
from shardwright_models.facts import BLOCK
from shardwright_train.data.share import Batch
from shardwright_train.models.auxiliary_loss import States, WithLoss
from shardwright_train.models.llama import Llama
from shardwright_train.models.routers import Choice, chosen
from shardwright_train.parallel.checkpointing import Recomputation
from shardwright_train.parallel.collectives import with_transpose
from shardwright_train.parallel.experts import dispatch, exchange, expert_products
from shardwright_train.parallel.sharding_rules import INSIDE, Parts, Rule
from shardwright_train.parallel.tensor import TensorParallel


class Sparse(Llama):
    """Llama's rules, and experts that ranks share out; or each has a share of the features of all.

    The stock modules hold the parameters; what they compute is written anew, without the stock's loop over experts.
    """

    parts = dict.fromkeys((DENSE, SPARSE), Llama.parts[BLOCK])
    plan = Llama.plan | {
        "mlp.gate": INSIDE,
        "mlp.experts.gate_up_proj": Rule("cut", fused=2, dim=1, ep_dim=0),
        "mlp.experts.down_proj": Rule("cut", dim=2, ep_dim=0),
    }
    auxiliary_loss = True
    part = "mlp"
    """Name of the feed-forward part of a block."""
    always: tuple[str, ...] = ()
    """Path in a block of the experts that compute every position, if there are such."""
    returns_scores: bool = False
    """Whether the stock feed-forward part also returns the router's scores, which blocks leave alone."""

    def block(self, stock: Any, kind: str, index: int) -> nn.Module:
        """Return a stock block; one with experts also returns the balance loss."""
        block = super().block(stock, kind, index)
        if self.facts.experts is not None and kind in self.facts.experts.types:
            part: Any = getattr(block, self.part)
            part.strength = self.strength(stock.config)
            part.choose = partial(self.choose, part)
            part.forward = partial(self.compute, part)
            part.experts.forward = partial(self.compute_experts, part.experts)
            part.experts.tensor_parallel = None
            part.losses = None
            block.register_forward_pre_hook(lambda _block, _inputs: setattr(part, "losses", []))
            block.register_forward_hook(lambda _block, _inputs, output: (output, _taken(part)))
        return block

    def parts_of(self, kind: str, strategy: Strategy) -> Parts | None:
        """Return the parts of a type of block; where ranks share experts out, these do not need all positions."""
        parts = super().parts_of(kind, strategy)
        if parts is None or not shares_experts(strategy):
            return parts
        return parts._replace(products=(*parts.attention, *self.always))

    def units(self, kind: str, strategy: Strategy) -> Mapping[str, Strategy]:
        """Return the strategy of the experts where it is another than the layer's."""
        grid = strategy.expert_grid if isinstance(strategy, LayerStrategy) else None
        return {} if grid is None else {f"{self.part}.experts": grid}

    def call(self, block: nn.Module, states: States, batch: Batch, constants: dict[str, Any]) -> States | WithLoss:
        """Run a block; one with experts returns its balance loss, too."""
        try:
            output: Any = super().call(block, states, batch, constants)[0]
        finally:
            # A replay ends once it has what it needs, by an error: a loss that it noted would hold all that it kept.
            if hasattr(part := block.get_submodule(self.part), "losses"):
                part.losses = None  # type: ignore[assignment]
        if not isinstance(output, tuple):
            return (output,)
        noted: _Noted = output[1]
        return WithLoss((output[0],), noted.tensor, noted.counts)

    def after_split(self, block: nn.Module, config: Any, tensor_parallel: TensorParallel) -> None:
        """Tell the experts which ranks share them, and note that nothing but a sum needs the last product of others."""
        super().after_split(block, config, tensor_parallel)
        summed = [f"{path}.down_proj" for path in self.always]
        for last in (module for name, module in block.named_modules() if name in summed):
            last.forward = partial(tensor_parallel.recomputation.product, last.forward)
        block.get_submodule(self.part).tensor_parallel = tensor_parallel  # type: ignore[assignment]

    def choose(self, part: Any, x: Tensor) -> Choice:
        """Return the choice of the router of a block's feed-forward part for positions x [positions, hidden]."""
        return chosen(x, part.gate.weight, part.gate.top_k, getattr(part.gate, "norm_topk_prob", True))

    def compute(self, part: Any, hidden: Tensor) -> Any:
        """Return what the stock feed-forward part does for states [samples, positions, hidden]."""
        return (_forward(part, hidden), None) if self.returns_scores else _forward(part, hidden)

    def compute_experts(
        self, experts: Any, rows: Tensor, weights: "Unseen", counts: Tensor, recomputation: Recomputation
    ) -> Tensor:
        """Return the weighted results of experts for rows that are sorted by expert; of this rank's features alone.

        Rows are weighted before the last product, which is linear: so its results need not be kept.
        """
        gate, up = expert_products(rows, experts.gate_up_proj.flatten(1, -2), counts).chunk(2, -1)
        inner = experts.act_fn(gate) * up * weights.tensor[:, None]
        return recomputation.product(expert_products, inner.to(rows.dtype), experts.down_proj, counts)

    def strength(self, config: Any) -> float:
        """Return the factor of the balance loss of one layer and one sample."""
        keys = self.facts.experts
        assert keys is not None
        read = self.facts.configured(vars(config))
        of_layer: float = read[keys.balance]
        of_model = sum(kind in keys.types for kind in self.facts.layers(read))
        return of_layer / (read[keys.top_k] if keys.balance_of == "layer" else of_model)


class Unseen:
    """A tensor that goes into or out of a module, of which FSDP2 knows nothing.

    Weights of experts' results stay in float32, whatever format experts compute in. The gradient of a block's loss
    follows that of its output, whose nodes autograd works on first since they are younger: where FSDP2 hears of both it
    gathers the experts, which are next, once more.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Noted(Unseen):
    """The balance loss of a block, and how often each expert was chosen for this rank's positions [experts]."""

    def __init__(self, loss: Tensor, counts: Tensor) -> None:
        super().__init__(loss)
        self.counts = counts


def balance(probabilities: Tensor, counts: Tensor, length: int) -> Tensor:
    """Return the sum over samples of E sum_e f_e P_e (Fedus et al. 2021), for E experts and samples of a `length`.

    f_e: how often expert e is chosen for a position, from `counts` [samples, E]; P_e: its mean probability, of which
    the `probabilities` [samples, positions, E] of some positions give a part. A batch of several samples has the same
    loss in one microbatch and in many.
    """
    often = counts / length
    return counts.shape[-1] * (often.to(probabilities.dtype) * probabilities.sum(1) / length).sum()


def _forward(part: Any, hidden: Tensor) -> Tensor:
    """Return the sum of the chosen experts' results for states [samples, positions, hidden] of a stock sparse part.

    Experts that compute every position add theirs.
    """
    tensor_parallel: TensorParallel = part.tensor_parallel
    grid: TensorParallel | None = part.experts.tensor_parallel
    samples, positions, _ = hidden.shape
    x = hidden.flatten(0, 1)
    choice = part.choose(x)
    # The loss needs them of each sample, over all ranks that share it; a step, this rank's.
    counts = _counts(choice.experts.view(samples, -1), choice.probabilities.shape[-1])
    rows = dispatch(choice.experts, counts.sum(0))
    loss = _loss(choice.probabilities.unflatten(0, (samples, positions)), counts, tensor_parallel, grid is not None)
    # A replay computes it like the pass before, but nothing is noted twice.
    if part.losses is not None:
        part.losses.append((part.strength * loss, rows.counts))
    weights, recomputation = rows.sort_copies(choice.weights), tensor_parallel.recomputation
    if grid is None:
        results = rows.collect(part.experts(rows.sort(x), Unseen(weights), rows.counts, recomputation))
        return tensor_parallel.leave(_with_shared(part, hidden, results.view_as(hidden)))
    if grid.size == 1 and grid.expert_group is None:
        results = part.experts(rows.sort(x), Unseen(weights), rows.counts, recomputation)
    else:
        features = grid.group if grid.size > 1 else None
        away = exchange(rows.counts, len(weights), grid.expert_group, features)
        # No name holds rows that were sent, while experts work.
        sent = away.there(rows.sort(x)), Unseen(away.there(weights))
        results = away.back(part.experts(*sent, away.counts, recomputation))
    results = rows.collect(results).view_as(hidden)
    # Nothing else is summed over ranks, but a replay needs no results of experts.
    return recomputation.sum(lambda output: output, _with_shared(part, hidden, results, tensor_parallel.leave))


def _with_shared(part: Any, hidden: Tensor, results: Tensor, leave: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return results and those of shared experts, which `leave` sums over ranks; None: all are summed later."""
    if (shared := getattr(part, "shared_experts", getattr(part, "shared_expert", None))) is None:
        return results
    always: Tensor = shared(hidden)
    return results + (always if leave is None else leave(always))


def _counts(index: Tensor, experts: int) -> Tensor:
    """Return how often each expert is chosen in each sample [samples, experts]: whole numbers, in any order."""
    ones = index.new_ones((), dtype=torch.int32).expand_as(index)
    return index.new_zeros(len(index), experts, dtype=torch.int32).scatter_add_(1, index, ones)


def _loss(probabilities: Tensor, counts: Tensor, tensor_parallel: TensorParallel, is_outside: bool) -> Tensor:
    """Return this rank's part of the balance loss, or all of it where ranks hold replicas of the states.

    `is_outside`: each rank has its positions between regions, not those of its tensor-parallel group.
    """
    length, ranks = probabilities.shape[1], 1 if is_outside else tensor_parallel.size
    for group in _sharing_positions(tensor_parallel, is_outside):
        dist.all_reduce(counts, group=group)
        length *= group.size()
    # Inside a region the gradients of all its ranks add up.
    part, replicas = balance(probabilities, counts, length) / ranks, tensor_parallel.axes.layout.replicas
    return with_transpose(part, lambda x: x * replicas, lambda gradient: gradient) if replicas > 1 else part


def _sharing_positions(tensor_parallel: TensorParallel, is_outside: bool) -> Iterator[dist.ProcessGroup]:
    """Yield the groups over which positions of a sample are shared out where its experts are chosen."""
    if tensor_parallel.splits_everything or (is_outside and tensor_parallel.sums_outside):
        yield tensor_parallel.sequence_group
    if tensor_parallel.axes.shares_context:
        yield tensor_parallel.context_group


def _taken(part: Any) -> "_Noted":
    (noted,) = part.losses
    part.losses = None
    return _Noted(*noted)
