"""What the process that ranks are forked from imports (forked_ranks.py), without collecting garbage."""

from shardwright_train.start import without_collection

with without_collection():
    import fused_worker  # noqa: F401
    import loss_scale_worker  # noqa: F401
    import parity_worker  # noqa: F401
    import pytest  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    from shardwright_profile.hardware import worker  # noqa: F401
    from shardwright_train.measurement import measure, timing  # noqa: F401
    from shardwright_train.training import loop  # noqa: F401

# Of models this small, steps take less than the workload that they are compared with.
timing._WORKLOADS["cpu"] = timing._WORKLOADS["cpu"]._replace(products=1, sums=1)
