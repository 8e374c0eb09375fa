"""A rank's checkpoint file, written while the steps continue."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shardwright_train.checkpoints.parts import Part

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_HEADER_ALIGNMENT = 8


def write_parts(file: Path, parts: Sequence[Part]) -> None:
    """Write parts of tensors in the order given; what is contiguous in host memory is not copied, the rest one by one.

    The format is that of https://huggingface.co/docs/safetensors: the header's length in 8 bytes, JSON, the bytes; in
    it stands, for torch.distributed.checkpoint's reader, where each part begins in its tensor.
    """
    offsets = {part.name: {"saved_offsets": part.offsets} for part in parts}
    about = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    header: dict[str, Any] = {"__metadata__": about}
    end = 0
    for name, _, x in parts:
        start, end = end, end + x.nbytes
        header[name] = {"dtype": _DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for part in parts:
            stream.write(part.local.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
