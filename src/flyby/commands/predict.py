"""``flyby predict``: what a model sees in image files and folders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyby.commands.common import (
    Device,
    Json,
    LimitOptions,
    ModelFolder,
    RequireSigned,
    TrustFile,
    answering_model,
    grouped,
    note,
    say,
)
from flyby.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

    from flyby.fusion import Predictor

AT_ONCE = 512  # images that are held at a time
NAMED = 20  # bad files that are named one by one

Row = dict[str, Any]


@grouped
def predict(
    *,
    model: ModelFolder,
    images: Annotated[list[Path], typer.Argument(help="Image files, and folders of them with all below.")],
    top: Annotated[int, typer.Option(min=1, help="Name so many classes for each image, the likeliest first.")] = 1,
    every: Annotated[bool, typer.Option("--all", help="Give the probability of every class.")] = False,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a table, one line per image.")] = None,
    trust: TrustFile = None,
    require_signed: RequireSigned = False,
    allowed: LimitOptions,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Say what is in some images. A file that cannot be read is named at the end; the others are answered."""
    from flyby.machine import pick_device

    predictor = answering_model(model, trust, require_signed, allowed)
    rows = list(_rows(predictor, images, pick_device(device), top, every))
    bad = [row for row in rows if "error" in row]
    if len(bad) == len(rows):
        raise BadInput(bad[0]["error"] + (f" (and {len(bad) - 1} more that cannot be used)" if len(bad) > 1 else ""))
    if csv is not None:
        _write_table(csv, rows, predictor.class_names if every else (), min(top, len(predictor.class_names)))
    text = "\n".join(f"{row['image']}: {_told(row, every)}" for row in rows if "error" not in row)
    if csv is not None:
        text = f"{csv}: {len(rows) - len(bad)} images"
    say(rows, as_json, text)
    if bad:
        note([f"{len(bad)} of {len(rows)} could not be used"])
        note(row["error"] for row in bad[:NAMED])


def _rows(predictor: Predictor, given: Iterable[Path], device: str, top: int, every: bool) -> Iterator[Row]:
    """A row for each image, in order, with what was said or what is wrong with it."""
    import torch

    from flyby.data.sources import read_image
    from flyby.fusion.evaluation import scores_of

    rows: list[Row] = []
    pixels: list[Tensor] = []

    def asked() -> Iterator[Row]:
        """What stands in ``rows`` so far, answered."""
        shares = iter(predictor.chances(scores_of(predictor, torch.stack(pixels), device)) if pixels else ())
        for row in rows:
            yield row if "error" in row else row | _answer(next(shares), predictor.class_names, top, every)
        rows.clear()
        pixels.clear()

    for path in _files(given):
        row: Row = {"image": str(path)}
        try:
            if path.is_dir():
                raise BadInput(f"the folder {path} holds no images")
            found = read_image(path, predictor.channels, predictor.size, predictor.pixels)
            pixels.append(torch.from_numpy(found.copy()))
        except BadInput as error:
            row["error"] = str(error)
        rows.append(row)
        if len(pixels) == AT_ONCE and predictor.least == 1:  # where it is not, all must be asked about together
            yield from asked()
    yield from asked()


def _files(given: Iterable[Path]) -> Iterator[Path]:
    """The files that are meant, each folder with all the images below it; a folder without any stands for itself."""
    from flyby.data.folders import image_files

    for path in given:
        yield from (image_files(path) or [path]) if path.is_dir() else [path]


def _answer(shares: Tensor, names: tuple[str, ...], top: int, every: bool) -> Row:
    order = sorted(range(len(names)), key=lambda c: -float(shares[c]))
    best = [{"class": names[c], "probability": float(shares[c])} for c in order]
    row: Row = dict(best[0])
    row |= {"top": best[:top]} if top > 1 else {}
    return row | ({"probabilities": {name: float(p) for name, p in zip(names, shares, strict=True)}} if every else {})


def _told(row: Row, every: bool) -> str:
    pairs = [(one["class"], one["probability"]) for one in row.get("top", [row])]
    if every:
        pairs = sorted(row["probabilities"].items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} ({share:.2f})" for name, share in pairs)


def _write_table(path: Path, rows: list[Row], every: tuple[str, ...], top: int) -> None:
    """image, class, probability; with --top class_2 and so on; with --all a column for each class; error."""
    import csv
    import io

    from flyby.files import write_text

    numbered = [f"_{place}" if place > 1 else "" for place in range(1, top + 1)]
    heads = [word + number for number in numbered for word in ("class", "probability")]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["image", *heads, *every, "error"])
    for row in rows:
        said = (
            [one[word] for one in row.get("top", [row]) for word in ("class", "probability")] if "class" in row else []
        )
        shares = [row["probabilities"][name] for name in every] if "class" in row else [""] * len(every)
        table.writerow([row["image"], *said, *[""] * (len(heads) - len(said)), *shares, row.get("error", "")])
    write_text(path, text.getvalue())
