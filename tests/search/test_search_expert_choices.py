"""Experts are shared out by the search: its optimum is that of all plans of the space, each priced by itself."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path

import pytest
from made_up import make_request
from msgspec import UNSET
from msgspec.structs import replace
from test_search_context import CONFIG as DENSE
from test_search_shared_experts import CLUSTER, MODEL, plan_of, profiles

from shardwright.io import BadInput
from shardwright.models.description import model_of_config
from shardwright.plan.process_groups import PlannedGroup, strategy_axes, strategy_groups
from shardwright.types import HEAD, Model, Plan
from shardwright.types.strategy import DataParallel, LayerStrategy, SequenceParallel, Strategy
from shardwright_search.cost_model.plan import Evaluation, evaluate
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.explain.what_if import _kinds
from shardwright_search.search import SearchAnswer, find_best
from shardwright_search.space.choices import shardings
from shardwright_search.space.configurations import configurations, narrowed
from shardwright_search.space.request import SearchRequest

_ = profiles
FILE = Path("s.json")
ASKED = {
    "global_batch_size": 8, "num_microbatches": [2], "pp_sizes": [1], "tp_sizes": [1, 2], "ep_sizes": [1, 2, 4],
    "etp_sizes": [1, 2], "sequence_parallel": ["none", "megatron"], "recompute": ["none"],
    "data_parallel": ["zero2"], "expert_data_parallel": ["zero2", "zero3"],
    "head": {"tp_sizes": [1], "data_parallel": ["zero2"]},
    "embedding": {"tp_sizes": [1], "data_parallel": ["zero2"]},
}  # fmt: skip


def request_of(**asked: object) -> SearchRequest:
    return make_request(**ASKED | asked)


def test_each_way_to_share_experts_out_is_listed_once() -> None:
    listed = shardings(request_of(), MODEL, "sparse", 4)
    assert all(isinstance(each, LayerStrategy) for each in listed) and len(set(listed)) == len(listed)
    shared = [s for s in listed if isinstance(s, LayerStrategy) and s.experts is not UNSET]
    degrees = Counter((s.tp_size, s.data_parallel, s.experts.ep_size, s.experts.etp_size) for s in shared if s.experts)
    assert degrees[1, DataParallel.ZERO2, 4, 1] == 1, "one rank for each part: nothing to share states out among"
    assert degrees[1, DataParallel.ZERO2, 2, 1] == degrees[2, DataParallel.ZERO2, 1, 2] == 2
    assert degrees[1, DataParallel.ZERO2, 1, 1] == 1, (
        "experts whole on each rank under the layer's kind are the layer's"
    )
    assert {s.sequence_parallel for s in shared if s.tp_size > 1} == {SequenceParallel.MEGATRON}
    assert not any(
        isinstance(s, LayerStrategy) and s.experts for s in shardings(request_of(ep_sizes=[]), MODEL, "sparse", 4)
    )


def every_plan(request: SearchRequest, model: Model) -> Iterator[Plan]:
    """All plans of one stage and one layout of its ends."""
    (head,) = shardings(request, model, HEAD, 4)
    for layers in product(*(shardings(request, model, name, 4) for name in model.layers)):
        plan = replace(plan_of(UNSET), model=model, embedding=head, head=head, num_microbatches=2)
        yield replace(plan, layers=tuple(layer for layer in layers if isinstance(layer, LayerStrategy)))


MIXED = model_of_config(
    {
        **{"model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 4},
        **{"moe_intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4},
        **{"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 2},
    },
    "m", 16, "config.json",
)  # fmt: skip


@pytest.fixture(scope="module")
def priced(profiles: Profiles) -> list[Evaluation]:
    return [evaluate(plan, profiles, timeline=False) for plan in every_plan(request_of(), MODEL)]


@pytest.mark.parametrize("share", [1.0, 0.9, 0.8])
def test_the_optimum_is_the_best_of_all_plans_that_fit(
    share: float, priced: list[Evaluation], profiles: Profiles
) -> None:
    assert len(priced) > 300
    needs = [max(stage.memory_bytes for stage in each.estimate.stages) for each in priced]
    budget = min(needs) + share**8 * (max(needs) - min(needs))
    fitting = [each.objective_ps for each, need in zip(priced, needs, strict=True) if need <= int(budget)]
    asked = replace(request_of(), memory_gib=budget / 2**30)
    answer = find_best(asked, MODEL, CLUSTER, profiles, FILE, lambda line: None)
    assert isinstance(answer, SearchAnswer)
    assert answer.optimum_s == pytest.approx(min(fitting) / 1e12, rel=1e-12)
    assert answer.optimum_s == pytest.approx(answer.bound_s, rel=1e-3)


def test_explain_asks_for_plans_without_a_grid_and_without_folding(profiles: Profiles) -> None:
    (plan,) = (each for each in islice(every_plan(request_of(), MODEL), 1))
    kinds = dict(_kinds(plan, request_of(), FILE))
    assert kinds["experts sharded as the rest of their layer"].ep_sizes == ()
    assert [kind for kind in kinds if kind.startswith("ep_size")] == [f"ep_size {n} or none" for n in (1, 2, 4)]
    folded = [(each.tp_sizes, each.etp_sizes) for kind, each in kinds.items() if kind.startswith("no folding")]
    assert folded == [((1,), (1,)), ((2,), (2,))]
    assert not any("ep_size" in kind or "fold" in kind for kind in dict(_kinds(plan, request_of(ep_sizes=[]), FILE)))


def test_degrees_that_no_stage_has_and_spaces_without_any_are_told(profiles: Profiles) -> None:
    with pytest.raises(BadInput, match="ep_sizes: 3 does not divide the number of devices, 4"):
        find_best(request_of(ep_sizes=[3]), MODEL, CLUSTER, profiles, FILE, lambda line: None)
    wide = replace(CLUSTER, nodes=(replace(CLUSTER.nodes[0], count=2),))
    with pytest.raises(BadInput, match="ep_sizes: 8 does not divide the experts of any layer: list divisors"):
        configurations(request_of(ep_sizes=[4, 8]), MODEL, wide, FILE)
    dense = model_of_config(DENSE, "m", 16, "config.json")
    with pytest.raises(BadInput, match="ep_sizes: m has no experts to shard: leave it empty"):
        configurations(request_of(ep_sizes=[2]), dense, CLUSTER, FILE)
    assert narrowed(request_of(disable=["expert_parallel"]), CLUSTER).ep_sizes == ()


def test_dense_layers_beside_them_share_nothing_out() -> None:
    listed = [shardings(request_of(), MIXED, name, 4) for name in dict.fromkeys(MIXED.layers)]
    assert [any(isinstance(s, LayerStrategy) and s.experts is not UNSET for s in each) for each in listed] == [
        False,
        True,
    ]


@pytest.mark.parametrize("width", [4, 8])
def test_the_groups_of_a_stage_s_first_rank_are_known_from_its_axes(width: int) -> None:
    """What the search counts of communicators is what plans make, of experts' own grids, too."""
    asked = request_of(tp_sizes=[1, 2, 4], sequence_parallel=["megatron", "ulysses"], shard_sizes=[2], cp_sizes=[1, 2])
    listed = shardings(asked, MODEL, "sparse", width)
    for strategy in listed:
        made = {(each.purpose, each.ranks) for each in groups_of(strategy, width) if 0 in each.ranks}
        axes = {(purpose, tuple(range(0, a.size * a.stride, a.stride))) for purpose, a in strategy_axes(strategy)}
        assert axes == made and len(set(strategy_axes(strategy))) == len(made), strategy
        for rank in range(width):
            assert len({each for each in groups_of(strategy, width) if rank in each.ranks}) == len(made), strategy
    assert len(listed) > 50


def groups_of(strategy: Strategy, width: int) -> list[PlannedGroup]:
    return [each for each in strategy_groups(strategy, tuple(range(width))) if len(each.ranks) > 1]
