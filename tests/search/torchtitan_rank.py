"""Have torchtitan spread a model as a TOML says, on rank 0 of ranks that do not exist: python torchtitan_rank.py FILE.

Prints how many numbers of parameters the rank has. Nothing is stored: tensors are on the meta device.
"""

import os
import sys
from math import prod

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.config import ConfigManager
from torchtitan.distributed import parallel_dims
from torchtitan.protocols.train_spec import get_train_spec

# It takes GPUs for granted where it sees no device.
parallel_dims.device_type = "cpu"


def main(file: str) -> None:
    job = ConfigManager().parse_args(["--job.config_file", file])
    asked = job.parallelism
    sizes = {
        "dp_replicate": asked.data_parallel_replicate_degree,
        "dp_shard": asked.data_parallel_shard_degree,
        "cp": asked.context_parallel_degree,
        "tp": asked.tensor_parallel_degree,
        "pp": asked.pipeline_parallel_degree,
    }
    world_size = prod(sizes.values())
    os.environ.update(RANK="0", WORLD_SIZE=str(world_size), LOCAL_RANK="0")
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    experts = {"ep": asked.expert_parallel_degree, "etp": asked.expert_tensor_parallel_degree}
    dims = parallel_dims.ParallelDims(**sizes, **experts, world_size=world_size)
    spec = get_train_spec(job.model.name)
    chosen = spec.model_args[job.model.flavor]
    chosen.update_from_config(job)
    with torch.device("meta"):
        model = spec.model_cls(chosen)
    if dims.pp_enabled:
        loss = spec.build_loss_fn(job)
        _, parts, *_ = spec.pipelining_fn(model, dims, job, torch.device("cpu"), chosen, spec.parallelize_fn, loss)
    else:
        parts = [spec.parallelize_fn(model, dims, job)]
    local = [getattr(parameter, "_local_tensor", parameter) for part in parts for parameter in part.parameters()]
    print(sum(tensor.numel() for tensor in local))


if __name__ == "__main__":
    main(sys.argv[1])
