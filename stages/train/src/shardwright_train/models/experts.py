"""Families with experts: Mixtral (Jiang et al. 2024), Qwen3-MoE (2025), DeepSeek-V2 and V3 (2024), Llama 4 (2025).

A router chooses k of E experts for each position; the block's result is the sum of their results, weighted by the
router's probabilities. The balance loss, E sum_e f_e P_e (Fedus et al. 2021), is smallest if all experts are chosen
equally often.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from shardwright.io import BadInput
from shardwright.models.families.llama4 import ROTATED_DENSE, ROTATED_SPARSE, TYPES
from shardwright.models.traits import BLOCK, DENSE, SPARSE
from shardwright.plan.communication import shares_experts
from shardwright.types import LayerStrategy, Model, Strategy, base_type
from shardwright_train.data.share import Batch
from shardwright_train.models.llama import Llama
from shardwright_train.models.masks import Places
from shardwright_train.models.stock import States, WithLoss
from shardwright_train.parallel.checkpointing import Recomputation
from shardwright_train.parallel.collectives import with_transpose
from shardwright_train.parallel.experts import Counts, Dispatch, ExpertOrder, dispatch, exchange, expert_products
from shardwright_train.parallel.low_rank import routing_matrix, with_rows_of_pair
from shardwright_train.parallel.sharding_rules import BUFFER, INSIDE, Parts, Rule
from shardwright_train.parallel.tensor import TensorParallel

# Routers: they choose as the stock ones do, bit for bit in float32 and narrower formats.


class Choice(NamedTuple):
    """The experts that a router chose, and their weights."""

    probabilities: Tensor
    """Probabilities of all experts [positions, experts], in float32 or wider."""
    experts: Tensor
    """Experts of each position [positions, top_k]."""
    weights: Tensor
    """Weights of their results [positions, top_k], in the format of the probabilities."""


def chosen(x: Tensor, matrix: Tensor, top_k: int, normed: bool) -> Choice:
    """Return the experts with the highest probabilities for positions x [positions, hidden].

    `matrix` [experts, hidden]: the router's matrix. `normed`: whether weights are divided by their sum.
    """
    logits = linear(x, matrix)
    probabilities = logits.softmax(-1, dtype=_wide_format(logits))
    weights, index = probabilities.topk(top_k, -1)
    return Choice(probabilities, index, weights / weights.sum(-1, keepdim=True) if normed else weights)


def scored(x: Tensor, router: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the probabilities by a router with weight, bias and `top_k`, and scores and indices of the best experts.

    Probabilities [positions, experts] and scores [positions, top_k] are in float32 or wider.
    """
    logits = linear(x, router.weight, getattr(router, "bias", None))
    scores, index = logits.topk(router.top_k, -1)
    return logits.softmax(-1, dtype=_wide_format(logits)), scores.to(_wide_format(logits)), index


def wide_logits(x: Tensor, matrix: Tensor) -> Tensor:
    """Return the scores [positions, experts] by a router's matrix, computed in float32 or wider."""
    logits: Tensor = _Widened.apply(x, matrix)  # type: ignore[no-untyped-call]
    return logits


def wide(x: Tensor) -> Tensor:
    """Return a tensor in float32, or unchanged if its format is wider."""
    return x.to(_wide_format(x))


def in_best_groups(best: Tensor, number: int, scores: Tensor) -> Tensor:
    """Return which experts [positions, experts] are in the `number` groups with the best scores [positions, groups]."""
    index = best.topk(number, -1, sorted=False).indices
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, index, True)
    return chosen.repeat_interleave(scores.shape[-1] // best.shape[-1], -1)


def _wide_format(x: Tensor) -> torch.dtype:
    return torch.promote_types(torch.float32, x.dtype)


class _Widened(torch.autograd.Function):
    """A matrix product in float32 or wider that saves its inputs in their own format."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(x, matrix)
        return linear(wide(x), wide(matrix))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, matrix = ctx.saved_tensors
        return (gradient @ wide(matrix)).to(x.dtype), (gradient.T @ wide(x)).to(matrix.dtype)


# Mixtral and Qwen3-MoE: Llama with experts in some or all blocks.


class Sparse(Llama):
    """Llama's rules, and experts that are sharded over ranks, whole or by features.

    The stock modules hold the parameters; what they compute is rewritten, without the stock's loop over experts.
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
    """Paths in a block of the shared experts, which compute every position, if there are any."""
    returns_scores: bool = False
    """Whether the stock feed-forward part also returns the router's scores, which blocks ignore."""

    def block(self, stock: Any, kind: str, index: int) -> nn.Module:
        """Return a stock block; a block with experts also returns the balance loss."""
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
        """Return the parts of a type of block; with expert parallelism, the expert part does not need all positions."""
        parts = super().parts_of(kind, strategy)
        if parts is None or not shares_experts(strategy):
            return parts
        return parts._replace(products=(*parts.attention, *self.always))

    def units(self, kind: str, strategy: Strategy) -> Mapping[str, Strategy]:
        """Return the strategy of the experts if it differs from the strategy of the layer."""
        grid = strategy.expert_grid if isinstance(strategy, LayerStrategy) else None
        return {} if grid is None else {f"{self.part}.experts": grid}

    def call(self, block: nn.Module, states: States, batch: Batch, constants: dict[str, Any]) -> States | WithLoss:
        """Run a block; a block with experts returns its balance loss, too."""
        try:
            output: Any = super().call(block, states, batch, constants)[0]
        finally:
            # A replay ends with an error once it has what it needs: a loss that it noted would keep its tensors alive.
            if hasattr(part := block.get_submodule(self.part), "losses"):
                part.losses = None  # type: ignore[assignment]
        if not isinstance(output, tuple):
            return (output,)
        noted: _Noted = output[1]
        return WithLoss((output[0],), noted.tensor, noted.counts)

    def after_split(self, block: nn.Module, config: Any, tensor_parallel: TensorParallel) -> None:
        """Give experts their groups of ranks, and mark shared experts' last matrix product as only needed for a sum."""
        super().after_split(block, config, tensor_parallel)
        summed = [f"{path}.down_proj" for path in self.always]
        for last in (module for name, module in block.named_modules() if name in summed):
            last.forward = partial(tensor_parallel.recomputation.product, last.forward)
        block.get_submodule(self.part).tensor_parallel = tensor_parallel  # type: ignore[assignment]

    def choose(self, part: Any, x: Tensor) -> Choice:
        """Return the router's choice in a block's feed-forward part for positions x [positions, hidden]."""
        return chosen(x, routing_matrix(part.gate), part.gate.top_k, getattr(part.gate, "norm_topk_prob", True))

    def compute(self, part: Any, hidden: Tensor) -> Any:
        """Return the output of the stock feed-forward part for states [samples, positions, hidden]."""
        return (_forward(part, hidden), None) if self.returns_scores else _forward(part, hidden)

    def compute_experts(
        self, experts: Any, rows: Tensor, weights: "Unseen", counts: Counts, recomputation: Recomputation
    ) -> Tensor:
        """Return the weighted results of experts for rows sorted by expert, for this rank's features only.

        Rows are weighted before the last matrix product, which is linear: so its results need not be kept.
        """
        gate_up = expert_products(rows, experts.gate_up_proj.flatten(1, -2), counts)
        gate_up = with_rows_of_pair(gate_up, experts, "gate_up_proj", rows, counts, recomputation)
        inner = recomputation.of_experts(partial(_weighted_gate, experts.act_fn), gate_up, weights.tensor)
        results = recomputation.product(expert_products, inner, experts.down_proj, counts)
        return with_rows_of_pair(results, experts, "down_proj", inner, counts, recomputation)

    def strength(self, config: Any) -> float:
        """Return the factor of the balance loss of one layer and one sample."""
        keys = self.facts.experts
        assert keys is not None
        read = self.facts.configured(vars(config))
        of_layer: float = read[keys.balance]
        of_model = sum(kind in keys.types for kind in self.facts.layers(read))
        return of_layer / (read[keys.top_k] if keys.balance_of == "layer" else of_model)


def _gate(activation: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return up * activation(gate)


def _weighted_gate(activation: Callable[[Tensor], Tensor], gate_up: Tensor, weights: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return (activation(gate) * up * weights[:, None]).to(gate_up.dtype)


class Unseen:
    """A tensor passed into or out of a module, hidden from FSDP2's hooks.

    Weights of experts' results stay in float32, whatever format experts compute in. Autograd computes the gradient of a
    block's loss after the gradient of its output, whose nodes are younger: if FSDP2 sees both, it gathers the experts,
    which come next, once more.
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

    f_e: how often expert e is chosen per position, from `counts` [samples, E]; P_e: its mean probability, to which
    the `probabilities` [samples, positions, E] of some positions contribute their part. The loss of several samples is
    the same in one microbatch and in many.
    """
    often = counts / length
    return counts.shape[-1] * (often.to(probabilities.dtype) * probabilities.sum(1) / length).sum()


def _forward(part: Any, hidden: Tensor) -> Tensor:
    """Return the sum of the chosen experts' results, in a stock sparse part, for states [samples, positions, hidden].

    The results of shared experts, which compute every position, are added.
    """
    tensor_parallel: TensorParallel = part.tensor_parallel
    grid: TensorParallel | None = part.experts.tensor_parallel
    samples, positions, _ = hidden.shape
    x = hidden.flatten(0, 1)
    choice = part.choose(x)
    # The loss needs counts for each sample, over all ranks with parts of it; a step only needs this rank's counts.
    counts = _counts(choice.experts.view(samples, -1), choice.probabilities.shape[-1])
    assignments = counts.sum(0)
    rows = _dispatched(choice.experts, assignments, None if grid is None else grid.expert_order)
    loss = _loss(choice.probabilities.unflatten(0, (samples, positions)), counts, tensor_parallel, grid is not None)
    # A replay computes the loss like the forward pass, but must not note it again.
    if part.losses is not None:
        part.losses.append((part.strength * loss, assignments))
    weights, recomputation = rows.sort_copies(choice.weights), tensor_parallel.recomputation
    here = Counts(rows.counts, recomputation.read)
    if grid is None:
        results = rows.collect(part.experts(rows.sort(x), Unseen(weights), here, recomputation))
        return tensor_parallel.leave(_with_shared(part, hidden, results.view_as(hidden)))
    if grid.size == 1 and grid.expert_group is None:
        results = part.experts(rows.sort(x), Unseen(weights), here, recomputation)
    else:
        features = grid.group if grid.size > 1 else None
        away = exchange(rows.counts, len(weights), grid.expert_group, features, recomputation.read)
        # No variable keeps the sent rows alive while experts compute.
        sent = away.there(rows.sort(x)), Unseen(away.there(weights))
        results = away.back(part.experts(*sent, away.counts, recomputation))
    results = rows.collect(results).view_as(hidden)
    # Nothing is summed over ranks here, but this way a replay needs no results of experts.
    return recomputation.sum(lambda output: output, _with_shared(part, hidden, results, tensor_parallel.leave))


def _with_shared(part: Any, hidden: Tensor, results: Tensor, leave: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return the results plus the shared experts' results, which `leave` sums over ranks; None: summed later."""
    if (shared := getattr(part, "shared_experts", getattr(part, "shared_expert", None))) is None:
        return results
    always: Tensor = shared(hidden)
    return results + (always if leave is None else leave(always))


def _dispatched(index: Tensor, counts: Tensor, order: ExpertOrder | None) -> Dispatch:
    """Return the order of positions for the experts `index` [positions, copies], which lie on ranks in `order`."""
    return dispatch(index, counts) if order is None else dispatch(order.places[index], counts[order.experts])


def _counts(index: Tensor, experts: int) -> Tensor:
    """Return how often each expert is chosen in each sample [samples, experts], in whole numbers."""
    ones = index.new_ones((), dtype=torch.int32).expand_as(index)
    return index.new_zeros(len(index), experts, dtype=torch.int32).scatter_add_(1, index, ones)


def _loss(probabilities: Tensor, counts: Tensor, tensor_parallel: TensorParallel, is_outside: bool) -> Tensor:
    """Return this rank's part of the load-balancing loss, or all of it if ranks hold replicas of the states.

    `is_outside`: whether a rank routes only its own positions, not all positions of its tensor-parallel group.
    """
    length, ranks = probabilities.shape[1], 1 if is_outside else tensor_parallel.size
    for group in _sharing_positions(tensor_parallel, is_outside):
        dist.all_reduce(counts, group=group)
        length *= group.size()
    # Inside a region the gradients of all its ranks add up.
    part, replicas = balance(probabilities, counts, length) / ranks, tensor_parallel.axes.layout.replicas
    return with_transpose(part, lambda x: x * replicas, lambda gradient: gradient) if replicas > 1 else part


def _sharing_positions(tensor_parallel: TensorParallel, is_outside: bool) -> Iterator[dist.ProcessGroup]:
    """Yield the groups whose ranks hold different positions of a sample when its experts are chosen."""
    if tensor_parallel.splits_everything or (is_outside and tensor_parallel.sums_outside):
        yield tensor_parallel.sequence_group
    if tensor_parallel.axes.shares_context:
        yield tensor_parallel.context_group


def _taken(part: Any) -> "_Noted":
    (noted,) = part.losses
    part.losses = None
    return _Noted(*noted)


# DeepSeek-V2 and V3: attention from latents, shared experts, and experts chosen in groups.


_LATENT = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")
_LEAST = 1e-20
"""Number that V3 adds to the sum by which it divides weights."""


class DeepseekV2(Sparse):
    """Blocks whose heads share a latent, which is replicated on each rank; routers choose the highest probabilities."""

    plan = {
        **Sparse.plan,
        **dict.fromkeys((f"self_attn.{name}" for name in _LATENT), INSIDE),
        **dict.fromkeys(("self_attn.q_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj"), "colwise"),
        "self_attn.o_proj": "rowwise",
        # Summed over ranks together with the other experts' results.
        "mlp.shared_experts.down_proj": Rule("cut", dim=1),
    }
    always = ("mlp.shared_experts",)

    def choose(self, part: Any, x: Tensor) -> Choice:
        """Return the choice of a router by probabilities, only in the best groups if there are groups."""
        config, probabilities = part.config, wide_logits(x, routing_matrix(part.gate)).softmax(-1)
        allowed = probabilities
        if config.topk_method == "group_limited_greedy":
            best = probabilities.unflatten(-1, (config.n_group, -1)).max(-1).values
            allowed = probabilities.masked_fill(~in_best_groups(best, config.topk_group, probabilities), 0.0)
        weights, index = allowed.topk(config.num_experts_per_tok, -1, sorted=False)
        return Choice(probabilities, index, weights * config.routed_scaling_factor)


class DeepseekV3(DeepseekV2):
    """Blocks whose router scores with a sigmoid, and chooses by scores plus correction biases."""

    plan = {**DeepseekV2.plan, "mlp.gate.e_score_correction_bias": BUFFER}

    def skeleton(self, config: Any) -> Any:
        """Return the stock model with its router biases, which are buffers, as parameters without gradients."""
        stock = super().skeleton(config)
        for gate in (module for name, module in stock.named_modules() if name.endswith("mlp.gate")):
            bias = gate.e_score_correction_bias
            del gate.e_score_correction_bias
            gate.e_score_correction_bias = nn.Parameter(wide(bias), requires_grad=False)
        return stock

    def may_lack(self, model: Model, name: str) -> bool:
        """Return whether a file's parameter belongs to layers after the last one, which predict further tokens."""
        number = name.removeprefix("model.layers.").partition(".")[0]
        return number.isdigit() and int(number) >= len(model.layers)

    def choose(self, part: Any, x: Tensor) -> Choice:
        """Return a router's choice by corrected scores, in the best groups; weights come from uncorrected scores."""
        config, scores = part.config, wide_logits(x, routing_matrix(part.gate)).sigmoid()
        corrected = scores.detach() + part.gate.e_score_correction_bias
        best = corrected.unflatten(-1, (config.n_group, -1)).topk(2, -1).values.sum(-1)
        allowed = corrected.masked_fill(~in_best_groups(best, config.topk_group, corrected), float("-inf"))
        index = allowed.topk(config.num_experts_per_tok, -1, sorted=False).indices
        weights = scores.gather(1, index)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + _LEAST)
        return Choice(scores / scores.sum(-1, keepdim=True), index, weights * config.routed_scaling_factor)


# Llama 4: a shared expert, and inputs weighted before the experts.


class Llama4(Sparse):
    """Experts whose inputs are weighted, with a shared expert for all positions; rotary positions use complex pairs."""

    parts = dict.fromkeys(TYPES, Parts("model.layers", attention=("self_attn",), mlp=("feed_forward",)))
    plan = {
        **Llama.plan,
        "feed_forward.router": INSIDE,
        "feed_forward.experts.gate_up_proj": Rule("cut", fused=2, dim=2, ep_dim=0),
        "feed_forward.experts.down_proj": Rule("cut", dim=1, ep_dim=0),
        # Summed over ranks together with the other experts' results.
        "feed_forward.shared_expert.down_proj": Rule("cut", dim=1),
    }
    part = "feed_forward"
    always = ("feed_forward.shared_expert",)
    returns_scores = True

    def choose(self, part: Any, x: Tensor) -> Choice:
        """Return the choice of a router, whose weights are sigmoids of the chosen experts' scores."""
        probabilities, scores, index = scored(x, part.router)
        return Choice(probabilities, index, scores.sigmoid())

    def compute_experts(
        self, experts: Any, rows: Tensor, weights: Unseen, counts: Counts, recomputation: Recomputation
    ) -> Tensor:
        """Return the results of experts for rows that are weighted first."""
        rows = (rows * weights.tensor[:, None]).to(rows.dtype)
        first, last = experts.gate_up_proj.flatten(2).transpose(1, 2), experts.down_proj.transpose(1, 2)
        gate_up = expert_products(rows, first, counts)
        inner = recomputation.of_experts(partial(_gate, experts.act_fn), gate_up)
        return recomputation.product(expert_products, inner, last, counts)

    def constants(self, model: Model, kind: str, places: Places, *others: Any) -> dict[str, Any]:
        """Return the usual constants; raise BadInput for parts of a sequence if queries are scaled by position.

        Stock blocks without rotary positions count positions from the first one that they are given.
        """
        config, rotates = self.configuration(model), base_type(kind) in (ROTATED_SPARSE, ROTATED_DENSE)
        scales = config.attn_temperature_tuning and model.sequence_length >= config.floor_scale and not rotates
        if scales and (places.computed != slice(0, model.sequence_length) or places.order is not None):
            problem = (
                f"ulysses and cp_size above 1: not supported when queries scale with their position ({kind} layers)"
            )
            raise BadInput(f"model {model.name}", problem, "use megatron, or set attn_temperature_tuning to false")
        return super().constants(model, kind, places, *others)
