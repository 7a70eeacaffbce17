"""A table of images: a CSV or TSV file with a path and a label in each row, and perhaps a split and other columns."""

from __future__ import annotations

import csv
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from flyby.data.folders import IMAGE_FILES, SPLITS
from flyby.errors import BadInput, unknown
from flyby.names import check_labels, printable

log = logging.getLogger(__name__)
PATH_COLUMNS = ("path", "image", "file", "filename")
LABEL_COLUMNS = ("label", "class", "labels")
SPLIT_COLUMN = "split"
SUFFIXES = {".csv": ",", ".tsv": "\t"}


class Row(NamedTuple):
    """One image of a table: its line in the file, where it lies, what it shows, its split and whose it is."""

    line: int
    path: Path
    label: str
    split: str
    group: str


class Table(NamedTuple):
    classes: list[str]
    rows: dict[str, list[Row]]  # by split


def read_table(table: Path, column: str | None) -> Table:
    """The images that a table names, by split; paths are from the table's own folder, and lie in it."""
    cells = _cells(table)
    if not cells:
        raise BadInput(f"{table} is empty; give rows of path,label")
    names, body = _header(table, cells)
    if column is not None and column not in names:
        raise BadInput(f"{table} has no column {column!r}; its columns are {', '.join(names)}")
    picked = [names.index(name) if name in names else -1 for name in ("path", "label", SPLIT_COLUMN, column)]
    rows: dict[str, list[Row]] = {}
    for line, row in body:
        if len(row) != len(names):
            raise BadInput(
                f"line {line} of {table} has {len(row)} columns where the first has {len(names)}; quote what holds a"
                f" {'comma' if table.suffix.lower() == '.csv' else 'tab'}"
            )
        path, label, split, group = (row[place].strip() if place >= 0 else "" for place in picked)
        if not path or not label:
            raise BadInput(f"line {line} of {table} has no {'label' if path else 'path'}; fill it in or leave it out")
        one = Row(line, _inside(table, line, path), label, _role(table, line, split, picked[2] >= 0), group)
        rows.setdefault(one.split, []).append(one)
    if not rows.get("train"):
        raise BadInput(f"{table} names no images to train on; give rows of path,label")
    _check_there(table, [row for part in rows.values() for row in part])
    rows = _once(table, rows)
    every = [row for part in rows.values() for row in part]
    classes = sorted({row.label for row in every})
    check_labels(classes, str(table))
    return Table(classes, rows)


def _cells(table: Path) -> list[tuple[int, list[str]]]:
    """The rows with their line numbers, without empty ones."""
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=SUFFIXES[table.suffix.lower()], strict=True)
            return [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except (UnicodeDecodeError, csv.Error) as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else printable(str(error))
        raise BadInput(f"{table} is not a readable table ({reason}); write rows of path,label as plain text") from error


def _header(table: Path, cells: list[tuple[int, list[str]]]) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The names of the columns, the image's ``path`` and its ``label`` whatever they are called, and the rows."""
    first = [cell.strip().lower() for cell in cells[0][1]]
    path = next((name for name in PATH_COLUMNS if name in first), None)
    label = next((name for name in LABEL_COLUMNS if name in first), None)
    if path is not None and label is not None:
        given = [cell.strip() for cell in cells[0][1]]
        given[first.index(path)], given[first.index(label)] = "path", "label"
        return [SPLIT_COLUMN if name.lower() == SPLIT_COLUMN else name for name in given], cells[1:]
    if len(first) == 2 and path is None and label is None and Path(first[0]).suffix in IMAGE_FILES:
        return ["path", "label"], cells
    columns = printable(", ".join(cells[0][1])[:200])
    if len(first) == 1:
        raise BadInput(f"{table} has one column ({columns}); give path and label, with a comma (.csv) or tab (.tsv)")
    wanted = "path" if path is None else "label"
    raise BadInput(f"{table} has no column {wanted!r}: its first line is {columns}; give it the header path,label")


def _role(table: Path, line: int, split: str, asked: bool) -> str:
    if not asked:
        return "train"
    if split.lower() not in SPLITS:
        raise BadInput(f"line {line} of {table}: {unknown('split', split, SPLITS)}")
    return SPLITS[split.lower()]


def _inside(table: Path, line: int, path: str) -> Path:
    root = table.parent.absolute()
    if "\0" in path or ".." in (parts := Path(path).parts) or not (root / path).is_relative_to(root) or not parts:
        raise BadInput(
            f"line {line} of {table} names {printable(path)!r}, outside the folder of the table; put the table in a"
            " folder above its images, and give paths from there"
        )
    return table.parent / (root / path).relative_to(root)


def _check_there(table: Path, rows: Sequence[Row]) -> None:
    missing = [row for row in rows if not row.path.is_file()]
    if missing:
        raise BadInput(
            f"{len(missing)} of the {len(rows)} images that {table} names are not there (first: line {missing[0].line},"
            f" {printable(str(missing[0].path))}); paths are from the folder of the table"
        )


def _once(table: Path, rows: dict[str, list[Row]]) -> dict[str, list[Row]]:
    """Every image once: a table put together from several may name one again."""
    seen: dict[Path, Row] = {}
    again = 0
    for row in (row for part in rows.values() for row in part):
        other = seen.setdefault(row.path, row)
        if other[2:] != row[2:]:
            one, two = (", ".join(filter(None, each[2:])) for each in (other, row))
            raise BadInput(f"lines {other.line} and {row.line} of {table} name the same image ({one}; {two}); keep one")
        again += other is not row
    if again:
        log.warning("%s names images again in %d of its lines; each counts once", table, again)
    return {split: [row for row in part if seen[row.path] is row] for split, part in rows.items()}
