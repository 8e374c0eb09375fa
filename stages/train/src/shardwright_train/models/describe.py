"""Conversion of a published config.json into a model description, with imports on demand."""

import logging
from pathlib import Path

from shardwright_formats.io import BadInput, read_object
from shardwright_formats.types import Model
from shardwright_train.imports import without_collection


def describe_folder(folder: Path, name: str, sequence_length: int) -> Model:
    """Describe the model of a folder's config.json for samples of a length in tokens, positions of images included.

    Raises BadInput naming the key that cannot be trained, and why.
    """
    file = folder / "config.json"
    config = read_object(file)
    family = config.get("model_type")
    if not isinstance(family, str):
        raise BadInput(file, "no configuration with a model_type", "pass a folder with the config.json of a model")
    # One line says what is wrong.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with without_collection():
        from shardwright_train.models.description import describe
        from shardwright_train.models.registry import family_named

        known = family_named(family, file)
    try:
        return describe(known, config, name, sequence_length)
    except ValueError as error:
        raise BadInput(file, str(error), "correct the configuration") from None
