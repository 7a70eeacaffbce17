"""Docstrings as Markdown: what looks like a tag is text, examples are blocks of code, headings are none."""

from __future__ import annotations

import inspect
import re

CODE = re.compile(r"(``.+?``|`[^`]+`)", flags=re.S)


def markdown(text: str) -> str:
    """One docstring. Indented equations stay indented, which is Markdown's own way to leave lines alone."""
    return "\n\n".join(_block(block) for block in re.split(r"\n\s*\n", inspect.cleandoc(text)))


def first(text: str) -> str:
    """The first paragraph of a docstring on one line."""
    return " ".join(markdown(text or "").split("\n\n")[0].split())


def _block(block: str) -> str:
    if block.lstrip().startswith(">>>"):
        return f"```pycon\n{inspect.cleandoc(block)}\n```"
    before, example, after = block.partition("\n>>>")
    if example:
        return f"{_text(before)}\n\n```pycon\n>>>{after}\n```"
    return block if block.startswith("    ") else _text(block)


def _text(block: str) -> str:
    words = re.sub(r":(?:class|func|meth|mod|attr):`", "`", block)
    parts = CODE.split(words)
    return "".join(part if CODE.fullmatch(part) else _escaped(part) for part in parts)


def _escaped(text: str) -> str:
    return re.sub(r"(?<= )\*(?= )", r"\*", text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;"))


def cell(value: object) -> str:
    """A value as a cell of a table."""
    return str(value).replace("|", "&#124;").replace("<", "&lt;").replace("\n", " ")
