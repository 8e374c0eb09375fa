"""The documentation of a field: the string literal after it in its class."""

import ast
import inspect
import re
import textwrap
from collections.abc import Mapping
from functools import lru_cache


def class_doc(kind: type) -> str:
    """Return the docstring of a class, with each paragraph on one line."""
    paragraphs = inspect.cleandoc(kind.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def field_docs(kind: type) -> dict[str, str]:
    """Return the documentation of a class's fields (or an enumeration's members) by name, including its bases.

    A field without a string literal after it is omitted. The source of the class must be available.
    """
    meanings: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if re.split("[._]", base.__module__)[0] == re.split("[._]", kind.__module__)[0]:
            meanings |= _own_field_docs(base)
    return meanings


@lru_cache(maxsize=256)
def _own_field_docs(kind: type) -> Mapping[str, str]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    meanings = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        match statement, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                meanings[name] = " ".join(text.split())
    return meanings
