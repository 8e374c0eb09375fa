"""Megatron's own token files as prepared data: a .bin and an .idx, with the tokenizer that made them."""

import shutil
from pathlib import Path

import numpy as np

from shardwright_formats.io import BadInput, atomic_path, sha256_of_file, write_bytes, write_document
from shardwright_train.data.corpora.open import Source
from shardwright_train.data.description import DataFolder, PreparedData
from shardwright_train.data.token_index import write_index
from shardwright_train.data.tokenizing import given
from shardwright_train.data.tokens import TokenFile, read_tokens

_BLOCK = 1 << 20
_HOW = "name the .idx of Megatron's token file"


def import_megatron(index: Path, tokenizer_folder: Path | None, out: Path) -> None:
    """Copy a token file into a folder of prepared data, checked against the vocabulary of its tokenizer.

    Raises BadInput where a file is damaged, a token is not in the vocabulary, or no tokenizer is given.
    """
    if tokenizer_folder is None:
        raise BadInput(index, "its tokens are of some tokenizer", "name the folder of that model with --tokenizer")
    if index.suffix != ".idx":
        raise BadInput(index, "is no .idx", _HOW)
    tokenizing = given(tokenizer_folder)
    found = read_tokens(index.with_suffix(".bin"), index)
    if not found.index.num_documents or not found.index.total:
        raise BadInput(index, "holds no tokens", "prepare a text")
    _check_vocabulary(index.with_suffix(".bin"), found, tokenizing.vocab_size)
    targets = DataFolder(out)
    targets.description.unlink(missing_ok=True)
    with atomic_path(targets.tokens) as temporary:
        shutil.copyfile(index.with_suffix(".bin"), temporary)
    write_index(targets.index, found.index.lengths, found.index.dtype, found.index.documents)
    write_bytes(targets.tokenizer, (tokenizing.tokenizer.to_str(pretty=True) + "\n").encode())
    description = PreparedData(
        text=str(index),
        source=Source.MEGATRON.value,
        glob="",
        vocab_size=tokenizing.vocab_size,
        documents=found.index.num_documents,
        text_bytes=None,
        tokens=found.index.total,
        tokenizer_sha256=sha256_of_file(targets.tokenizer),
        tokens_sha256=sha256_of_file(targets.tokens),
    )
    write_document(targets.description, description)


def _check_vocabulary(path: Path, found: TokenFile, vocab_size: int) -> None:
    for first in range(0, len(found.tokens), _BLOCK):
        block = found.tokens[first : first + _BLOCK]
        strange = np.flatnonzero((block < 0) | (block >= vocab_size))
        if len(strange):
            what = f"token number {first + strange[0]} is {block[strange[0]]}, the tokenizer has {vocab_size}"
            raise BadInput(path, what, "name the tokenizer that these tokens are of")
