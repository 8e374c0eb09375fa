"""The order in which a plan lays out the positions of a sample, so that causal attention is as much work everywhere."""

from shardwright.types import Plan


def position_order(plan: Plan, causal: bool) -> tuple[int, ...] | None:
    """Return the positions of a sample in the order in which a plan's ranks have them; None if it is unchanged.

    They keep their order where no rank attends to positions of others, and where attention is not causal.
    """
    parts = max(strategy.cp_size for strategy in (plan.embedding, *plan.layers, plan.head))
    return zigzag(plan.model.sequence_length, parts) if causal and parts > 1 else None


def zigzag(length: int, parts: int) -> tuple[int, ...]:
    """Return the positions of a sample in 2 x parts equal chunks: the first, the last, the second, the last but one.

    Under a causal mask each pair of chunks is as much work as another (Grattafiori et al. 2024), so that contiguous
    shares of whole pairs are, for every number of ranks that divides `parts`.
    """
    size = length // (2 * parts)
    chunks = (chunk for pair in range(parts) for chunk in (pair, 2 * parts - 1 - pair))
    return tuple(position for chunk in chunks for position in range(chunk * size, (chunk + 1) * size))
