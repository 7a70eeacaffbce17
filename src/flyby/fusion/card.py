"""The card of a model: ``README.md`` in the form that the Hugging Face hub reads, YAML facts first, then a page for
people. It is written from ``model.json`` alone, so that whoever adds a fact there (``noted``) writes it again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flyby.errors import BadInput
from flyby.files import read_json, write_json, write_text
from flyby.names import printable
from flyby.parcels.parcel import Manifest
from flyby.parcels.signing import FOLDER_FILE

LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}")
SITES, CLASSES, RESULTS = 50, 100, 10  # at the most of each on a card
RESULT = ("data", "images", "accuracy", "interval", "calibration_error", "trained_on")
Config = Mapping[str, Any]  # of model.json
# Facts that have a place of their own on the page.
PLACED = ("license", "held", "evaluated", "versions", "senders", "classes")


def check_licence(name: str) -> str:
    """A licence as the hub names it."""
    if not LICENCE.fullmatch(name.lower()):
        raise BadInput(
            f"{name[:40]!r} is no name of a licence; give one as the Hugging Face hub writes them: apache-2.0,"
            " cc-by-4.0, other"
        )
    return name.lower()


def held_by(manifests: Iterable[Manifest]) -> list[dict[str, Any]]:
    """Who held how many images of what, as far as the parcels say."""
    rows = []
    for one in list(manifests)[:SITES]:
        counts = dict(zip(one.class_names, one.counts or (), strict=False))
        row: dict[str, Any] = {"site": one.sender, "images": one.samples}
        if one.counts is not None:
            row["counts"] = {name: n for name, n in counts.items() if n} if len(counts) <= CLASSES else len(counts)
            row |= {} if one.counts_kind == "exact" else {"counts_kind": one.counts_kind}
        rows.append(row | ({"sites": one.sites} if one.sites > 1 else {}))
    return rows


def facts_of(config: Config) -> dict[str, Any]:
    """The facts for people in a ``model.json``, which may be anybody's: those with a place of their own only in the
    form that they have there."""
    card = config.get("card")
    facts = dict(card) if isinstance(card, dict) else {}
    forms = {"held": _is_share, "evaluated": _is_result}
    for name, fits in forms.items():
        rows = facts.get(name)
        facts[name] = [row for row in rows if isinstance(row, dict) and fits(row)] if isinstance(rows, list) else []
    if not (isinstance(facts.get("license"), str) and LICENCE.fullmatch(facts["license"])):
        facts.pop("license", None)
    if not isinstance(facts.get("versions"), dict):
        facts.pop("versions", None)
    return {key: value for key, value in facts.items() if value != []}


def _is_share(row: Mapping[str, Any]) -> bool:
    counts = row.get("counts")
    held = counts is None or _number(counts) or (isinstance(counts, dict) and all(map(_number, counts.values())))
    return held and _number(row.get("images")) and (row.get("sites") is None or _number(row["sites"]))


def _is_result(row: Mapping[str, Any]) -> bool:
    between, others = row.get("interval"), (row.get("calibration_error"), row.get("trained_on"))
    fits = between is None or (isinstance(between, list) and len(between) == 2 and all(map(_number, between)))
    return (
        fits
        and _number(row.get("images"))
        and _number(row.get("accuracy"))
        and all(one is None or _number(one) for one in others)
    )


def _number(value: Any) -> bool:
    return type(value) in (int, float)


def check_open(folder: Path) -> None:
    """A card can be written to, or BadInput."""
    if folder.is_file():
        raise BadInput(f"{folder} is a parcel, which has no card; make a model of it first: flyby fuse")
    if (folder / FOLDER_FILE).exists():
        raise BadInput(f"{folder} is signed, so its card stays as it is; evaluate first, then sign it: flyby sign")


def noted(folder: Path, result: Mapping[str, Any]) -> None:
    """Put what an evaluation found onto the card of a model: ``data`` (of a path only its last name), ``images``,
    ``accuracy``, and where known ``interval`` (two numbers), ``calibration_error``, and how many of the images it was
    ``trained_on``. An older result on the same data goes."""
    check_open(folder)
    config = read_json(folder / "model.json")
    card, data = facts_of(config), str(result["data"])
    new = {key: result[key] for key in RESULT if result.get(key) is not None}
    new["data"] = data if data.startswith("hf:") else Path(data).name or data
    old = [one for one in card.get("evaluated", []) if one.get("data") != new["data"]]
    config["card"] = card | {"evaluated": [*old, new][-RESULTS:]}
    write_json(folder / "model.json", config)
    write_text(folder / "README.md", card_of(config, program=(folder / "model.pt2").exists()))


def card_of(config: Config, *, program: bool = False, load: str | None = None) -> str:
    """The page. ``program``: there is a ``model.pt2`` to speak of; ``load`` stands in place of how flyby loads it."""
    facts = facts_of(config)
    config, name = {**config, "card": facts}, _plain(facts.get("name") or "A model fused by flyby")
    parts = [_front(config, onnx=load is not None), f"# {name}", _what(config), _facts(facts), _classes(config)]
    parts += [_sites(facts.get("held") or []), _results(config), _limits(config)]
    parts += [_loading(config, program) if load is None else load, _made(facts)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front(config: Config, onnx: bool) -> str:
    """The YAML that the hub reads."""
    import yaml

    card = config["card"]
    told: dict[str, Any] = {"library_name": "onnx" if onnx else "flyby", "pipeline_tag": "image-classification"}
    told |= {"license": card["license"]} if card.get("license") else {}
    kinds = ["onnx"] if onnx else ["flyby", "safetensors"]
    told["tags"] = [*kinds, "image-classification", "federated-learning", "one-shot-federated-learning"]
    told["metrics"] = ["accuracy"]
    if card.get("evaluated"):
        told["model-index"] = [{"name": str(card.get("name") or "model"), "results": _index(card["evaluated"])}]
    return f"---\n{yaml.safe_dump(told, sort_keys=False, allow_unicode=True)}---"


def _index(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for one in results:
        data = {"name": printable(str(one.get("data"))), "type": "image-classification"}
        metrics = [{"type": "accuracy", "value": one["accuracy"]}]
        rows.append({"task": {"type": "image-classification"}, "dataset": data, "metrics": metrics})
    return rows


def _what(config: Config) -> str:
    spec, names = config["specs"][0], sorted({s["name"] for s in config["specs"]})
    (height, width), channels, count = spec["size"], spec["channels"], len(config["specs"])
    pixels = f"{channels} channel{'s' if channels > 1 else ''} ({spec.get('pixels', 'uint8')})"
    networks = f"one network ({names[0]})" if count == 1 else f"{count} networks ({', '.join(names)})"
    return (
        f"It tells {len(config['class_names'])} classes of images apart: {config['kind']} of {networks}, for images of"
        f" {height} x {width} pixels in {pixels}."
        " It was trained where the images are, by one-shot federated learning: models were sent, images were not."
    )


def _facts(card: Mapping[str, Any]) -> str:
    lines = [f"- {key}: {_plain(value)}" for key, value in card.items() if key not in PLACED]
    licence = card.get("license")
    return "\n".join([*lines, f"- licence: {licence or 'none given; ask who made it before you use it'}"])


def _classes(config: Config) -> str:
    names = config["class_names"]
    shown = ", ".join(_plain(name) for name in names[:CLASSES])
    more = f", and {len(names) - CLASSES} more in `model.json`" if len(names) > CLASSES else ""
    return f"## Classes\n\n{shown}{more}"


def _sites(rows: Sequence[Mapping[str, Any]]) -> str:
    """Who held how many."""
    if not rows:
        return ""
    lines = ["## Who held how many images", "", "| site | images | of which |", "|---|---|---|"]
    for row in rows:
        counts, kind = row.get("counts"), row.get("counts_kind")
        if isinstance(counts, Mapping):
            each = ", ".join(_plain(name) if kind == "binary" else f"{_plain(name)}: {n}" for name, n in counts.items())
            each += " (noisy)" if kind == "noisy" else ""
        else:
            each = f"{counts} classes" if counts else "not shared"
        who = _plain(row.get("site")) + (f" ({row['sites']} sites)" if row.get("sites") else "")
        lines.append(f"| {who} | {row['images']:,} | {each} |")
    return "\n".join(lines)


def _results(config: Config) -> str:
    rows = config["card"].get("evaluated") or []
    if not rows:
        return "## Accuracy\n\nNot known: nobody has evaluated it yet (`flyby evaluate . --data PATH --card`)."
    lines = ["## Accuracy", "", "| data | images | accuracy | 95 % interval |", "|---|---|---|---|"]
    more = []
    for one in rows:
        low, high = one.get("interval") or (None, None)
        data, between = _plain(one.get("data")), "not given" if low is None else f"{low:.1%} to {high:.1%}"
        lines.append(f"| {data} | {one['images']:,} | {one['accuracy']:.1%} | {between} |")
        if known := one.get("trained_on"):
            more.append(f"It was trained on {known:,} of the images of {data}: on new ones it will be less accurate.")
        if (error := one.get("calibration_error")) is not None:
            more.append(f"On {data} its confidence is {error:.1%} away from its accuracy (calibration error).")
    return "\n".join(lines) + "".join(f"\n\n{line}" for line in more)


def how_sure(temperature: float, measured: bool) -> str:
    """What a model's probabilities are worth, in words that follow "its probabilities are"."""
    if measured:
        return f"calibrated at the sites (temperature {temperature:.3g}), on images like theirs"
    if temperature != 1:
        return "as sure as is usual for its rule, which no site has measured: on other images they may be far off"
    return "not calibrated: they rank the classes, and are no chances to be right"


def _limits(config: Config) -> str:
    sure = how_sure(config.get("temperature", 1), config.get("measured") is True)
    return (
        "## Intended use and limits\n\n"
        "- It is meant for images of these classes, taken as those of the sites were. Every other image gets one of\n"
        "  these names too: it cannot say that it does not know.\n"
        f"- Its probabilities are {sure}.\n"
        "- What it does on other cameras, places or groups of people than the sites had was not looked at.\n"
        "- No decision about a person should rest on it alone."
    )


def _made(card: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in (card.get("versions") or {}).items())
    return f"Made with {versions}." if versions else ""


def _plain(value: Any) -> str:
    """A fact as one line of text in which nothing is markup."""
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)
    return re.sub(r"([\\`*|<>\[\]])", r"\\\1", printable(" ".join(text.split())[:500]))


def _loading(config: Config, program: bool) -> str:
    spec = config["specs"][0]
    (height, width), channels, pixels = spec["size"], spec["channels"], spec.get("pixels", "uint8")
    text = f"""## How to use it

```
flyby predict . IMAGE_OR_FOLDER...
flyby serve .
flyby evaluate . --data PATH
flyby export . --out model-onnx
```

The same in Python. This reads `model.json` and `model.safetensors`, and nothing in them is run:

```python
import flyby
model = flyby.load_model(".")
print(model.class_names)   # then model.predict(images): {pixels}, N x {height} x {width} x {channels}
```"""
    if not program:
        return text
    return (
        text
        + f"""

Without flyby, in plain PyTorch. `model.pt2` is a program: **loading it runs whatever it says**, also what somebody
wrote into it on the way. Load it only where nobody but you could change this folder, or after `flyby evaluate` with
`--trust FILE --require-signed` has found it as its maker signed it.

```python
import torch
model = torch.export.load("model.pt2").module()
images = torch.zeros(1, {height}, {width}, {channels}, dtype=torch.{pixels})   # your images: {pixels}, N x H x W x C
with torch.no_grad():
    print(model(images).argmax(1))
```"""
    )
