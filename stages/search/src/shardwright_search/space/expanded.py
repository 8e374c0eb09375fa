"""Configurations split where what is searched must be told apart: shared strategies, buffers, types of end stages."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, product

from shardwright_formats.types import LayerStrategy
from shardwright_search.cost_model.tied_weights import has_shared
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.instance import Instance
from shardwright_search.space.request import StageWidths


def expanded(instance: Instance, every: Iterable[Configuration]) -> Iterator[Configuration]:
    """Those in which something has a plan, split where all layers share a strategy or a buffer is counted."""
    for configuration in chain.from_iterable(map(partial(_by_ends, instance), _listed(instance, every))):
        if not instance.choices.has_plans(configuration):
            continue
        shared: Sequence[LayerStrategy | None] = [None]
        if not instance.request.fine_grained:
            shared = instance.choices.layer_strategies(configuration)
        for layers in shared:
            split = configuration._replace(layers=layers)
            if not instance.request.megatron_gather_buffer:
                yield split
                continue
            for tokens in instance.choices.buffer_tokens(split):
                if instance.choices.has_plans(here := split._replace(buffer_tokens=tokens)):
                    yield here


def _listed(instance: Instance, every: Iterable[Configuration]) -> Iterator[Configuration]:
    """With stages of equal width, where there are such, for those that are not listed."""
    for configuration in every:
        if instance.choices.is_listed(configuration):
            yield configuration
        elif instance.costs.cluster.num_devices % configuration.pp_size == 0:
            yield configuration._replace(widths=StageWidths.EQUAL)


def _by_ends(instance: Instance, configuration: Configuration) -> Iterator[Configuration]:
    """Split by the node types of the first and last stage where what ties cost depends on them: bounds know one tie."""
    model, names = instance.costs.model, instance.stage_types
    if len(names) == 1 or configuration.num_chunks > 1 or not (model.tied or has_shared(model)):
        yield configuration
        return
    for first, last in product(names, repeat=2):
        yield configuration._replace(ends=(first, last))
