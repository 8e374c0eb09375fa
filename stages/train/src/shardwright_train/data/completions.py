"""Examples of which only a part is learned (loss on completions), as JSON objects in one of four forms.

- `prompt` and `completion`, strings: the completion and the token that ends it are learned.
- `prompt` and `completion`, lists of messages: what the tokenizer's chat template adds to the prompt's text is learned.
- `messages`: the assistant's part, which the template marks with `{% generation %}`, is learned.
- `input_ids` and `labels`, tokens: tokens whose label is not -100 are learned.

Text is tokenized as a whole, and a token is learned if one of its characters is. So the tokens are the same as without
marks, as in transformers' `apply_chat_template`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType
from tokenizers import Tokenizer

from shardwright.io import BadInput, read_object
from shardwright_train.data.corpora import TextPiece
from shardwright_train.data.tokenizer import RUNNING_ERRORS, SETTINGS, TOKENIZER, DocumentEnds, library_faults
from shardwright_train.parallel.vocab import IGNORED
from shardwright_train.start import without_collection

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_Messages = Annotated[list[dict[str, Any]], Meta(min_length=1)]
_Spans = Sequence[tuple[int, int]]
"""Ranges of characters of a text."""


class Form(StrEnum):
    """The form of the examples of a data set."""

    TEXTS = "prompt and completion"
    CHATS = "prompt and completion of messages"
    MESSAGES = "messages"
    TOKENS = "input_ids and labels"

    def ends(self, document: DocumentEnds) -> DocumentEnds:
        """Return the tokens to add before and after an example; none if its template or its tokens contain them."""
        return document if self is Form.TEXTS else DocumentEnds((), ())


class _Fields(msgspec.Struct, frozen=True):
    prompt: str | _Messages | UnsetType = UNSET
    completion: str | _Messages | UnsetType = UNSET
    messages: _Messages | UnsetType = UNSET
    input_ids: list[int] | UnsetType = UNSET
    labels: list[int] | UnsetType = UNSET

    @property
    def form(self) -> Form:
        """Return the form of the example; raise ValueError unless it has exactly one."""
        found = []
        if UNSET not in (self.prompt, self.completion):
            kinds = isinstance(self.prompt, str), isinstance(self.completion, str)
            if kinds[0] != kinds[1]:
                raise ValueError("prompt and completion are a text and messages")
            found.append(Form.TEXTS if kinds[0] else Form.CHATS)
        if self.messages is not UNSET:
            found.append(Form.MESSAGES)
        if UNSET not in (self.input_ids, self.labels):
            found.append(Form.TOKENS)
        if len(found) != 1:
            raise ValueError(f"has {' beside '.join(found)}" if found else "has no completion")
        return found[0]


_DECODER = msgspec.json.Decoder(_Fields)


class Learned(NamedTuple):
    """The tokens of an example, and for each whether it is learned."""

    ids: Sequence[int]
    targets: Sequence[bool]


def form_of(piece: TextPiece) -> Form:
    """Return the form of an example; raise BadInput, naming its place, if it has none."""
    return _read(piece)[1]


def _read(piece: TextPiece) -> tuple[_Fields, Form]:
    try:
        fields = _DECODER.decode(piece.text)
        return fields, fields.form
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        remedy = f"give one of {'; '.join(Form)}, or leave out --loss-on"
        raise BadInput(piece.source, str(error), remedy) from None


class Reader:
    """A reader of examples in one form, with the tokenizer of a folder."""

    def __init__(self, folder: Path, form: Form, ends: DocumentEnds, vocab_size: int) -> None:
        self._form, self._ends, self._rows = form, ends, vocab_size
        self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        # A template writes special tokens; in plain texts their spelling is ordinary text.
        self._tokenizer.encode_special_tokens = form is Form.TEXTS
        # It must add no tokens here, and some post-processors trim spaces from the offsets.
        self._tokenizer.post_processor = None
        self._template = _Template.of(folder) if form in (Form.CHATS, Form.MESSAGES) else None

    def learned(self, pieces: Sequence[TextPiece]) -> list[Learned]:
        """Return the tokens of examples; raise BadInput, naming the place of an example that cannot be learned."""
        if self._form is Form.TOKENS:
            return [self._given(piece, self._fields(piece)) for piece in pieces]
        marked = [self._marked(piece, self._fields(piece)) for piece in pieces]
        with library_faults(TOKENIZER, "cannot encode a text", "use a tokenizer with a token for unknown text"):
            encodings = self._tokenizer.encode_batch([text for text, _ in marked], add_special_tokens=False)
        before, after = self._ends
        return [
            Learned(
                [*before, *encoding.ids, *after],
                [*[False] * len(before), *_targets(encoding.offsets, spans), *[True] * len(after)],
            )
            for encoding, (_, spans) in zip(encodings, marked, strict=True)
        ]

    def _fields(self, piece: TextPiece) -> _Fields:
        fields, form = _read(piece)
        if form is not self._form:
            raise BadInput(piece.source, f"has {form}, the first example {self._form}", "prepare them separately")
        return fields

    def _given(self, piece: TextPiece, fields: _Fields) -> Learned:
        ids, labels = fields.input_ids, fields.labels
        assert not isinstance(ids, UnsetType) and not isinstance(labels, UnsetType)
        remedy = "give each token its label, which is the token or -100; the next token is predicted as always"
        if len(ids) != len(labels):
            raise BadInput(piece.source, f"{len(labels)} labels for {len(ids)} tokens", remedy)
        for place, (token, label) in enumerate(zip(ids, labels, strict=True)):
            if not 0 <= token < self._rows:
                problem = f"input_ids[{place}] is {token}, the tokenizer has {self._rows}"
                raise BadInput(piece.source, problem, "pass the tokenizer that made these tokens")
            if label not in (token, IGNORED):
                raise BadInput(piece.source, f"labels[{place}] is {label}, its token {token}", remedy)
        return Learned(ids, [label != IGNORED for label in labels])

    def _marked(self, piece: TextPiece, fields: _Fields) -> tuple[str, _Spans]:
        prompt, completion, messages = fields.prompt, fields.completion, fields.messages
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt + completion, [(len(prompt), len(prompt) + len(completion))]
        assert self._template is not None
        if not isinstance(messages, UnsetType):
            return self._template.marked(messages, piece.source)
        assert isinstance(prompt, list) and isinstance(completion, list)
        text = self._template.text(prompt, piece.source, asks=True)
        whole = self._template.text([*prompt, *completion], piece.source)
        if not whole.startswith(text):
            problem = "the chat template writes the prompt differently once an answer follows"
            raise BadInput(piece.source, problem, "give `messages`, with a template that marks the assistant's part")
        return whole, [(len(text), len(whole))]


def _targets(offsets: Iterable[tuple[int, int]], spans: _Spans) -> list[bool]:
    """Return, for each token with these half-open offsets, whether any of its characters is in a span."""
    return [any(begin < stop and end > start for start, stop in spans) for begin, end in offsets]


class _Template(NamedTuple):
    """A tokenizer's chat template, which transformers runs in a sandbox."""

    file: Path
    source: str
    special: Mapping[str, str]

    @classmethod
    def of(cls, folder: Path) -> "_Template":
        """Return the chat template of a folder; raise BadInput if it has none."""
        file = folder / SETTINGS[1]
        settings = read_object(file, any_text=True) if file.exists() else {}
        source = settings.get("chat_template")
        if not isinstance(source, str):
            remedy = "use the tokenizer of a chat model, or give `prompt` and `completion` as texts"
            raise BadInput(SETTINGS[1], "has no chat_template, which messages need", remedy)
        names = {name: text for name, text in settings.items() if name.endswith("_token") and isinstance(text, str)}
        return cls(file, source, names)

    def marked(self, messages: _Messages, place: object) -> tuple[str, _Spans]:
        """Return the text of messages, and the spans of the assistant's part; raise BadInput if it is not marked."""
        if not _MARKS.search(self.source):
            problem = "the chat_template does not mark the assistant's part by {% generation %}"
            remedy = "add the marks to it, or give each answer as `completion` and the messages before as `prompt`"
            raise BadInput(SETTINGS[1], problem, remedy)
        return self._rendered(messages, place, return_assistant_tokens_mask=True)

    def text(self, messages: _Messages, place: object, asks: bool = False) -> str:
        """Return the text of messages; `asks`: whether the beginning of an answer follows them."""
        return self._rendered(messages, place, add_generation_prompt=asks)[0]

    def _rendered(self, messages: _Messages, place: object, **how: bool) -> tuple[str, _Spans]:
        with without_collection():
            from jinja2 import TemplateError
            from transformers.utils.chat_template_utils import render_jinja_template
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            more: dict[str, Any] = {"chat_template": self.source, **self.special, **how}
            rendered: Any = render_jinja_template([given], **more)
        except (TemplateError, *RUNNING_ERRORS) as error:
            problem = f"the chat_template refuses it ({' '.join(str(error).split())})"
            raise BadInput(place, problem, "correct the messages, or the template") from None
        (text,), spans = rendered
        return text, spans[0] if spans else ()
