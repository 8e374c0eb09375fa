"""Conversion of a published config.json into a model description, with imports on demand."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright_formats.io import BadInput, read_object
from shardwright_formats.types import Model
from shardwright_models.low_rank import ADAPTER_CONFIG, adapt, adapter_of_config
from shardwright_train.imports import without_collection

if TYPE_CHECKING:
    from shardwright_train.models.base import Family


def describe_folder(folder: Path, name: str, sequence_length: int, adapter: Path | None = None) -> Model:
    """Describe the model of a folder's config.json for samples of a length in tokens, positions of images included.

    `adapter`: an adapter_config.json of peft, or its folder: low-rank matrices are trained in place of the model.
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
        model = describe(known, config, name, sequence_length)
    except ValueError as error:
        raise BadInput(file, str(error), "correct the configuration") from None
    return model if adapter is None else _adapted(model, known, adapter)


def _adapted(model: Model, family: "Family", adapter: Path) -> Model:
    """Return the model with the low-rank matrices of an adapter's configuration."""
    from shardwright_train.models.low_rank import check_low_rank

    file = adapter / ADAPTER_CONFIG if adapter.is_dir() else adapter
    adapted = adapt(model, adapter_of_config(read_object(file), file), file)
    try:
        check_low_rank(family, adapted)
    except ValueError as error:
        raise BadInput(file, str(error), "name other target_modules") from None
    return adapted
