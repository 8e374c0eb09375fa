"""The planner's description of a model: its family's facts, and the parameters of its modules on the meta device."""

from typing import Any

from msgspec.structs import replace
from torch import nn
from transformers.pytorch_utils import Conv1D

from shardwright.io import BadInput
from shardwright.models.config_keys import wrong_values
from shardwright.models.description import Contents, described_model, usual_length
from shardwright.models.facts import Family as Facts
from shardwright.types import EMBEDDING, HEAD, Model, Parameter
from shardwright_train.models.base import Family
from shardwright_train.models.configuration import check_only, check_sizes
from shardwright_train.parallel.sharding_rules import cuts


def describe(family: Family, config: dict[str, Any], name: str, sequence_length: int | None) -> Model:
    """Describe the model of a config.json for samples of a length in tokens; None: the default length.

    Raises ValueError saying what in the configuration cannot be trained.
    """
    facts = family.facts
    if (wrong := wrong_values(facts, config)) is not None:
        raise ValueError(wrong)
    parsed = family.configured(config)
    check_only(config, facts)
    if sequence_length is None:
        sequence_length = usual_length(
            facts, facts.completed(facts.of_layer(EMBEDDING, facts.configured(vars(parsed))))
        )
    if sequence_length is None:
        raise BadInput("--sequence-length", "config.json does not state the sample length", "give it, in tokens")
    check_sizes(parsed, facts, sequence_length)
    stock = family.skeleton(parsed)
    family.objective.from_config(stock.config, sequence_length)
    read = facts.completed(facts.of_layer(EMBEDDING, facts.configured(vars(stock.config))))
    layers = facts.described_layers(read, sequence_length)

    def contents(layer: str) -> Contents:
        index = 0 if layer in (EMBEDDING, HEAD) else family.index(layers, layers.index(layer))
        module = family.module(stock, layer, index)
        return Contents(_parameters(family, layer, module), _products(module, facts))

    return described_model(facts, read, config, name, sequence_length, contents)


def _parameters(family: Family, layer: str, module: nn.Module) -> tuple[Parameter, ...]:
    return tuple(
        replace(
            cut.parameter,
            name=family.described_name(layer, cut.name),
            shared=layer in family.parts and cut.name in family.shared,
        )
        for cut in cuts(module, family.rules)
    )


def _products(module: nn.Module, facts: Facts) -> int:
    """Return the number of elements of the matrices, without a router's, which is counted with its experts."""
    router = None if facts.experts is None else facts.experts.router
    bare = sum(p.numel() for name, p in module.named_parameters() if name in facts.stock.matrices)
    parts = (part for name, part in module.named_modules() if name != router)
    return bare + sum(p.weight.numel() for p in parts if isinstance(p, nn.Linear | nn.Conv1d | nn.Conv2d | Conv1D))
