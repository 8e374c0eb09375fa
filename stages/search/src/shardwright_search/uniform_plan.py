"""A plan with one strategy for all layers (Galvatron's GLOBAL mode), made without profiles."""

from msgspec import UNSET

from shardwright.io import BadInput
from shardwright.types import Cluster, DataParallel, LayerStrategy, Model, Plan, Strategy
from shardwright_search.options import UniformRequest
from shardwright_search.space.uniform import UniformStrategy, plan_of_uniform, sizes_that_fit, with_experts

_SETTINGS = (
    "global_batch_size",
    "num_microbatches",
    "schedule",
    "gradient_reduction",
    "precision",
    "optimizer",
    "attention",
    "compile",
)
"""Fields of a request that a plan has under the same names."""


def uniform_plan(name: str, request: UniformRequest, model: Model, cluster: Cluster) -> Plan:
    """Return the plan with evenly cut layers.

    Raises BadInput when the numbers do not divide one another.
    """
    width = cluster.num_devices // (request.pp_size * request.cp_size)
    vocab_tp_size, context = request.vocab_tp_size or request.tp_size, f" x cp {request.cp_size}"
    for option, tp_size in (("tp", request.tp_size), ("vocab-tp", vocab_tp_size)):
        if cluster.num_devices % (request.pp_size * request.cp_size * tp_size):
            sizes = f"{option} {tp_size}{context if request.cp_size > 1 else ''} x pp {request.pp_size}"
            problem = f"{sizes} does not divide {cluster.num_devices} devices"
            raise BadInput(f"cluster {cluster.name}", problem, "choose divisors")
    data_parallel = request.vocab_data_parallel or request.data_parallel
    with sizes_that_fit(name):
        layer = LayerStrategy(
            type=model.layers[0],
            tp_size=request.tp_size,
            tp_consecutive=request.tp_consecutive,
            cp_size=request.cp_size,
            dp_size=width // request.tp_size,
            data_parallel=request.data_parallel,
            shard_size=request.shard_size or 0,
            sequence_parallel=request.sequence_parallel,
            recompute=request.recompute,
            context=request.context,
        )
        vocabulary = Strategy(
            tp_size=vocab_tp_size,
            tp_consecutive=request.tp_consecutive,
            cp_size=request.cp_size,
            dp_size=width // vocab_tp_size,
            data_parallel=data_parallel,
            shard_size=0 if data_parallel is DataParallel.DDP else layer.shard_size,
            sequence_parallel=request.vocab_sequence_parallel or request.sequence_parallel,
        )
    uniform = UniformStrategy(layer, request.pp_size, chunks=request.layer_ranges)
    if request.ep_size is not None or request.etp_size is not None:
        uniform = with_experts(name, model, uniform, request.ep_size or 1, request.etp_size or 1)
    settings = {field: getattr(request, field) for field in _SETTINGS}
    settings["loss_chunks"] = UNSET if request.loss_chunks == 1 else request.loss_chunks
    return plan_of_uniform(name, uniform, model, cluster, vocabulary, **settings)
