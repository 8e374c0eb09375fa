"""Values under other names, and what of a page is structure: names must change nothing of it."""

from collections import Counter
from collections.abc import Mapping
from html.parser import HTMLParser
from typing import Any

import msgspec

NAME = (
    """</title></style></script><script>alert(1)</script><img src=x onerror=alert(1)> "'` &amp; --> ]]> {{7*7}} | \\ """
)
"""What closes every place that a name may stand in."""
PLAIN = "n" * len(NAME)
"""A name of the same length, beside which a picture is laid out alike."""


def renamed(value: Any, names: set[str], name: str) -> Any:
    """The value with one name in the place of each of these, in whatever struct, tuple or dict they stand."""
    if isinstance(value, str):
        return name if value in names else value
    if isinstance(value, msgspec.Struct):
        fields = {field: renamed(getattr(value, field), names, name) for field in value.__struct_fields__}
        return type(value)(**fields)
    if isinstance(value, list):
        return [renamed(part, names, name) for part in value]
    if isinstance(value, tuple):
        parts = [renamed(part, names, name) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, Mapping):
        return {renamed(key, names, name): renamed(part, names, name) for key, part in value.items()}
    return value


class Page(HTMLParser):
    """A page or a picture: its elements and their attributes, counted, and all that is text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements, self.texts = Counter[tuple[str, ...]](), list[str]()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements[tag, *sorted(name for name, _ in attributes)] += 1
        self.texts += [value for _, value in attributes if value]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def handle_comment(self, data: str) -> None:
        self.elements["comment", data] += 1
