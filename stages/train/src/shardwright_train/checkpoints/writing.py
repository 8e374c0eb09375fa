"""One rank's file of a checkpoint, written beside the steps without stopping them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.futures import Future

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_HEADER_ALIGNMENT = 8


class ShardWriter(HuggingFaceStorageWriter):
    """Writes what the library's own writer does, for its reader, from the tensors themselves.

    The library's makes bytes of them by `safetensors.torch.save`, which copies them twice and lets no other thread of
    the process run meanwhile: 0.3 s for 78 MiB, in which no step goes on.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Write this rank's tensors into one file; the library's finish needs no word of it."""
        tensors, offsets = {}, {}
        for item in plan.items:
            data = planner.resolve_data(item)
            assert isinstance(data, Tensor) and item.tensor_data is not None
            tensors[item.index.fqn] = data.detach().cpu()
            offsets[item.index.fqn] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
        if tensors:
            name = f"shard-{plan.storage_data['shard_index']:05d}-model-00001-of-00001.safetensors"
            sharding = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
            write_safetensors(Path(self.path) / name, tensors, sharding)
        done: Future[Any] = Future()
        done.set_result([])
        return done


def write_safetensors(file: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Write tensors of host memory in the order given, with texts about them; nothing is copied that is contiguous.

    The format is that of https://huggingface.co/docs/safetensors: the header's length in 8 bytes, JSON, the bytes.
    """
    header: dict[str, Any] = {"__metadata__": dict(about)}
    end = 0
    for name, x in tensors.items():
        start, end = end, end + x.nbytes
        header[name] = {"dtype": _DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for x in tensors.values():
            stream.write(x.contiguous().view(-1).view(torch.uint8).numpy().data)
