"""Options of the commands that shardwright itself has."""

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from shardwright_formats.command import Options
from shardwright_formats.types import PositiveNumber, Samples


class NewOptions(Options, frozen=True, kw_only=True):
    """Write a configuration of the workflow for a model, nodes and data; what is not given is asked for on a terminal.

    The plan is made from estimates, as that of advise; the run trains with it.
    """

    model: str | None = None
    """A preset, such as llama-3.1-8b."""
    gpus: str | None = None
    """NODESxGPUS:DEVICE, as 8x8:H100-SXM; of several types 2x8:A100-40+2x8:A10."""
    data: str | None = None
    """A file or folder of text, for ViT and Swin of images for each class; or random: random samples."""
    tokenizer: Path | None = None
    """Folder of the model's own tokenizer; by default one is trained on the text."""
    batch: Samples | None = None
    """Samples of a step, of all GPUs together; by default as many for each GPU as make about 4 Mi tokens."""
    inter_node_gbit_s: PositiveNumber | None = None
    """Gbit/s from one node to others; by default that of NVIDIA's own nodes."""
    steps: Annotated[int, Meta(ge=1, lt=10**8)] = 1000
    """Steps of the training."""
    out: Path = Path("shardwright.yaml")
    """Configuration to write, YAML; it must not be there yet."""
