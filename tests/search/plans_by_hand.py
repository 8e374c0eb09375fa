"""All plans of a configuration, put together without the solver."""

from collections.abc import Iterator, Sequence
from itertools import pairwise, product

from shardwright.types import EMBEDDING, HEAD, Cluster, LayerStrategy, Model, PipelineStage, Plan
from shardwright_search.space.choices import shardings
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.request import SearchRequest


def plans_on(
    ranks: Sequence[tuple[int, ...]],
    configuration: Configuration,
    request: SearchRequest,
    model: Model,
    cluster: Cluster,
) -> Iterator[Plan]:
    """Every cut of the layers and every strategy of each, where the ranks of the stages are given."""
    layers, p = len(model.layers), len(ranks)
    for cuts in product(range(layers + 1), repeat=p - 1):
        bounds = list(pairwise((0, *cuts, layers)))
        # The embedding may be alone, and the head.
        if any(low >= high + (stage in (0, p - 1)) for stage, (low, high) in enumerate(bounds)):
            continue
        stage_of = [i for i, (low, high) in enumerate(bounds) for _ in range(low, high)]
        spaces = [
            [
                strategy
                for strategy in shardings(request, model, name, len(ranks[stage]))
                if configuration.microbatch_samples % strategy.dp_size == 0
            ]
            for name, stage in zip((EMBEDDING, *model.layers, HEAD), (0, *stage_of, p - 1), strict=True)
        ]
        for embedding, *blocks, head in product(*spaces):
            yield Plan(
                name=request.name,
                model=model,
                cluster=cluster,
                global_batch_size=request.global_batch_size,
                num_microbatches=configuration.num_microbatches,
                schedule=configuration.schedule,
                stages=tuple(PipelineStage(ranks=r, layers=(b,)) for r, b in zip(ranks, bounds, strict=True)),
                embedding=embedding,
                head=head,
                layers=tuple(block for block in blocks if isinstance(block, LayerStrategy)),
            )
