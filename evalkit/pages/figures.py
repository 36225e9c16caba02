"""Figures as SVG in a page. In: a function that draws into a file. Out: the text of an SVG document."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_HREF = f"{{{_XLINK}}}href"
_REFERENCE = re.compile(r"url\(#([^)]*)\)")


def svg_of(draw: Callable[[Path], None]) -> str:
    """Return what a function draws as an SVG document; the same figure gives the same text.

    Ids begin with a hash of the figure, since those of figures of one page would otherwise be the same.

    Args:
        draw: writes a figure into the file that it is given, whose name ends in .svg.

    Raises:
        EvalkitError: the figure cannot be drawn.
    """
    with TemporaryDirectory(prefix="evalkit-") as folder:
        path = Path(folder) / "figure.svg"
        draw(path)
        content = path.read_bytes()
    root = ElementTree.fromstring(content)
    _remove_page_styles(root)
    _prefix_ids(root, f"f{hashlib.sha256(content).hexdigest()[:8]}-")
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    return ElementTree.tostring(root, encoding="unicode")


def _remove_page_styles(root: ElementTree.Element) -> None:
    """Remove metadata and the style sheet, which would apply to a whole page, and inherit its settings instead."""
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag == f"{{{_SVG}}}style":
                root.set("style", (child.text or "").strip().removeprefix("*{").removesuffix("}"))
            if child.tag in (f"{{{_SVG}}}style", f"{{{_SVG}}}metadata"):
                parent.remove(child)


def _prefix_ids(root: ElementTree.Element, prefix: str) -> None:
    """Prefix every id of a document, and the references to them."""
    for element in root.iter():
        for name, value in element.attrib.items():
            if name == "id":
                element.set(name, prefix + value)
            elif name == _HREF and value.startswith("#"):
                element.set(name, f"#{prefix}{value[1:]}")
            elif "url(#" in value:
                element.set(name, _REFERENCE.sub(rf"url(#{prefix}\1)", value))
