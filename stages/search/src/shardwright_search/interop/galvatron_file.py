"""Galvatron's strategy file: its content, read strictly and written as its runtime reads it.

Versions: hetu-galvatron 2.4.0 (`utils/config_utils.py`, `core/runtime/hybrid_parallel_config.py` read it,
`core/search_engine/search_engine.py` writes it), and newer ones, which add context and expert parallelism and read
`vocab_sdp` where the search writes `embed_sdp`.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from shardwright_formats.io import BadInput, read_object

Degree = Annotated[int, Meta(ge=1)]
Flag = Literal[0, 1]
PipelineType = Literal["gpipe", "pipedream_flush"]
DataParallelType = Literal["ddp", "zero2", "zero3"]


class GalvatronLayer(NamedTuple):
    """The sharding of one layer, or of embedding and head together."""

    tp_size: int
    """Degree of tensor parallelism, or of Ulysses."""
    tp_consecutive: bool
    zero3: bool
    """Flag of sharding by ZeRO-3 instead of by the file's `default_dp_type`."""
    ulysses: bool
    checkpoint: bool
    """Flag of recomputing the whole layer."""
    experts: tuple[int, int] | None = None
    """Degrees of expert parallelism and of tensor parallelism of experts; None where the file does not say them."""
    cp_size: int = 1
    """Degree of context parallelism, which newer versions have."""


class GalvatronStrategy(NamedTuple):
    """The whole file; keys that older files leave out have the value that their reader takes."""

    layers: tuple[GalvatronLayer, ...]
    vocabulary: GalvatronLayer
    """Embedding and head: never strided, never recomputed."""
    pp_division: tuple[int, ...]
    """Number of layers of each pipeline stage."""
    global_bsz: int
    chunks: int
    pipeline_type: PipelineType
    default_dp_type: DataParallelType


class _Keys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys as they stand in the file; a list of numbers, one for each layer, is a string such as `1,1,2`."""

    pp_deg: Degree
    tp_sizes_enc: str
    tp_consecutive_flags: str
    dp_types_enc: str
    global_bsz: Degree
    chunks: Degree
    pipeline_type: PipelineType
    default_dp_type: DataParallelType
    pp_division: str | None = None
    use_sp: str | None = None
    checkpoint: str | None = None
    vtp: Degree = 1
    vsp: Flag = 0
    embed_sdp: Flag | None = None
    vocab_sdp: Flag | None = None
    vcp: Degree = 1
    cp_sizes_enc: str | None = None
    ep_sizes_enc: str | None = None
    tp_of_ep_sizes_enc: str | None = None


def read_galvatron(path: Path) -> GalvatronStrategy:
    """Read a strategy file; raises BadInput as `strategy_of_keys` does."""
    return strategy_of_keys(read_object(path), path)


def strategy_of_keys(raw: object, path: Path) -> GalvatronStrategy:
    """Return the content of a strategy file.

    Raises BadInput for a key that is unknown, missing or contradicts another, and for features that no plan has.
    """
    try:
        keys = msgspec.convert(raw, _Keys)
    except msgspec.ValidationError as error:
        remedy = "pass a strategy file of Galvatron; what a run's options decide must stand in it"
        raise BadInput(path, str(error), remedy) from None
    sizes = _numbers(path, "tp_sizes_enc", keys.tp_sizes_enc)
    count = len(sizes)
    contexts = _listed(path, keys, "cp_sizes_enc", count, 1)
    if min(contexts) < 1:
        raise BadInput(path, "cp_sizes_enc has a degree below 1", "use degrees from 1")
    flags = [
        _flags(path, name, _listed(path, keys, name, count, 0))
        for name in ("tp_consecutive_flags", "dp_types_enc", "use_sp", "checkpoint")
    ]
    return GalvatronStrategy(
        layers=tuple(
            GalvatronLayer(*layer) for layer in zip(sizes, *flags, _experts(path, keys, count), contexts, strict=True)
        ),
        vocabulary=GalvatronLayer(
            keys.vtp, True, _vocabulary_is_zero3(path, keys), keys.vsp == 1, False, cp_size=keys.vcp
        ),
        pp_division=_division(path, keys, count),
        global_bsz=keys.global_bsz,
        chunks=keys.chunks,
        pipeline_type=keys.pipeline_type,
        default_dp_type=keys.default_dp_type,
    )


def galvatron_keys(strategy: GalvatronStrategy) -> dict[str, int | str]:
    """Return the file's keys: those of 2.4.0, and those that newer versions need, which 2.4.0 ignores."""
    layers, vocabulary = strategy.layers, strategy.vocabulary
    return {
        "pp_deg": len(strategy.pp_division),
        "tp_sizes_enc": _joined(layer.tp_size for layer in layers),
        "tp_consecutive_flags": _joined(layer.tp_consecutive for layer in layers),
        "cp_sizes_enc": _joined(layer.cp_size for layer in layers),
        "dp_types_enc": _joined(layer.zero3 for layer in layers),
        "use_sp": _joined(layer.ulysses for layer in layers),
        "checkpoint": _joined(layer.checkpoint for layer in layers),
        "global_bsz": strategy.global_bsz,
        "chunks": strategy.chunks,
        "pp_division": _joined(strategy.pp_division),
        "pipeline_type": strategy.pipeline_type,
        "default_dp_type": strategy.default_dp_type,
        "vtp": vocabulary.tp_size,
        "vsp": int(vocabulary.ulysses),
        "vcp": vocabulary.cp_size,
        "embed_sdp": int(vocabulary.zero3),
        "vocab_sdp": int(vocabulary.zero3),
        **_expert_keys(layers),
    }


def _expert_keys(layers: Sequence[GalvatronLayer]) -> dict[str, int | str]:
    """Return the degrees of experts, where some layer has any; a layer without has 1."""
    if all(layer.experts is None for layer in layers):
        return {}
    pairs = [layer.experts or (1, 1) for layer in layers]
    return {"ep_sizes_enc": _joined(ep for ep, _ in pairs), "tp_of_ep_sizes_enc": _joined(etp for _, etp in pairs)}


def _experts(path: Path, keys: _Keys, count: int) -> Sequence[tuple[int, int] | None]:
    """Return the degrees of experts in each layer, which older files do not have."""
    if keys.ep_sizes_enc is None and keys.tp_of_ep_sizes_enc is None:
        return [None] * count
    ep_sizes, etp_sizes = (_listed(path, keys, name, count, 1) for name in ("ep_sizes_enc", "tp_of_ep_sizes_enc"))
    if min(*ep_sizes, *etp_sizes) < 1:
        raise BadInput(path, "ep_sizes_enc or tp_of_ep_sizes_enc has a degree below 1", "use degrees from 1")
    return list(zip(ep_sizes, etp_sizes, strict=True))


def _vocabulary_is_zero3(path: Path, keys: _Keys) -> bool:
    """Return `embed_sdp`, which the search writes, or `vocab_sdp`, which newer runtimes read."""
    given = {flag for flag in (keys.embed_sdp, keys.vocab_sdp) if flag is not None}
    if len(given) > 1:
        raise BadInput(path, "embed_sdp and vocab_sdp differ, one is what the other was called", "keep one of them")
    return given == {1}


def _division(path: Path, keys: _Keys, count: int) -> tuple[int, ...]:
    """Return the layers of each pipeline stage; without the key the last takes what an even division leaves."""
    if keys.pp_division is None:
        share = count // keys.pp_deg
        division = (*(share for _ in range(keys.pp_deg - 1)), count - share * (keys.pp_deg - 1))
    else:
        division = _numbers(path, "pp_division", keys.pp_division)
    if len(division) != keys.pp_deg or sum(division) != count or min(division) < 1:
        problem = f"pp_division {_joined(division)} does not share {count} layers out to {keys.pp_deg} pipeline stages"
        raise BadInput(path, problem, "give each of pp_deg stages a layer or more")
    return division


def _listed(path: Path, keys: _Keys, name: str, count: int, absent: int) -> tuple[int, ...]:
    """Return the numbers of a key, one for each layer; `absent` in every layer without the key."""
    text: str | None = getattr(keys, name)
    numbers = (absent,) * count if text is None else _numbers(path, name, text)
    if len(numbers) != count:
        raise BadInput(path, f"{name} has {len(numbers)} numbers, tp_sizes_enc {count}", "give every layer a number")
    return numbers


def _flags(path: Path, name: str, numbers: tuple[int, ...]) -> tuple[bool, ...]:
    for layer, number in enumerate(numbers):
        if number not in (0, 1):
            raise BadInput(path, f"{name} of layer {layer} is {number}, which no plan can say", "use 0 or 1")
    return tuple(number == 1 for number in numbers)


def _numbers(path: Path, name: str, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        raise BadInput(path, f"{name} is no list of numbers", "write it as in 1,1,2,2")
    return tuple(int(part) for part in parts)


def _joined(numbers: Iterable[int]) -> str:
    return ",".join(str(int(number)) for number in numbers)
