"""``--like``: what another site's parcel says of how it was trained, as the words of a command. Rules that combine
weights or sums need one network at all sites, and nobody should copy a dozen settings by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyby.errors import BadInput
from flyby.fusion.closed.kept import SUMS, read_kept
from flyby.fusion.predictor import load_predictor, model_folder
from flyby.models import ModelSpec
from flyby.objectives import OBJECTIVES
from flyby.parcels import parcel
from flyby.parcels.parcel import Manifest
from flyby.runs.config import ModelSettings
from flyby.runs.methods import method_of
from flyby.settings import build
from flyby.training.settings import TrainSettings, batch_size

MACHINE = ("compile", "snapshots")  # of the machine, not of the training


@dataclass(frozen=True)
class Like:
    """The method and seed of a parcel, and its settings as ``--set`` takes them."""

    manifest: Manifest
    method: str
    seed: int
    words: list[str]

    @property
    def size(self) -> int | None:
        height, width = self.manifest.spec.size
        return height if height == width else None

    @classmethod
    def at(cls, path: Path, backbone: str | None = None) -> Like:
        """``backbone`` is where one of flyby's own lies on this machine: parcels name it by its hash."""
        manifest = manifest_at(path)
        if backbone is None and manifest.spec.name.partition(":")[0] in ("flyby", "own"):
            raise BadInput(f"{path} stands on {manifest.spec.name}; give its model or parcel with --backbone as well")
        method, told = method_of(manifest.method), manifest.provenance
        objective, train, views = (_settings(told.get(key)) for key in ("objective", "train", "views"))
        if method is None or not (objective and train and views) or not isinstance(told.get("seed"), int):
            raise BadInput(f"{path} does not say how it was trained (by {manifest.method!r}); name a site's own parcel")
        if objective.get("name") != method.objective:
            raise BadInput(f"{path} was trained for another objective than {method.name}'s; name its settings yourself")
        found = {f"model.{key}": value for key, value in _network(manifest.spec, path).items()}
        asked = {key: value for key, value in objective.items() if key != "name"}
        found |= {f"objective.{key}": value for key, value in asked.items()}
        kind = OBJECTIVES[method.objective]
        preferred = kind.preferred_batch(build(kind.settings_type, asked, "objective"))
        found |= {f"train.{key}": value for key, value in _training(train, manifest, preferred).items()}
        found |= {f"views.{key}": value for key, value in views.items()}
        found |= {"codec": manifest.codec}
        found |= {"counts": manifest.counts_kind} if manifest.counts_kind != "exact" else {}
        words = [f"{key}={json.dumps(value)}" for key, value in found.items()]
        return cls(manifest, method.name, int(str(told["seed"])), words)


def manifest_at(path: Path) -> Manifest:
    """The manifest of a parcel; of a model folder that of the first site whose sums it keeps, or of the parcel in
    it."""
    if path.is_file():
        return parcel.read_manifest(path)
    if not path.exists():
        raise BadInput(f"there is no {path}; name another site's .parcel with --like")
    folder = model_folder(path)
    if (folder / SUMS).is_file():
        return read_kept(folder, load_predictor(folder).networks[0]).items[0].manifest  # type: ignore[arg-type]
    inside = sorted([*folder.glob("*.parcel"), *path.glob("parcels/*.parcel")])
    if not inside:
        raise BadInput(f"{path} does not keep how its sites were trained; name one of their parcels with --like")
    return parcel.read_manifest(inside[0])


def check_alike(spec: ModelSpec, other: Manifest) -> None:
    """Refuse a training that would not give the other site's network: a head may follow from a site's own images, and
    from its own classes."""
    if spec.replace(head=other.spec.head, classes=other.spec.classes) != other.spec:
        raise BadInput(
            f"the network here would be another than that of {other.sender} ({spec.name} for {spec.size[0]}x"
            f"{spec.size[1]}x{spec.channels} images); leave out what was asked for beside --like, or choose all"
            " settings yourself"
        )


def _settings(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _network(spec: ModelSpec, path: Path) -> dict[str, Any]:
    if spec.widths:
        raise BadInput(f"the network of {path} was cut to widths of its own; name a parcel that was trained as a whole")
    words: dict[str, Any] = {"projector": list(spec.projector), "mean": list(spec.mean), "std": list(spec.std)}
    words = {key: value for key, value in words.items() if value}
    if spec.backbone is None:
        return words | {"name": spec.name, "width": spec.width, "stem": spec.stem}
    kind = spec.backbone
    words |= {"backbone": spec.name, "backbone_size": kind.size[0]}
    words |= {"tune": kind.tune} if kind.tune != "head" else {}
    words |= {"rank": kind.rank} if kind.rank else {}
    # How it looks, where flyby's settings know of it.
    more = {key: getattr(kind, key) for key in ("looks", "layers") if key in ModelSettings.model_fields}
    return words | {key: value for key, value in more.items() if value != type(kind).model_fields[key].default}


def _training(told: dict[str, Any], manifest: Manifest, preferred: int) -> dict[str, Any]:
    """The batch is told as it was taken: where it is the one that follows from the number of images, nobody chose
    it."""
    known = {key: value for key, value in told.items() if key in TrainSettings.model_fields and key not in MACHINE}
    usual = batch_size(TrainSettings(), preferred, manifest.samples)
    return {key: value for key, value in known.items() if key != "batch" or value != usual}
