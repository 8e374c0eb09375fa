"""Tokenizers: a model's own, or trained on a text, and the tokens that each adds around a document.

Folders are untrusted: they are read, and their tokenizers run, so that any fault ends in a one-line error.
"""

import json
import logging
import os
import re
import sys
import tempfile
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import normalize

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel

from shardwright.io import BadInput, read_bytes, read_object, write_bytes
from shardwright_train.start import without_collection

END_OF_TEXT = "<|endoftext|>"
"""The token that ends every document of a trained tokenizer; its number is 0."""
TOKENIZER = "tokenizer.json"
SETTINGS = (TOKENIZER, "tokenizer_config.json")
"""The files of a model's tokenizer."""
CONSULTED = (*SETTINGS, "config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
"""The files of a folder that decide how a text becomes tokens."""
_ENDS = ("eos_token", "sep_token")
"""The settings that name the token that closes a document; the first of them that a tokenizer has is used."""
_PANIC = "PanicException"
_MIN_VOCABULARY = 257  # every byte and the end of text
_MAX_WORD = 100_000
"""Largest number of consecutive characters of one kind: training time is quadratic in it, for this number seconds."""
_WORD = re.compile(r"[^\W\d_]+|\d+|\s+|(?:[^\w\s]|_)+")  # as ByteLevel distinguishes them
RUNNING_ERRORS = (
    ArithmeticError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError
)  # fmt: skip
"""Exceptions that transformers' code raises on untrusted files."""
_PARTS = ("model", "normalizer", "pre_tokenizer", "post_processor", "decoder")
_MOST_AROUND = 256
_MOST_UNUSED = 1 << 20
"""Largest count of numbers without a token, below the highest number of a token."""
_PROBE = "a"


class DocumentEnds(NamedTuple):
    """The tokens before and after each document."""

    before: tuple[int, ...]
    after: tuple[int, ...]


class Tokenizing(NamedTuple):
    """A tokenizer, and the tokens around each document."""

    tokenizer: Tokenizer
    ends: DocumentEnds
    special: Mapping[str, str] = {}
    """Special tokens of a model's tokenizer by the names of settings, such as eos_token; and its chat_template."""

    @property
    def vocab_size(self) -> int:
        """Return the vocabulary size; every token is below it."""
        return rows_of(self.tokenizer)

    def write(self, folder: Path) -> None:
        """Write the tokenizer as tokenizer.json, and a model's special tokens as settings that transformers reads."""
        file, settings = (folder / name for name in SETTINGS)
        write_bytes(file, (self.tokenizer.to_str(pretty=True) + "\n").encode())
        settings.unlink(missing_ok=True)
        if self.special:
            named = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special}
            write_bytes(settings, (json.dumps(named, indent=2, sort_keys=True) + "\n").encode())


def trained(texts: Iterator[str], vocab_size: int, source: str) -> Tokenizing:
    """Train a tokenizer on texts; `source` names them in errors.

    Raises BadInput if the vocabulary has no room for all bytes, or a word is too long to learn from.
    """
    if vocab_size < _MIN_VOCABULARY:
        raise BadInput("--vocab-size", f"{vocab_size} is too small for all bytes", f"give {_MIN_VOCABULARY} or more")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(_learnable(texts, source), trainer)
    return Tokenizing(tokenizer, DocumentEnds((), (tokenizer.get_vocab()[END_OF_TEXT],)))


def _learnable(texts: Iterator[str], source: str) -> Iterator[str]:
    """Yield the texts to train on; raise BadInput if a word is too long to learn from in reasonable time."""
    for text in texts:
        longest = max((match[0] for match in _WORD.finditer(text)), key=len, default="")
        if len(longest) > _MAX_WORD:
            problem = f"a word of {len(longest)} characters, over {_MAX_WORD}: {longest[:20]!r}..."
            raise BadInput(source, problem, "break it up, or leave it out")
        yield text


def given(folder: Path) -> Tokenizing:
    """Return the tokenizer of a model's folder, which encodes as transformers' `AutoTokenizer` does.

    Truncation and padding are off. The vocabulary comes from tokenizer.json: tokens that only the settings name are
    left out, because the model has no row for them. Raises BadInput if transformers cannot open it, or if the settings
    name no token that can close a document.
    """
    file, settings = (folder / name for name in SETTINGS)
    tokenizer = read_tokenizer(file)
    for other in sorted(folder.glob("tokenizer.*.json")):
        read_tokenizer(other)  # transformers may read a file made for its version instead
    opened = _opened(folder, file, read_object(settings, any_text=True))
    for part in _PARTS:
        setattr(tokenizer, part, getattr(opened.backend_tokenizer, part))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    named = {name: token for name, token in opened.special_tokens_map.items() if isinstance(token, str)}
    special = {name: str(token) for name, token in named.items() if tokenizer.token_to_id(token) is not None}
    closing = next((special[name] for name in _ENDS if name in special), None)
    if closing is None:
        problem = f"has no {' or '.join(_ENDS)} that is one of {file.name}"
        raise BadInput(settings, problem, "name the token that closes a document")
    template = opened.chat_template
    if isinstance(template, Mapping):  # several, by their names
        template = template.get("default")
    special |= {"chat_template": template} if isinstance(template, str) else {}
    return Tokenizing(tokenizer, _document_ends(tokenizer, tokenizer.get_vocab()[closing], file), special)


def _opened(folder: Path, file: Path, settings: Mapping[str, Any]) -> Any:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with without_collection():
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    how: Any = {"local_files_only": True, "trust_remote_code": False}
    try:
        try:
            opened: Any = AutoTokenizer.from_pretrained(str(folder), **how)
        except ValueError:
            if "auto_map" not in settings:
                raise
            print(f"{folder}: its code is not run: {file.name} is used as it is", file=sys.stderr, flush=True)
            opened = PreTrainedTokenizerFast.from_pretrained(str(folder), **how)
    except RUNNING_ERRORS as error:
        problem = f"transformers cannot open it ({type(error).__name__}: {' '.join(str(error).split())})"
        raise BadInput(file, problem, f"correct {SETTINGS[1]}, or use another tokenizer") from None
    if not isinstance(getattr(opened, "backend_tokenizer", None), Tokenizer):
        problem = f"transformers opens it as {type(opened).__name__}, which does not use it"
        raise BadInput(file, problem, f"name another tokenizer_class in {SETTINGS[1]}")
    return opened


def _document_ends(tokenizer: Tokenizer, end: int, file: object) -> DocumentEnds:
    """Return the tokens that a post-processor adds around a text, and the end-of-document token if it adds none.

    Raises BadInput, naming `file`, if it leaves out the text, repeats it, or adds hundreds or unknown tokens.
    """
    # Any text will do: a post-processor adds tokens by their numbers, and does not use the vocabulary.
    probe = Tokenizer(models.WordLevel({_PROBE: 0}, unk_token=_PROBE))
    probe.post_processor = tokenizer.post_processor
    encoding = probe.encode(_PROBE)
    texts = [place for place, special in enumerate(encoding.special_tokens_mask) if not special]
    if len(texts) != 1:
        problem = f"its post_processor inserts a text in {len(texts)} places"
        raise BadInput(file, problem, "use a tokenizer that inserts it once")
    before, after = tuple(encoding.ids[: texts[0]]), tuple(encoding.ids[texts[0] + 1 :])
    if len(before) + len(after) > _MOST_AROUND:
        problem = f"its post_processor adds {len(before) + len(after)} tokens to each text, over {_MOST_AROUND}"
        raise BadInput(file, problem, "use another tokenizer")
    if (highest := max((*before, *after, end))) >= (rows := rows_of(tokenizer)):
        problem = f"its post_processor adds the token {highest}, but the vocabulary has {rows}"
        raise BadInput(file, problem, "correct it, or use another tokenizer")
    return DocumentEnds(before, after if after[-1:] == (end,) else (*after, end))


def read_tokenizer(file: Path) -> Tokenizer:
    """Return a tokenizer from an untrusted file; raise BadInput if it is malformed, or expands texts too much."""
    check_growth(read_object(file, any_text=True), file)
    content = read_bytes(file).decode()
    with library_faults(file, "is not a tokenizer", "use one that `tokenizers` has saved"):
        tokenizer = Tokenizer.from_str(content)
    # The library writes a tokenizer by counting through all numbers up to the largest.
    if (unused := rows_of(tokenizer) - tokenizer.get_vocab_size()) > _MOST_UNUSED:
        problem = f"numbers its {tokenizer.get_vocab_size()} tokens up to {rows_of(tokenizer) - 1}: {unused} have none"
        raise BadInput(file, f"{problem}, over {_MOST_UNUSED}", "number tokens in order")
    return tokenizer


def rows_of(tokenizer: Tokenizer) -> int:
    """Return the number of rows of a model's table that a tokenizer's tokens need."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def end_of(folder: Path) -> tuple[str, int] | None:
    """Return the end-of-text token of a folder's tokenizer, and its index; None if the settings name none.

    In a folder without settings, as `prepare` writes it for a trained tokenizer, the token is `END_OF_TEXT`.
    """
    file, settings = (folder / name for name in SETTINGS)
    if not file.exists():
        return None
    token = read_object(settings, any_text=True).get(_ENDS[0]) if settings.exists() else END_OF_TEXT
    if isinstance(token, dict):  # with its properties
        token = token.get("content")
    number = read_tokenizer(file).token_to_id(token) if isinstance(token, str) else None
    return None if number is None else (str(token), number)


@contextmanager
def library_faults(file: object, problem: str, remedy: str) -> Iterator[None]:
    """Convert errors of `tokenizers`, including Rust panics, to a BadInput of one line."""
    try:
        with _unwritten():
            yield
    except BaseException as error:
        # The library raises a plain Exception if it refuses a file, and a class that is not public if its code panics.
        if type(error) is not Exception and type(error).__name__ != _PANIC:
            raise
        raise BadInput(file, f"{problem} ({' '.join(str(error).split())})", remedy) from None


@contextmanager
def _unwritten() -> Iterator[None]:
    """Hide what is written to the standard error descriptor inside, such as a Rust traceback."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with tempfile.TemporaryFile() as hidden:
            os.dup2(hidden.fileno(), 2)
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


# Growth of the vocabulary.


_LONGEST = 48
"""Largest number of characters into which the rules may expand one character. Published tokenizers reach 36: those of
SentencePiece, for the ligature U+FDFA, twice its 18 characters."""
_MOST_RULES = 256
_MOST_CHARACTERS = 1 << 14
"""Largest number of characters that the rules of a file may name."""
_OTHER = "\U000f0000"
"""Stand-in for any character that no rule mentions, as long in UTF-8 as the longest one."""
_DECOMPOSING = ("NFC", "NFD", "NFKC", "NFKD", "BertNormalizer", "Lowercase")
_MAY_BE_EMPTY = ("*", "?", "|", "{0", "{,", "^", "$", "\\b", "\\B", "\\A", "\\z", "\\Z", "\\G", "\\K")
_REMEDY = "use a tokenizer whose rules hardly lengthen a text"
_BYTES = sorted(ByteLevel.alphabet())
Rule = Mapping[str, Any]
Weights = dict[str, float]
"""Largest number of characters into which each character that rules name, and `_OTHER`, is expanded."""


def check_growth(tokenizer: Mapping[str, Any], file: object) -> None:
    """Raise BadInput if the normalizers and pre-tokenizers of a tokenizer.json could make a text far longer.

    Rules of unknown types or forms are not checked: `tokenizers` refuses them.
    """
    rules = [*_rules(tokenizer.get("normalizer")), *_rules(tokenizer.get("pre_tokenizer"))]
    if len(rules) > _MOST_RULES:
        problem = f"has {len(rules)} normalizers and pre-tokenizers, over {_MOST_RULES}"
        raise BadInput(file, problem, "use a tokenizer with fewer of them")
    for rule in rules:
        _check_rule(rule, file)
    if (named := len(_named(rules))) > _MOST_CHARACTERS:
        raise BadInput(file, f"its rules contain {named} characters, over {_MOST_CHARACTERS}", _REMEDY)
    if (most := growth(tokenizer)) > _LONGEST:
        problem = f"its normalizers and pre-tokenizers can make {most:.3g} characters of one, over {_LONGEST}"
        raise BadInput(file, problem, _REMEDY)


def growth(tokenizer: Mapping[str, Any]) -> float:
    """Return the largest number of characters that a tokenizer.json's normalizers and pre-tokenizers make of one.

    It is an upper bound. The end of a text counts as one more character. Unicode's tables, which no file can extend,
    count only for the characters that rules name.
    """
    rules = [*_rules(tokenizer.get("normalizer")), *_rules(tokenizer.get("pre_tokenizer"))]
    weights = dict.fromkeys(_with_parts({*_named(rules), " ", _OTHER}), 1.0)
    for rule in reversed(rules):
        weights = _before(rule, weights)
    return max(weights.values())


def _named(rules: Iterable[Rule]) -> set[str]:
    return {each for rule in rules for text in _texts(rule) for each in text}


def _rules(rule: object) -> Iterator[Rule]:
    """Yield the rules of a normalizer or pre-tokenizer in order, with sequences flattened."""
    if not isinstance(rule, Mapping):
        return
    inner = rule.get("normalizers", rule.get("pretokenizers"))
    if rule.get("type") == "Sequence" and isinstance(inner, list):
        for each in inner:
            yield from _rules(each)
    else:
        yield rule


def _check_rule(rule: Rule, file: object) -> None:
    """Raise BadInput for a rule that makes the library abort instead of raising an error, or with too long a text."""
    kind, pattern = rule.get("type"), rule.get("pattern")
    if isinstance(pattern, Mapping) and "" in pattern.values():
        raise BadInput(file, f"has a {kind} whose pattern is empty", "give the text that it looks for")
    if kind == "FixedLength" and rule.get("length") == 0:
        raise BadInput(file, "has a FixedLength of 0", "give a length of 1 or more")
    if (longest := max((len(text) for text in _texts(rule)), default=0)) > _MOST_CHARACTERS:
        problem = f"has a {kind} with a text of {longest} characters, over {_MOST_CHARACTERS}"
        raise BadInput(file, problem, _REMEDY)


def _texts(rule: Rule) -> Iterator[str]:
    """Yield the texts of a rule that it may insert, or that it searches for."""
    pattern = rule.get("pattern")
    words = pattern.get("String") if isinstance(pattern, Mapping) else None
    texts = (words, *(rule.get(key) for key in ("content", "prepend", "replacement")))
    yield from (text for text in texts if isinstance(text, str))


def _with_parts(characters: Iterable[str]) -> set[str]:
    """Return the characters, with all characters and bytes that Unicode's tables and UTF-8 decompose them into."""
    parts = {part for each in characters for part in _parts(each)}
    return {*characters, *parts, *(part for each in parts for part in _parts(each)), *_BYTES}


def _parts(character: str) -> str:
    return normalize("NFKD", character.lower())


def _before(rule: Rule, after: Weights) -> Weights:
    """Return the growth of each character that a rule reads, from the growth `after` of each that it outputs."""
    kind = rule.get("type")
    if kind == "Replace":
        return _before_replacing(rule, after)
    if kind in _DECOMPOSING:
        spaces = 2 * after[" "] if kind == "BertNormalizer" else 0.0
        return {each: max(weight, _sum(_parts(each), after)) + spaces for each, weight in after.items()}
    if kind == "ByteLevel":
        highest = max(after[byte] for byte in _BYTES)
        added = highest if rule.get("add_prefix_space") else 0.0
        return {each: len(each.encode(errors="replace")) * highest + added for each in after}
    if kind == "Precompiled":
        return dict.fromkeys(after, _longest_precompiled(rule) * max(after.values()))
    if kind in ("Prepend", "Metaspace"):
        put = sum(_sum(text, after) for text in _texts(rule))
        return {each: put + weight for each, weight in after.items()}
    return after


def _before_replacing(rule: Rule, after: Weights) -> Weights:
    pattern, content = rule.get("pattern"), rule.get("content")
    if not isinstance(pattern, Mapping) or not isinstance(content, str):
        return after
    put, words, regex = _sum(content, after), pattern.get("String"), pattern.get("Regex")
    if isinstance(words, str) and words:
        return after | {each: max(after[each], put / len(words)) for each in words}
    if not isinstance(regex, str):
        return after
    # A pattern that matches no characters puts the content between any two characters.
    between = put if any(sign in regex for sign in _MAY_BE_EMPTY) or "(?" in regex else 0.0
    return {each: max(weight, put) + between for each, weight in after.items()}


def _longest_precompiled(rule: Rule) -> int:
    """Return the length of the longest text by which a SentencePiece table replaces a character.

    The table consists of the size of its index in bytes (uint32, little-endian), the index, and texts that end with 0.
    """
    try:
        table = b64decode(str(rule.get("precompiled_charsmap")), validate=True)
    except ValueError:
        return 1
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max((len(text.decode(errors="replace")) for text in texts.split(b"\0")), default=1) or 1


def _sum(text: str, weights: Weights) -> float:
    return sum(weights.get(each, weights[_OTHER]) for each in text)
