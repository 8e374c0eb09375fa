"""Pictures that were drawn elsewhere, as parts of the page: of grids and of rent fronts."""

from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from shardwright_formats.io import BadInput, read_bytes

_SVG = "http://www.w3.org/2000/svg"
_DRAWN = {"svg", "g", "defs", "pattern", "title", "rect", "line", "polyline", "polygon", "circle", "path", "text"}


class GivenPicture(NamedTuple):
    """A picture and its name."""

    name: str
    drawing: str
    """SVG, as wide as there is room, without a style of its own."""


def read_picture(path: Path) -> GivenPicture:
    """Return a picture that `shardwright_formats.display.svg.document` wrote.

    Raises BadInput where it is another kind of file, or holds what could do more than be looked at.
    """
    content = read_bytes(path)
    try:
        root = ElementTree.fromstring(content)
    except ElementTree.ParseError as error:
        raise BadInput(path, f"is no SVG ({error})", "name a picture of a grid or a front") from None
    for style in root.findall(f"{{{_SVG}}}style"):
        root.remove(style)
    odd = {part.tag.removeprefix(f"{{{_SVG}}}") for part in root.iter()} - _DRAWN
    odd |= {name for part in root.iter() for name in part.attrib if name.startswith("on") or "href" in name}
    if odd or root.tag != f"{{{_SVG}}}svg" or "viewBox" not in root.attrib:
        what = f"is no picture of this project's ({', '.join(sorted(odd)) or 'no viewBox'})"
        raise BadInput(path, what, "name a picture of a grid or a front")
    root.attrib.pop("height", None)
    root.set("width", "100%")
    ElementTree.register_namespace("", _SVG)
    name = path.parent.name if path.stem == "front" else path.stem
    return GivenPicture(name, ElementTree.tostring(root, encoding="unicode"))
