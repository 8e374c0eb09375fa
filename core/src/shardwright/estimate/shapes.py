"""Sizes of the tensors that flow through a layer of a type; each stage of a pyramid such as Swin has other sizes."""

from collections.abc import Sequence
from typing import NamedTuple

from shardwright.models.registry import facts_of
from shardwright.models.traits import ATTENDED
from shardwright.types import HEAD, BoundaryTensor, Model, Region, base_type


class AttentionShape(NamedTuple):
    """Widths and lengths of an attention, over all its heads."""

    query_width: int
    key_width: int
    result_width: int
    """Width of what its heads give."""
    queries: int
    """Positions that attend."""
    key_positions: int
    """Positions that have keys."""
    keys: int
    """Positions that each attends to."""
    heads: int
    window: int | None
    alibi: bool

    @property
    def scores(self) -> int:
        """Return the number of attention scores of a sample."""
        return self.heads * self.queries * self.keys

    @property
    def left_out(self) -> float:
        """Return the number of query-key pairs outside a sliding window, which extends equally to both sides."""
        return 0.0 if self.window is None else float(self.queries - self.window) ** 2


def tensors_of(model: Model, type_name: str) -> tuple[BoundaryTensor, ...]:
    """Return the output tensors of a type of layer; of the head, its inputs."""
    return model.types[type_name].outputs or model.received_by(HEAD)


def attention_shape(model: Model, type_name: str, region: Region) -> AttentionShape:
    """Return the shape of a region's attention, over a window of an image if attention is limited to one."""
    heads = region.attention
    assert heads is not None
    lengths = {tensor.name: tensor.sequence_length for tensor in tensors_of(model, type_name)}
    return AttentionShape(
        heads.heads * heads.head_features,
        heads.kv_heads * heads.head_features,
        heads.heads * heads.features_of_values,
        lengths[heads.queries],
        lengths[heads.keys],
        attended_positions(model, type_name) or lengths[heads.keys],
        heads.heads,
        heads.window,
        heads.alibi,
    )


def attended_positions(model: Model, type_name: str) -> int | None:
    """Return the number of positions of the image window in which a block attends; None: there is no window."""
    family = facts_of(model)
    attended: int | None = family.shapes(base_type(type_name), family.configured(model.config)).get(ATTENDED)
    return attended


def stream_elements(tensors: Sequence[BoundaryTensor], region: Region) -> int:
    """Return the number of elements of the stream that a region adds to."""
    tensor = next((t for t in tensors if t.name == region.leaves), tensors[0])
    return tensor.sequence_length * tensor.features
