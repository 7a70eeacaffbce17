"""Tiny datasets on disk, for any test that needs a real source."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
NAMES = ("cat", "dog", "owl")


def make_images(count: int, size: tuple[int, int] = (8, 8), channels: int = 3, seed: int = 0) -> Pixels:
    """Random uint8 images [count, H, W, C]."""
    return np.random.RandomState(seed).randint(0, 256, (count, *size, channels)).astype(np.uint8)


def encode(image: Pixels, kind: str = "PNG") -> bytes:
    """One image [H, W, C] as the bytes of a PNG, JPEG or (lossless) WebP file; C = 1 is grey, 2 grey with alpha, 4 RGBA."""
    from PIL import Image

    buffer = io.BytesIO()
    picture = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
    picture.save(buffer, kind, **({"lossless": True} if kind == "WEBP" else {}))
    return buffer.getvalue()


def make_parquet(
    folder: Path,
    split: str,
    images: Sequence[Pixels | bytes | None] | Pixels,
    labels: Sequence[Any] | npt.NDArray[Any],
    names: Sequence[str] | None = NAMES,
    *,
    shards: int = 1,
    raw: bool = False,
    kind: str = "PNG",
    columns: Mapping[str, Sequence[Any]] | None = None,
    image_column: str = "image",
    label_column: str = "label",
    file: str = "{split}-{shard:05d}-of-{shards:05d}.parquet",
) -> list[Path]:
    """Parquet shards in the Hugging Face layout; an image given as bytes is stored as it is (so broken ones are easy)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    data = [image if image is None or isinstance(image, bytes) else encode(image, kind) for image in images]
    metadata = None
    if names is not None:
        features = {image_column: {"_type": "Image"}, label_column: {"names": list(names), "_type": "ClassLabel"}}
        metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    paths = []
    for shard, rows in enumerate(np.array_split(np.arange(len(data)), shards)):
        stored: list[Any] = [data[i] if raw else {"bytes": data[i], "path": f"{i}.png"} for i in rows]
        kind_of = pa.binary() if raw else pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        table = {
            image_column: pa.array(stored, kind_of),
            label_column: pa.array([labels[i] for i in rows], None if len(rows) else pa.int64()),
        }
        table |= {name: pa.array([values[i] for i in rows]) for name, values in (columns or {}).items()}
        paths.append(folder / file.format(split=split, shard=shard, shards=shards))
        pq.write_table(pa.table(table).replace_schema_metadata(metadata), paths[-1])
    return paths


def make_tree(
    root: Path,
    images: Sequence[Pixels | bytes] | Pixels,
    labels: Sequence[int] | npt.NDArray[Any],
    names: Sequence[str] = NAMES,
    *,
    kind: str = "PNG",
) -> Path:
    """A folder of class folders, one (possibly empty) for every name; files are numbered in the order given."""
    for name in names:
        (root / name).mkdir(parents=True, exist_ok=True)
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        data = image if isinstance(image, bytes) else encode(image, kind)
        (root / names[int(label)] / f"{i:05d}.{kind.lower()}").write_bytes(data)
    return root


def make_npz(path: Path, **arrays: Any) -> Path:
    """An .npz of the given arrays, such as ``images=..., labels=...``."""
    np.savez(path, **arrays)
    return path
