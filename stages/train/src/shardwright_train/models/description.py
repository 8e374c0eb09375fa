"""The model as the planner sees it, read off its family's modules on the meta device."""

from functools import partial
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from shardwright_formats.types.model import EMBEDDING, HEAD, BoundaryTensor, Heads, LayerType, Model, Parameter, Region
from shardwright_train.models.base import Family
from shardwright_train.models.configuration import check_only, check_sizes, described_keys
from shardwright_train.models.stock import skeleton
from shardwright_train.parallel.sharding_rules import cuts


def describe(family: Family, config: dict[str, Any], name: str, sequence_length: int) -> Model:
    """Describe the model of a config.json.

    Raises ValueError saying what in the configuration cannot be trained.
    """
    parsed = family.configured(config)
    check_only(config, family.only)
    check_sizes(parsed, family.counts, sequence_length)
    layers = tuple(kind for kind, parts in family.parts.items() for _ in range(getattr(parsed, parts.counted_by)))
    stock = skeleton(family.stock, parsed)
    kinds = (EMBEDDING, *dict.fromkeys(layers), HEAD)
    return Model(
        name=name,
        family=family.name,
        config=described_keys(config, parsed, family.counts),
        sequence_length=sequence_length,
        layers=layers,
        types={kind: _layer_type(family, stock, kind, sequence_length) for kind in kinds},
        tied=family.tied if getattr(parsed, "tie_word_embeddings", False) else (),
    )


def _layer_type(family: Family, stock: Any, kind: str, sequence_length: int) -> LayerType:
    config, inside = stock.config, kind in family.parts
    module = family.module(stock, kind, 0)
    parameters = tuple(
        Parameter(
            name=family.described_name(kind, cut.name),
            shape=cut.shape,
            tp_dim=cut.tp_dim,
            inside=cut.inside,
            shared=inside and cut.name in family.shared,
        )
        for cut in cuts(module, family.rules)
    )
    objective = family.objective.of(config, sequence_length)
    boundary = partial(BoundaryTensor, sequence_length=sequence_length, features=config.hidden_size)
    attention = sequence_length * len(family.keys(kind)) if inside else 0
    positions = {EMBEDDING: sequence_length - objective.no_inputs, HEAD: objective.labels}
    return LayerType(
        parameters=parameters,
        forward_flops_per_sample=_forward_flops(module, config, attention) * positions.get(kind, sequence_length),
        tp_must_divide=_lengths(config, family.divided if inside else (), family.undivided.get(kind)),
        ulysses_must_divide=_lengths(
            config, family.divided[:1] if inside else (), family.undivided_by_ulysses.get(kind)
        ),
        outputs=() if kind == HEAD else tuple(boundary(name=name) for name in family.states),
        regions=_regions(family, kind, config, any(p.tp_dim is not None for p in parameters)),
        labels=objective.labels if kind == HEAD else 0,
    )


def _regions(family: Family, kind: str, config: Any, is_cut: bool) -> tuple[Region, ...]:
    """Where tensor parallelism communicates in a layer."""
    own = family.keys(kind)[0]
    if kind == EMBEDDING:
        return tuple(Region(name="lookup", leaves=name) for name in family.states if is_cut)
    if kind == HEAD:
        return (Region(name="logits", enters=tuple(family.states)[-1:]),)
    replays: Any = family.replays_sum(config)
    attention = (
        Region(
            name="attention",
            enters=tuple(dict.fromkeys((own, keys))),
            leaves=own,
            attention=_heads(config, own, keys),
            replays_sum=replays,
        )
        for keys in family.keys(kind)
    )
    return (*attention, Region(name="mlp", enters=(own,), leaves=own, replays_sum=replays))


def _heads(config: Any, queries: str, keys: str) -> Heads:
    """The heads of a configuration's attention between two boundary tensors."""
    heads = config.num_attention_heads
    return Heads(
        queries=queries,
        keys=keys,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_features=_head_features(config),
    )


def _head_features(config: Any) -> int:
    given: int | None = getattr(config, "head_dim", None)
    return given or int(config.hidden_size // config.num_attention_heads)


def _lengths(config: Any, divided: tuple[str, ...], undivided: str | None) -> dict[str, int]:
    return {key: getattr(config, key) for key in divided} | ({} if undivided is None else {undivided: 1})


def _forward_flops(module: nn.Module, config: Any, attention_positions: int) -> int:
    """Of one position: 2 per weight of a matrix, and 4 per hidden feature of the heads and position attended to."""
    matrices = (m for m in module.modules() if isinstance(m, nn.Linear | nn.Conv2d | Conv1D))
    attention = 4 * attention_positions * _head_features(config) * config.num_attention_heads
    return 2 * sum(m.weight.numel() for m in matrices) + int(attention)
