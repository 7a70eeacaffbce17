"""A table as a value, built once from rows and known to no format: :mod:`flyby.study.writers` writes it as Markdown,
LaTeX, HTML and CSV. Words in `backticks` are code in all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MISSING = "-"
# A paper's own model, sites, split and epochs are not those of the table it stands in: its caveat says what they were.
THEIRS: Mapping[str, Any] = dict.fromkeys(("model", "clients", "split", "epochs"))


@dataclass(frozen=True)
class Entry:
    """One cell: what is printed, the remarks that it is marked with, whether a paper printed it, and the facts that
    make it a line of a CSV file; a cell without facts has no such line."""

    text: str = ""
    remarks: tuple[str, ...] = ()
    published: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """``align`` has a letter per column, l or r; ``lead`` is a sentence above, ``below`` are those under it; ``facts``
    are those of every cell."""

    heads: Sequence[str]
    align: str
    lines: Sequence[Sequence[Entry]]
    title: str = ""
    lead: str = ""
    below: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def remarks(self) -> list[str]:
        """Each once, in the order in which cells are marked with them: the first is [1]."""
        return list(dict.fromkeys(one for line in self.lines for entry in line for one in entry.remarks))


@dataclass(frozen=True)
class Part:
    """The tables of one setting under its heading."""

    heading: str
    tables: Sequence[Table]


@dataclass(frozen=True)
class Sheet:
    """All that is shown of a study; ``name`` is that of its files."""

    name: str
    title: str
    note: str = ""
    parts: Sequence[Part] = ()
    end: Sequence[str] = ()

    def facts(self) -> list[dict[str, Any]]:
        """Every cell that has facts, as a row of its own."""
        return [
            {
                "study": self.name,
                **table.facts,
                **entry.facts,
                **({"caveat": "; ".join(entry.remarks)} if entry.remarks else {}),
            }
            for part in self.parts
            for table in part.tables
            for line in table.lines
            for entry in line
            if entry.facts
        ]


def plain(*texts: str) -> list[Entry]:
    """A line of cells that are only text."""
    return [Entry(text) for text in texts]
