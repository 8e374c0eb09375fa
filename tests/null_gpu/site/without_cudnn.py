"""Loaded by PyTorch at the end of its import (entry point `torch.backends`): leaves out cuDNN, which is real."""

from torch import _C, backends


def turn_off() -> None:
    """Leave cuDNN out, also where a program asks for its attention."""
    _C._set_sdp_use_cudnn(False)
    _C._set_sdp_use_cudnn = lambda _: None
    backends.cudnn.enabled = False
