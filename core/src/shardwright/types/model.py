"""Model descriptions for the planner: layer types, their shapes, and which degrees must divide what."""

from collections.abc import Callable
from math import prod, sqrt
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType, field
from msgspec.structs import replace

from shardwright.io import Document, Value, sha256_of_value
from shardwright.types.limits import (
    MAX_DIMS,
    MAX_LAYERS,
    Bytes,
    Elements,
    Flops,
    Length,
    Name,
    NonNegativeCount,
    PositiveNumber,
    Sha256,
    Tokens,
)

# The parts of a layer: its boundary tensors, the regions in which tensor parallelism communicates, attention and
# experts.


class BoundaryTensor(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor [batch, sequence_length, features] that a layer passes to the next, also between pipeline stages."""

    name: str
    """Name that the runtime gives the tensor."""
    sequence_length: Tokens
    """Positions per sample."""
    features: Length
    """Elements per position."""


class Heads(Value, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The attention heads of a region; Ulysses exchanges positions for heads."""

    queries: str
    """Name of the boundary tensor whose positions attend."""
    keys: str
    """Name of the boundary tensor whose positions are attended to."""
    heads: Length
    """Query heads."""
    kv_heads: Length
    """Key and value heads."""
    head_features: Length
    """Features of one head."""
    value_features: Length | None = None
    """Features of one value head; null if it has as many as a query head."""
    window: Length | None = None
    """Sliding window: the number of positions that each position attends to, ending with itself (in an encoder as many
    follow it); shorter than the samples. Null: all positions."""
    alibi: bool = False
    """True if scores decrease with the distance of positions, with a slope for each head (ALiBi, Press et al. 2022)."""
    sinks: bool = False
    """True if the softmax includes one more score per head, which has no value (attention sink, Xiao et al. 2024)."""

    @property
    def features_of_values(self) -> int:
        """Return the features of one value head, which are also a head's output features."""
        return self.value_features or self.head_features


class Region(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a layer in which tensor-parallel ranks hold different features (Shoeybi et al. 2019)."""

    name: Literal["attention", "mlp", "lookup", "logits"]
    """The part of the layer that the region belongs to; the first two are also values of `recompute`."""
    enters: tuple[str, ...] = ()
    """Names of the boundary tensors that the region's matrices read with the whole sequence."""
    leaves: str | None = None
    """Name of the boundary tensor with the shape of the region's result, which is summed over the ranks; null for the
    head, where only numbers are summed."""
    replays_sum: tuple[Literal["full", "attention", "mlp"], ...] = ()
    """The kinds of recomputation that repeat this sum even at the end of what they recompute, because an operation
    after it keeps its result."""
    attention: Heads | None = None
    """The region's attention; null if it has none."""


class Experts(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The experts of a layer: feed-forward networks, some of which a router chooses for each position."""

    number: Length
    """Number of experts of the layer."""
    top_k: Length
    """Number of experts that compute each position."""
    features: Length
    """Hidden features of one expert: the width between its matrices."""
    shared_features: Length | UnsetType = UNSET
    """Hidden features of the shared experts, which compute every position; omitted if there are none."""

    def __post_init__(self) -> None:
        if self.top_k > self.number:
            raise ValueError(f"top_k {self.top_k} exceeds the number of experts, {self.number}")


LOW_RANK = ".lora_"
"""The text between a module's name and the names of its low-rank matrices, A and B (Hu et al. 2021), as in peft."""


class LowRank(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Low-rank matrices added to frozen ones (Hu et al. 2021): y = W x + scaling B A x; only A and B are trained."""

    rank: Length
    """Number of rows of A and of columns of B, except for modules with a different rank."""
    alpha: PositiveNumber
    """Numerator of the scaling."""
    targets: Annotated[tuple[str, ...], Meta(min_length=1)]
    """The modules that have low-rank matrices, as the adapter's configuration names them."""
    rank_stabilized: bool = False
    """Whether the scaling is alpha over the square root of the rank (Kalajdzievski 2023) instead of alpha over the
    rank."""
    starts_at_zero: bool = True
    """Whether B is initialised to zero, so that training begins with the frozen model's outputs; else B is drawn like
    A."""
    alphas: dict[str, PositiveNumber] | UnsetType = UNSET
    """Values of alpha that differ from `alpha`, by the full names of modules, or of experts' parameters, in the stock
    model; omitted if there are none."""
    weights_sha256: Sha256 | UnsetType = UNSET
    """SHA-256 of the adapter's trained weights, with which a run starts; omitted if they are drawn at random."""

    def alpha_of(self, name: str) -> float:
        """Return the alpha of a module, or of a parameter of experts, by its full name in the stock model."""
        return self.alpha if self.alphas is UNSET else self.alphas.get(name, self.alpha)

    def scaling_of(self, name: str, rank: int) -> float:
        """Return the factor of a module's low-rank term B A x, by the module's name and rank."""
        return self.alpha_of(name) / (sqrt(rank) if self.rank_stabilized else rank)


class Traced(Value, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Operations and kept tensors of a layer for one sample, traced in bfloat16 with a flash kernel on one rank.

    Numbers of elements describe tensors in the compute format; numbers of bytes describe all others, whatever that
    format is.
    """

    product_flops: Flops
    """Operations of matrix products with parameters."""
    attention_flops: Flops
    """Operations of matrix products of activations with each other, including those that a causal mask leaves out."""
    multiplied: Elements
    """Number of elements of the parameters in matrix products."""
    kept: Elements
    """Number of elements kept for the backward pass, including the layer's input if it is kept."""
    kept_bytes: Bytes
    """Further bytes kept for the backward pass: of norms in float32, of masks, of integers."""
    products: Elements
    """Number of elements of the results of matrix products and attention."""
    widest: Elements
    """Number of elements of the largest tensor that an operator returns; for a head, of the logits."""
    kernels: NonNegativeCount
    """Number of operators that start a kernel."""
    whole_flops: Flops = 0
    """The part of `product_flops` that every tensor-parallel rank repeats; omitted if nothing is sharded."""
    whole: Elements = 0
    """The part of `kept` that every tensor-parallel rank holds completely; omitted if nothing is sharded."""
    whole_products: Elements = 0
    """The part of `products` that every tensor-parallel rank holds completely; omitted if nothing is sharded."""
    linear: tuple[str, ...] = ()
    """Names, within the layer, of the modules that are a `torch.nn.Linear`; for the head, also modules of the
    embedding."""
    like_linear: tuple[str, ...] = ()
    """Names of the modules of other classes that peft treats as a Linear."""
    of_experts: tuple[str, ...] = ()
    """For the head: names of modules anywhere in the model that peft may treat as parameters of experts."""
    path: str = ""
    """Name of the list of blocks in the stock model that a block is in; empty if its parameters have their full
    names."""


EMBEDDING = "embedding"
HEAD = "head"


def base_type(name: str) -> str:
    """Return the family's layer type: the name without the suffix after the dot, which specifies frozen parts."""
    return name.partition(".")[0]


class Parameter(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A parameter tensor of a layer type."""

    name: str
    """The parameter's Hugging Face name; for a block, relative to the block."""
    shape: Annotated[tuple[Length, ...], Meta(max_length=MAX_DIMS)]
    """Length of each dim of the whole tensor."""
    tp_dim: Annotated[int, Meta(ge=0, lt=MAX_DIMS)] | None = None
    """The tensor dim that tensor parallelism splits; null if the tensor is replicated over the group."""
    inside: bool = False
    """True for a replicated tensor used inside a region, where each rank of the group computes a part of its
    gradient."""
    shared: bool = False
    """True if all layers of the type use the same parameter."""
    frozen: bool | UnsetType = UNSET
    """True if the parameter is not trained: it has no gradient and no optimizer state."""
    ep_dim: Annotated[int, Meta(ge=0, lt=MAX_DIMS)] | UnsetType = UNSET
    """The tensor dim that counts experts; omitted if the tensor is not stacked over experts."""
    buffer: bool | UnsetType = UNSET
    """True for a buffer, which is updated by steps without a gradient: each rank holds all of it, at least in
    float32."""
    copy_of: str | UnsetType = UNSET
    """Full name of the embedding's or head's parameter that this one is a copy of: the two are the same parameter."""

    def __post_init__(self) -> None:
        for name, dim in (("tp_dim", self.tp_dim), ("ep_dim", None if self.ep_dim is UNSET else self.ep_dim)):
            if dim is not None and dim >= len(self.shape):
                raise ValueError(f"{name} {dim} of {self.name} is outside its shape")

    @property
    def trained(self) -> bool:
        """Return whether the parameter has a gradient and optimizer states."""
        return self.frozen is not True and not self.is_buffer

    @property
    def is_buffer(self) -> bool:
        """Return whether the tensor is a buffer, not a parameter."""
        return self.buffer is True

    def numel(self, parts: int) -> int:
        """Return the number of elements of a tensor-parallel shard, rounded up; `parts`: number of shards."""
        if self.tp_dim is None:
            return prod(self.shape)
        length = self.shape[self.tp_dim]
        return prod(self.shape) // length * -(-length // parts)

    def of_experts(self, parts: int) -> "Parameter":
        """Return the parameter with one rank's experts only; `parts`: number of groups, a divisor of the experts."""
        if self.ep_dim is UNSET or parts == 1:
            return self
        shape = list(self.shape)
        shape[self.ep_dim] //= parts
        return replace(self, shape=tuple(shape))

    def states_dim(self, parts: int, shards: int) -> int:
        """Return the dim at which ZeRO shards a tensor-parallel part equally, with padding: usually 0.

        `parts`: tensor-parallel shards, `shards`: ZeRO's shards. If `shards` does not divide the experts, it is the
        last dim that neither expert nor tensor parallelism cuts, provided that `shards` divides its length.
        """
        if self.ep_dim is UNSET or self.part_length(self.ep_dim, parts) % shards == 0:
            return 0
        last = max((dim for dim in range(len(self.shape)) if dim not in (self.ep_dim, self.tp_dim)), default=0)
        return last if self.shape[last] % shards == 0 else 0

    def shard_numel(self, parts: int, shards: int) -> int:
        """Return the number of elements of the largest of ZeRO's `shards` of a tensor-parallel part."""
        numel = self.numel(parts)
        if not self.shape or self.is_buffer:
            return numel
        length = self.part_length(self.states_dim(parts, shards), parts)
        return numel // length * -(-length // shards)

    def part_length(self, dim: int, parts: int) -> int:
        """Return the length of a dim of a tensor-parallel shard, rounded up; `parts`: number of shards."""
        return -(-self.shape[dim] // parts) if dim == self.tp_dim else self.shape[dim]


class LayerType(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of layer; layers of one type differ only in their weights."""

    parameters: tuple[Parameter, ...]
    """Every parameter tensor of one layer of this type."""
    forward_flops_per_sample: Flops
    """Floating-point operations of one forward pass over one sample (a multiply-add counts 2)."""
    tp_must_divide: dict[str, Length] = field(default_factory=dict)
    """Lengths, by name, that tp_size must divide."""
    ulysses_must_divide: dict[str, Length] = field(default_factory=dict)
    """Lengths, by name, that the Ulysses degree must divide."""
    sequence_must_divide: dict[str, Length] | UnsetType = UNSET
    """Lengths, by name, that tp_size must divide if ranks hold parts of the sequence; omitted if there are none."""
    outputs: tuple[BoundaryTensor, ...] = ()
    """Tensors that the next layer receives; empty for the head."""
    regions: tuple[Region, ...] = ()
    """Regions at whose ends tensor parallelism communicates, in order."""
    labels: NonNegativeCount = 0
    """Positions per sample that the head computes a loss for; 0 elsewhere."""
    backward: bool | UnsetType = UNSET
    """False if neither this layer nor any layer before it has a trained parameter: no backward pass goes through it."""
    experts: Experts | UnsetType = UNSET
    """The experts of the layer's feed-forward part; omitted if it has none."""
    traced: Traced | UnsetType = UNSET
    """Figures from a traced pass; omitted if the family's facts provide them."""

    def __post_init__(self) -> None:
        if not self.has_backward and any(self.trained_parameters):
            raise ValueError("a layer type without a backward pass has trained parameters")

    @property
    def has_backward(self) -> bool:
        """Return whether a backward pass goes through the layer."""
        return self.backward is not False

    @property
    def trained_parameters(self) -> tuple[Parameter, ...]:
        """Return the parameters that are trained."""
        return tuple(p for p in self.parameters if p.trained)

    @property
    def copies(self) -> tuple[Parameter, ...]:
        """Return the parameters that are copies of a parameter of the embedding or the head."""
        return tuple(p for p in self.parameters if p.copy_of is not UNSET)

    @property
    def trained_share(self) -> float:
        """Return the share of matrix elements that are trained, from 0 to 1; 1 if there are no matrices."""
        matrices = [p for p in self.parameters if len(p.shape) > 1]
        total = sum(p.numel(1) for p in matrices)
        return sum(p.numel(1) for p in matrices if p.trained) / total if total else 1.0

    @property
    def passes(self) -> float:
        """Return the work of a training step in forward passes, without recomputation: from 1 to 3.

        A layer with a backward pass adds one for the gradients of the inputs of its matrix products, and the share of
        its matrix elements that are trained for the gradients of its matrices.
        """
        return 1 + self.has_backward * (1 + self.trained_share)

    @property
    def step_flops_per_sample(self) -> float:
        """Return the operations of a forward and a backward pass over one sample, including masked attention scores."""
        return self.forward_flops_per_sample * self.passes

    def parameter_count(self, parts: int = 1) -> int:
        """Return the number of parameters in a tensor-parallel shard; `parts`: number of shards."""
        return sum(p.numel(parts) for p in self.parameters)

    def trained_count(self, parts: int = 1) -> int:
        """Return the number of trained parameters in a tensor-parallel shard; `parts`: number of shards."""
        return sum(p.numel(parts) for p in self.trained_parameters)

    @property
    def window(self) -> int | None:
        """Return the sliding window of the layer's attention in positions; None if there is no window."""
        return next((region.attention.window for region in self.regions if region.attention is not None), None)

    @property
    def has_sinks(self) -> bool:
        """Return whether the layer's attention has sinks: one more score per head in the softmax."""
        return any(region.attention is not None and region.attention.sinks for region in self.regions)

    @property
    def alibi_heads(self) -> int:
        """Return the number of the layer's heads with ALiBi, whose scores decrease with the distance of positions."""
        return max((a.heads for region in self.regions if (a := region.attention) is not None and a.alibi), default=0)


class Model(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model as the planner sees it, written by `shardwright train describe`."""

    FORMAT = "shardwright.model"

    name: Name
    """Name that the user gives the model; its profiles carry it."""
    family: Annotated[str, Meta(min_length=1)]
    """Name of the family: the file of the runtime that builds and shards the model."""
    config: dict[str, Any]
    """The Hugging Face configuration without its number of layers, which `layers` determines."""
    sequence_length: Tokens
    """Tokens (or patches) of one sample."""
    layers: Annotated[tuple[str, ...], Meta(min_length=1, max_length=MAX_LAYERS)]
    """The type of each block, in order, without embedding and head."""
    types: dict[str, LayerType]
    """Layer types by name; `embedding` and `head` are always among them."""
    tied: tuple[tuple[str, str], ...] = ()
    """Pairs of parameters, by full name, that are the same parameter."""
    low_rank: LowRank | UnsetType = UNSET
    """Low-rank matrices that are trained instead of the model; omitted if there are none."""

    def __post_init__(self) -> None:
        for needed in (EMBEDDING, HEAD, *self.layers):
            if needed not in self.types:
                raise ValueError(f"layer type {needed!r} is not among types")
        if {EMBEDDING, HEAD} & set(self.layers):
            raise ValueError("embedding and head cannot be among the layers")
        backward = [self.types[name].has_backward for name in (EMBEDDING, *self.layers, HEAD)]
        if backward != sorted(backward):
            raise ValueError("a layer without a backward pass comes after one that has one")
        if not backward[-1]:
            raise ValueError("the head has no backward pass: there is nothing to train")
        shapes = self._outer_shapes()
        for first, second in self.tied:
            if shapes.get(first) is None or shapes.get(first) != shapes.get(second):
                raise ValueError(f"tied {first!r} and {second!r} are not equal parameters of embedding and head")
        for name in dict.fromkeys(self.layers):
            for copy in self.types[name].copies:
                if shapes.get(str(copy.copy_of)) != copy.shape:
                    raise ValueError(f"{copy.name} of {name} is not a copy of {copy.copy_of!r} of embedding or head")

    @property
    def architecture_sha256(self) -> str:
        """Return the hash of what a profile measures: family, configuration and parameters of each type.

        The number of layers and the sequence length are not included, so that one profile serves models that differ in
        them.
        """
        return sha256_of_value([self.family, self.config, {name: t.parameters for name, t in self.types.items()}])

    @property
    def is_frozen(self) -> bool:
        """Return whether any parameter is frozen."""
        layers = (EMBEDDING, *self.layers, HEAD)
        return any(p.frozen is True for name in layers for p in self.types[name].parameters)

    @property
    def boundary(self) -> tuple[BoundaryTensor, ...]:
        """Return the tensors between the embedding and the first layer; all layers pass on tensors with these names."""
        return self.types[EMBEDDING].outputs

    @property
    def reshaping(self) -> tuple[str, ...]:
        """Return the block types whose output and input differ in shape: no block can follow another of its type."""
        like_received = {
            name for i, name in enumerate(self.layers) if self.received_by(f"layers[{i}]") == self.types[name].outputs
        }
        return tuple(name for name in dict.fromkeys(self.layers) if name not in like_received)

    def received_by(self, layer: str) -> tuple[BoundaryTensor, ...]:
        """Return the tensors that a layer (`embedding`, `layers[i]`, `head`) receives from the layer before it.

        Their shapes may differ from layer to layer, as between the levels of a pyramid.
        """
        if layer == EMBEDDING:
            return ()
        number = len(self.layers) if layer == HEAD else int(layer.removeprefix("layers[").removesuffix("]"))
        return self.types[self.layers[number - 1]].outputs if number else self.boundary

    @property
    def parameter_count(self) -> int:
        """Return the number of parameters without buffers; tied and shared ones are counted once."""
        return self._count(lambda kind: tuple(p for p in kind.parameters if not p.is_buffer))

    @property
    def trained_count(self) -> int:
        """Return the number of trained parameters; tied and shared ones are counted once."""
        return self._count(lambda kind: kind.trained_parameters)

    @property
    def has_copies(self) -> bool:
        """Return whether embedding or head share parameters with each other or with blocks."""
        return bool(self.tied) or any(self.types[name].copies for name in dict.fromkeys(self.layers))

    @property
    def is_traced(self) -> bool:
        """Return whether the model is described by a trace because its family has no facts."""
        return self.types[HEAD].traced is not UNSET

    def type_of(self, layer: str) -> LayerType:
        """Return the type of a layer by its name: `embedding`, `layers[i]` or `head`."""
        ends = layer in (EMBEDDING, HEAD)
        return self.types[layer if ends else self.layers[int(layer.removeprefix("layers[").removesuffix("]"))]]

    @property
    def layers_by_base(self) -> dict[str, tuple[str, ...]]:
        """Return the types of the blocks, in order, by the family's base type."""
        bases = dict.fromkeys(map(base_type, self.layers))
        return {base: tuple(name for name in self.layers if base_type(name) == base) for base in bases}

    def _count(self, counted: Callable[[LayerType], tuple[Parameter, ...]]) -> int:
        """Return the number of elements of the parameters that `counted` selects; tied and shared ones count once."""
        names = (EMBEDDING, *self.layers, HEAD)
        total = sum(prod(p.shape) for name in names for p in counted(self.types[name]) if p.copy_of is UNSET)
        ends = {p.name: prod(p.shape) for name in (EMBEDDING, HEAD) for p in counted(self.types[name])}
        tied = sum(ends.get(second, 0) for _, second in self.tied)
        replicas = ((len(kinds) - 1, counted(self.types[kinds[0]])) for kinds in self.layers_by_base.values())
        return total - tied - sum(n * prod(p.shape) for n, parameters in replicas for p in parameters if p.shared)

    def _outer_shapes(self) -> dict[str, tuple[int, ...]]:
        return {p.name: p.shape for name in (EMBEDDING, HEAD) for p in self.types[name].parameters}
