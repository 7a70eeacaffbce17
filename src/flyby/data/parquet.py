"""Parquet image files in the Hugging Face layout: which files there are, what their columns hold, and their images
block by block."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flyby.data.cache import Item, SourceSplit
from flyby.data.folders import SPLITS
from flyby.data.places import from_names
from flyby.errors import BadInput

IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "labels", "fine_label")
SHARD = re.compile(r"(.+?)-(\d+)-of-(\d+)(?:-[0-9a-f]+)?")
BLOCK = 1024  # rows held in memory at a time, and of large images so many bytes:
BLOCK_BYTES = 32 << 20


def find(root: Path, name: str) -> list[Path]:
    """The Parquet files of a dataset folder: in it, in its ``data``, in its folders named by split, or in its only
    other folder."""

    def within(folder: Path) -> list[Path]:
        return sorted(path for path in folder.glob("*.parquet") if not path.name.startswith("."))

    if root.is_file():
        return [root]
    for folder in (root, root / "data"):
        if within(folder):
            return within(folder)
    inside = sorted(root.iterdir()) if root.is_dir() else []
    holders = [folder for folder in inside if folder.is_dir() and not folder.name.startswith(".") and within(folder)]
    if len(holders) > 1 and any(folder.name.lower() not in SPLITS for folder in holders):
        raise BadInput(
            f"{name} holds several Parquet datasets ({', '.join(folder.name for folder in holders)}); name one of them"
        )
    return [path for folder in holders for path in within(folder)]


def shards(root: Path, name: str) -> dict[str, list[Path]]:
    """The Parquet files of each split, as its files name it, in order; a missing shard is an error rather than a
    smaller dataset."""
    found: dict[str, list[Path]] = {}
    numbers: dict[str, list[tuple[int, int]]] = {}
    paths = find(root, name)
    if not paths:
        raise BadInput(f"{name} holds no Parquet files")
    for path in paths:
        shard = SHARD.fullmatch(path.stem)
        inside = path.parent.name.lower() in SPLITS and path.parent != root
        split = path.parent.name if inside else shard[1] if shard else path.stem
        found.setdefault(split, []).append(path)
        if shard and not inside:
            numbers.setdefault(split, []).append((int(shard[2]), int(shard[3])))
    for split, seen in numbers.items():
        if sorted(seen) != [(i, len(found[split])) for i in range(len(found[split]))]:
            raise BadInput(
                f"{name} has {len(found[split])} files of its {split} split where their names promise {seen[0][1]};"
                " fetch them again"
            )
    return found


def words(paths: Iterable[Path], column: str | None) -> list[str]:
    """The class names of files whose labels are words rather than numbers; none where they are numbers."""
    import pyarrow.parquet as pq

    found: set[str] = set()
    for path in paths:
        with _readable(path), pq.ParquetFile(path) as file:
            label = _label_column(file.schema_arrow, path, column)
            if _is_text(file.schema_arrow.field(label).type):
                found |= set(file.read(columns=[label])[label].unique().to_pylist()) - {None}
    return sorted(found)


def read_part(
    role: str, paths: Sequence[Path], column: str | None, known: Sequence[str]
) -> tuple[SourceSplit, list[list[str]]]:
    """One split's labels, groups and blocks of encoded images; and the class names of every shard that has them.
    ``known`` are the classes where labels are words."""
    import pyarrow.parquet as pq

    labels: list[npt.NDArray[np.int64]] = []
    groups: list[str] = []
    images: list[str] = []
    names: list[list[str]] = []
    called: list[str | None] = []
    grouped = column is not None
    for path in paths:
        with _readable(path), pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            images.append(_image_column(schema, path))
            label = _label_column(schema, path, column)
            if column is not None and column not in schema.names:
                if role == "train":
                    raise BadInput(f"{path} has no column {column!r}; its columns are {', '.join(schema.names)}")
                grouped = False
            table = file.read(columns=[label, *_paths(schema, images[-1]), *([column] if column and grouped else [])])
            if table[label].null_count:
                raise BadInput(
                    f"{path} has {table[label].null_count} rows without a label; fill them in or leave the rows out"
                )
            labels.append(_numbers(table[label], known, path))
            if column is not None and grouped:
                if table[column].null_count:
                    raise BadInput(
                        f"{path} has {table[column].null_count} rows without a {column!r}; fill them in or leave the"
                        " rows out"
                    )
                groups += [str(value) for value in table[column].to_pylist()]
            names += _class_names(schema, label, path)
            told = table[images[-1]].to_pylist() if _paths(schema, images[-1]) else [None] * len(table)
            called += [(row or {}).get("path") for row in told]
    starts = np.cumsum([0, *(len(part) for part in labels)])

    def blocks() -> Iterator[Sequence[Item]]:
        for path, image in zip(paths, images, strict=True):
            with _readable(path), pq.ParquetFile(path) as file:
                each = path.stat().st_size // max(1, file.metadata.num_rows) + 1
                for batch in file.iter_batches(max(1, min(BLOCK, BLOCK_BYTES // each)), columns=[image]):
                    values = batch.column(0)
                    yield (values.field("bytes") if values.type.num_fields else values).to_pylist()

    def where(row: int) -> str:
        shard = int(np.searchsorted(starts, row, side="right")) - 1
        return f"{paths[shard].name}:{row - int(starts[shard])}"

    whose, places = groups if grouped else None, from_names(called)
    return SourceSplit(role, np.concatenate(labels), blocks, where, whose, places), names


def _is_text(kind: Any) -> bool:
    import pyarrow.types as types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _numbers(labels: Any, known: Sequence[str], path: Path) -> npt.NDArray[np.int64]:
    """Labels as whole numbers; words by their place among the ``known``."""
    text = _is_text(labels.type)
    if text != bool(known):
        raise BadInput(f"{path} labels its images with {'words' if text else 'numbers'}, other files of it do not")
    if not text:
        return np.asarray(labels.to_numpy().astype(np.int64))
    at = {name: place for place, name in enumerate(known)}
    return np.array([at[name] for name in labels.to_pylist()], dtype=np.int64)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (OSError, pyarrow.ArrowException) as error:
        raise BadInput(f"{path} is not a readable Parquet file ({str(error).splitlines()[0]})") from error


def _image_column(schema: Any, path: Path) -> str:
    import pyarrow.types as types

    def holds_bytes(kind: Any) -> bool:
        if types.is_struct(kind):
            return kind.get_field_index("bytes") >= 0 and holds_bytes(kind.field("bytes").type)
        return bool(types.is_binary(kind) or types.is_large_binary(kind))

    usable = [field.name for field in schema if holds_bytes(field.type)]
    named = [name for name in IMAGE_COLUMNS if name in usable]
    if not named and len(usable) != 1:
        raise BadInput(
            f"{path} has no image column: it needs one called image, of encoded bytes or a struct of bytes and path; "
            f"its columns are {', '.join(schema.names)}"
        )
    return (named or usable)[0]


def _paths(schema: Any, image: str) -> list[str]:
    """The column of the images' own file names, which may say where they were taken; none where it is not there."""
    import pyarrow.types as types

    kind = schema.field(image).type
    named = types.is_struct(kind) and kind.get_field_index("path") >= 0 and types.is_string(kind.field("path").type)
    return [f"{image}.path"] if named else []


def _label_column(schema: Any, path: Path, column: str | None) -> str:
    import pyarrow.types as types

    named = [name for name in LABEL_COLUMNS if name in schema.names]
    whole = [field.name for field in schema if types.is_integer(field.type) and field.name != column]
    if named and named[0] not in whole and not _is_text(schema.field(named[0]).type):
        raise BadInput(
            f"the column {named[0]} of {path} holds {schema.field(named[0]).type}; labels must be whole numbers from 0,"
            " or class names"
        )
    if not named and len(whole) != 1:
        raise BadInput(
            f"{path} has no label column: it needs one called label, of whole numbers or class names; its columns are"
            f" {', '.join(schema.names)}"
        )
    return (named or whole)[0]


def _class_names(schema: Any, label: str, path: Path) -> list[list[str]]:
    """The names that the ``datasets`` library wrote for the label column: a list of one list, or of none."""
    try:
        names = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][label]["names"]
    except (KeyError, TypeError, ValueError):
        return []
    except RecursionError:
        raise BadInput(f"the metadata of {path} are nested too deep; write the file again without them") from None
    return [[str(name) for name in names]] if isinstance(names, list) and names else []
