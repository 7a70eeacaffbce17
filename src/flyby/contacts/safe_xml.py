"""XML from strangers, element by element: no entities of its own, nothing fetched, nothing kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.parsers import expat

from flyby.errors import BadInput

Element = tuple[int, str, dict[str, str], str | None]  # line, tag, attributes; text at its end, None at its beginning
BLOCK = 1 << 16


def elements(path: Path | str) -> Iterator[Element]:
    """Beginnings and ends of a file's elements, in order."""
    waiting: list[Element] = []
    text: list[str] = []
    parser = expat.ParserCreate()

    def refuse(*_: Any) -> None:
        raise BadInput(f"{path} has a document type of its own, which may hide anything; take <!DOCTYPE ...> away")

    def begin(tag: str, attributes: dict[str, str]) -> None:
        text.clear()
        waiting.append((parser.CurrentLineNumber, tag, attributes, None))

    def end(tag: str) -> None:
        waiting.append((parser.CurrentLineNumber, tag, {}, "".join(text).strip()))
        text.clear()

    parser.StartDoctypeDeclHandler = refuse
    parser.StartElementHandler, parser.EndElementHandler = begin, end
    parser.CharacterDataHandler = text.append
    try:
        with open(path, "rb") as file:
            while block := file.read(BLOCK):
                parser.Parse(block)
                yield from waiting
                waiting.clear()
            parser.Parse(b"", True)
            yield from waiting
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror})") from None
    except expat.ExpatError as error:
        raise BadInput(f"{path}, line {error.lineno}: not XML ({expat.ErrorString(error.code)})") from None
