"""The Python API: what ``import flyby`` offers, as functions over the rooms. The command line and these do the same.

Everything here works on plain values: sites in, parcels out, models that predict.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from flyby.data.arrays import bundle_from, bundle_from_torch
from flyby.data.classes import fitted, listed_site
from flyby.data.dataset import DataBundle, Dataset
from flyby.data.federation import Data, Sites
from flyby.data.settings import DataSettings
from flyby.data.site import Site, part_of
from flyby.engines.engine import engine_named
from flyby.engines.jobs import Job
from flyby.errors import BadInput, expect, unknown
from flyby.fusion.base import Server
from flyby.fusion.card import held_by
from flyby.fusion.evaluation import accuracy, check_fit, per_class, scores_of
from flyby.fusion.predictor import Predictor, check_replaceable, load_predictor, save_predictor
from flyby.machine import as_a_site, pick_device
from flyby.meeting.pipeline import Personal, check_site
from flyby.meeting.pipeline import orient as personalise
from flyby.meeting.settings import OrientSettings, stage_defaults
from flyby.models.backbones import Named, known
from flyby.models.cost import Limits
from flyby.models.given import given
from flyby.parcels import parcel as parcels_file
from flyby.parcels.inbox import Inbox
from flyby.parcels.parcel import Parcel
from flyby.parcels.signing import Trust
from flyby.runs.config import RunConfig, make_config, plan
from flyby.runs.folder import Result, Run
from flyby.runs.methods import rule_for
from flyby.runs.pipeline import Options
from flyby.runs.quality import answering
from flyby.runs.server import rule_named
from flyby.settings import build
from flyby.study.compare import compare
from flyby.training.loop import train_site
from flyby.training.recipe import Recipe

Arrays = npt.NDArray[Any] | Tensor
SPLIT = ("split", "clients", "alpha", "min_size")
MEETINGS = ("rounds", "buffer", "top", "eval_nodes")
NAMED = ("epochs", "model", "fusion", "seed")
STANDING = ("backbone", "backbone_size", "tune")


def load(data: Any, labels: Arrays | Sequence[int] | None = None, *, holdout: float | None = None, **how: Any) -> Data:
    """The data that a name or path stands for (as ``--data``), or images and labels that you hold already: numpy
    arrays, tensors, or a torch ``Dataset`` of (image, label) pairs.

    ``holdout`` is the share of images kept for testing where the source has no test images of its own.

    >>> data = flyby.load("digits")
    >>> data
    <Data digits: 1,438 images of 8x8x1, 359 for testing, 10 classes>
    """
    if isinstance(data, DataBundle):
        return Data.of(data)
    if isinstance(data, str | Path):
        words = {"name": str(data), **how} | ({} if holdout is None else {"holdout": holdout})
        settings = build(DataSettings, words, "data")
        return Data.of(settings.load(), settings.absolute())
    read: Callable[..., DataBundle] = bundle_from_torch if labels is None else bundle_from
    allowed = signature(read).parameters.keys() - {"data", "images", "labels"}
    if strange := [word for word in how if word not in allowed]:
        raise unknown("word for images from Python", strange[0], allowed)
    share = {"holdout": 0.2 if holdout is None else holdout} if how.get("test") is None else {}
    return Data.of(read(*((data,) if labels is None else (data, labels)), **share, **how))


def recipe_for(
    site: Site, method: str = "aurora", *, settings: Mapping[str, Any] | None = None, **words: Any
) -> Recipe:
    """All that decides what a site sends: the method's settings, with yours in place of its own.

    ``words`` are ``epochs``, ``model``, ``seed``, ``backbone``, ``backbone_size`` and ``tune``; ``settings`` holds any
    other, as ``--set`` does.

    >>> flyby.recipe_for(flyby.load("digits").split()[0], "fafi", epochs=3).train.epochs
    3
    """
    allowed = [word for word in (*NAMED, *STANDING) if word != "fusion"]
    if strange := [word for word in words if word not in allowed]:
        raise unknown("word of a training", strange[0], allowed)
    config = make_config(
        method, assignments=[*assignments(standing(words)), *assignments(settings)], **_among(NAMED, words)
    )
    expect(site, Site, "a training is of one site, such as data.split(clients=5)[0]")
    part = site.train
    sample = Dataset(part.images.numpy(), np.zeros(len(part), dtype=np.int64), site.class_names, "")
    return plan(config, DataBundle("site", sample, mirror=site.mirror)).normalised(sample).recipe


def backbone(
    module: nn.Module,
    name: str,
    *,
    size: int | tuple[int, int],
    dim: int | None = None,
    mean: Sequence[float] = (0.5, 0.5, 0.5),
    std: Sequence[float] = (0.25, 0.25, 0.25),
) -> Named:
    """Any module that gives features ``[B, dim]`` for images ``[B, C, size, size]``, as the ``backbone`` of trainings
    in this process. ``mean`` and ``std`` have a number for each channel that it takes, for pixels in 0..1. Parcels call
    it ``own:NAME`` and know it by a hash of its tensors; who wants answers from them must give the same module first.

    >>> import torch
    >>> eyes = flyby.backbone(torch.nn.Flatten(), "pixels", size=8, mean=[0.5], std=[0.25])
    >>> eyes.name, eyes.backbone.dim
    ('own:pixels', 64)
    >>> site = flyby.load("digits").split(clients=3, alpha=0.5)[0]
    >>> flyby.train(site, method="fedavg", epochs=1, backbone=eyes).manifest.spec.name
    'own:pixels'
    """
    return given(module, name, size, dim, mean, std)


def train(
    site: Site,
    method: str = "aurora",
    *,
    device: str = "auto",
    folder: Path | str | None = None,
    settings: Mapping[str, Any] | None = None,
    classes: Sequence[str] | None = None,
    **words: Any,
) -> Parcel:
    """Train one site on its own data and return the one parcel it sends. With ``folder`` an interrupted training goes
    on where it stopped. ``classes`` are the names of all sites' classes, where some may lack a few: the network is then
    for all of them.

    >>> site = flyby.load("digits").split(clients=3, alpha=0.5)[0]
    >>> flyby.train(site, method="fedavg", epochs=1).manifest.sender
    'site-0'
    """
    expect(site, Site, "a training is of one site, such as data.split(clients=5)[0]")
    site = site if classes is None else listed_site(site, classes)
    recipe, where = recipe_for(site, method, settings=settings, **words), pick_device(device)
    with as_a_site(where):
        return train_site(site, recipe, device=where, folder=Path(folder) if folder else None, method=method).parcel


def train_all(
    sites: Sites, method: str = "aurora", *, engine: str = "processes", device: str = "auto", **how: Any
) -> list[Parcel]:
    """Train every site, as many at once as the engine can (``inline``, ``processes`` or ``ray``); the same parcels as
    :func:`train`, in site order.

    >>> sites = flyby.load("digits").split(clients=2, alpha=1.0)
    >>> [parcel.manifest.sender for parcel in flyby.train_all(sites, method="fedavg", epochs=1, engine="inline")]
    ['site-0', 'site-1']
    """
    expect(sites, Sites, "train_all takes the sites that data.split(...) gave, all of them; flyby.train takes one")
    recipe, where = recipe_for(sites[0], method, **how), pick_device(device)
    with tempfile.TemporaryDirectory(prefix="flyby-") as place:
        run = Run(place)
        sites.split.save(run.split)
        data = sites.data.source or _on_disk(sites.data, run.path)
        origin, folder = sites.split.hash, run.parcels
        jobs = [
            Job(site=name, data=data, split=run.split, origin=origin, recipe=recipe, device=where, folder=folder)
            for name in sites.names
        ]
        engine_named(engine)(jobs, lambda row: None)
        made = [parcels_file.read(job.parcel_path) for job in jobs]  # which name the objective, as a run's files do
        return [replace(one, manifest=one.manifest.model_copy(update={"method": method})) for one in made]


def _on_disk(data: DataBundle, folder: Path) -> DataSettings:
    """Images that are only in memory, under a name by which any process finds them."""
    path, names = folder / "data.npz", np.array(data.train.class_names)
    np.savez(path, x_train=data.train.images, y_train=data.train.labels, class_names=names)
    return DataSettings(name=str(path), holdout=0.0)


@dataclass(frozen=True)
class Judged:
    """How a model did on labelled images: ``confusion[i, j]`` images of class i were taken for class j.

    >>> judged = flyby.load_model(model_folder).evaluate(flyby.load("digits"))
    >>> judged.images, judged.confusion.shape
    (359, (10, 10))
    """

    accuracy: float
    per_class: dict[str, float | None]
    confusion: npt.NDArray[np.int64]
    images: int

    def __repr__(self) -> str:
        return f"accuracy {self.accuracy:.4f} on {self.images:,} images"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{escape(name)}</td><td>{'' if value is None else f'{value:.4f}'}</td></tr>"
            for name, value in self.per_class.items()
        )
        return f"<p>{self}</p><table><tr><th>class</th><th>accuracy</th></tr>{rows}</table>"


class Model:
    """A model that predicts: what fusing, personalising or loading gives.

    >>> model = flyby.load_model(model_folder)
    >>> len(model.predict(images)) == len(images)          # uint8 N x H x W x C
    True
    """

    def __init__(self, predictor: Predictor, *, device: str = "auto", card: Mapping[str, Any] | None = None) -> None:
        self.predictor, self.device, self.card = predictor, pick_device(device), dict(card or {})

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.predictor.class_names

    def scores(self, images: Arrays) -> Tensor:
        """What it says for each class, [N, C]; the largest is the answer."""
        expect(images, (Tensor, np.ndarray, list, tuple), "a model is asked about an array or a tensor of images")
        pixels = images if isinstance(images, Tensor) else torch.from_numpy(np.array(images))
        return scores_of(self.predictor, pixels, self.device)

    def predict(self, images: Arrays) -> npt.NDArray[np.int64]:
        """The number of the class of each image (``class_names`` names them)."""
        found: npt.NDArray[np.int64] = self.scores(images).argmax(1).numpy()
        return found

    def probabilities(self, images: Arrays) -> npt.NDArray[np.float32]:
        """What it says for each class, as shares that add up to one."""
        found: npt.NDArray[np.float32] = self.predictor.chances(self.scores(images)).numpy()
        return found

    def evaluate(self, data: Dataset | DataBundle | Site, *, skip_unknown: bool = False) -> Judged:
        """Accuracy on labelled images, whose classes are matched by name; of a whole bundle or site, on its test
        images. Classes that the model does not know are refused, or with ``skip_unknown`` left out."""
        kinds = (Dataset, DataBundle, Site, type(None))
        expect(data, kinds, "a model is judged on data such as data.test or flyby.load(images, labels).train")
        judged = data if data is None or isinstance(data, Dataset) else data.test
        if judged is None or not len(judged):
            raise BadInput("there are no test images to judge by; name labelled images, such as data.train")
        if not isinstance(judged, Dataset):
            assert isinstance(data, Site)
            pixels, numbers = (part.cpu().numpy() for part in (judged.images, judged.labels))
            judged = Dataset(pixels, numbers, data.class_names, data.origin)
        check_fit(self.predictor, judged)
        part = part_of(fitted(judged, self.class_names, skip=skip_unknown)[0])
        labels, scores, classes = part.labels, self.scores(part.images), len(self.class_names)
        pairs = labels.cpu() * classes + scores.argmax(1)
        confusion = torch.bincount(pairs, minlength=classes * classes).view(classes, classes)
        by_class = dict(zip(self.class_names, per_class(scores, labels, classes), strict=True))
        return Judged(accuracy(scores, labels), by_class, confusion.numpy(), len(labels))

    def save(self, folder: Path | str, *, export: bool = False) -> Path:
        """Write a deployable folder; ``export`` adds a program that plain PyTorch loads. An older model there is
        replaced; a folder that holds anything else is refused."""
        check_replaceable(Path(folder))
        return save_predictor(self.predictor, folder, self.card, export=export)

    def __repr__(self) -> str:
        specs = self.predictor.specs
        names = ", ".join(dict.fromkeys(spec.name for spec in specs))
        return f"<Model {self.predictor.kind} of {len(specs)} x {names}, {len(self.class_names)} classes>"


def fuse(
    parcels: Iterable[Parcel | Path | str],
    fusion: str | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    proxy: Dataset | None = None,
    seed: int = 0,
    device: str = "auto",
    limits: Mapping[str, int] | None = None,
) -> Model:
    """One model from many parcels, by the rule of the method they were trained by, or by another one. ``limits`` are
    what ``--max-parameters``, ``--max-memory``, ``--max-side`` and ``--max-classes`` are: ``{"max_side": 2048}``.

    >>> sites = flyby.load("digits").split(clients=2, alpha=1.0)
    >>> flyby.fuse([flyby.train(site, method="fedavg", epochs=1) for site in sites])
    <Model single of 1 x cnn-small, 10 classes>
    """
    expect(proxy, (Dataset, type(None)), "proxy images are a Dataset, such as flyby.load(FOLDER).train")
    inbox = Inbox(_listed(parcels), build(Limits, dict(limits or {}), "limits"))
    methods = [m.method for m in inbox.manifests]
    rule = rule_named(fusion or rule_for(methods), assignments(settings), methods)
    predictor = rule.fuse(inbox, Server(proxy, seed, pick_device(device)))
    card = {"fusion": rule.name, "sites": len(inbox), "held": held_by(inbox.manifests)}
    return Model(predictor, device=device, card=card)


def _listed(parcels: Iterable[Parcel | Path | str]) -> list[Parcel | Path]:
    many = "flyby takes parcels as a list, of one too: [parcel]"
    if isinstance(parcels, str | Path):
        raise BadInput(f"{many}; this is of type {type(parcels).__name__}")
    expect(parcels, Iterable, many)
    listed = list(parcels)
    for one in listed:
        expect(one, (Parcel, Path, str), "a parcel is what flyby.train gives, or the path of a .parcel")
    return [one if isinstance(one, Parcel) else Path(one) for one in listed]


def load_model(
    folder: Path | str,
    *,
    device: str = "auto",
    trust: Path | str | None = None,
    require_signed: bool = False,
    limits: Mapping[str, int] | None = None,
) -> Model:
    """The model in a folder that ``model.save`` or ``flyby fuse`` wrote, in a run folder, or in a parcel. It is rebuilt
    from its description and its tensors; nothing of the folder is run. ``trust`` and ``require_signed`` are what
    ``--trust`` and ``--require-signed`` are, ``limits`` as in :func:`fuse`.

    >>> flyby.load_model(model_folder)
    <Model single of 1 x cnn-small, 10 classes>
    """
    known = None if trust is None else Trust.load(trust)
    allowed = build(Limits, dict(limits or {}), "limits")
    found = answering(Path(folder), load_predictor(folder, known, require_signed, allowed), pick_device(device))
    return Model(found, device=device)


def orient(
    own: Parcel | Path | str,
    received: Iterable[Parcel | Path | str],
    site: Site,
    variant: str = "fol",
    *,
    settings: Mapping[str, Any] | None = None,
    seed: int = 0,
    device: str = "auto",
) -> Model:
    """Personalise a node's own model from those it received, on its own data, with no server. The site needs
    validation images.

    >>> sites = flyby.load("digits").split(clients=3, alpha=1.0, val=0.2)
    >>> own, *received = [flyby.train(site, method="fedavg", epochs=1) for site in sites]
    >>> flyby.orient(own, received, sites[0], variant="fol-n", settings={"epochs": 1})
    <Model single of 1 x cnn-small, 10 classes>
    """
    expect(site, Site, "a node's images are a site, such as data.split(clients=5, val=0.15)[0]")
    own, *others = (one if isinstance(one, Parcel) else read_parcel(one) for one in _listed([own, *_listed(received)]))
    if own.manifest.class_names != site.class_names:
        site = listed_site(site, own.manifest.class_names)
    check_site(own, site, variant)
    chosen = build(OrientSettings, {**stage_defaults(site.size, variant)[1], **_dict(settings)}, "orient")
    made: Personal = personalise(own, others, site, chosen, seed=seed, device=pick_device(device), variant=variant)
    return Model(made.predictor, device=device, card={"method": variant, "node": own.manifest.sender})


def run(
    method: str = "aurora",
    data: str | Path = "digits",
    out: Path | str = "runs/run",
    *,
    options: Options | None = None,
    settings: Mapping[str, Any] | None = None,
    **words: Any,
) -> Result:
    """A whole federation on one machine, as ``flyby run``: split, train every site, fuse, judge, report.

    ``words`` are the options of that command (``clients``, ``alpha``, ``epochs``, ``seed``, ``model``, ``fusion``,
    ``backbone``, ``split``, ``rounds`` ...), ``settings`` what ``--set`` takes, ``options`` where and how it runs.

    >>> flyby.run("fedavg", "digits", folder, clients=2, alpha=1.0, epochs=1).uploads
    2
    """
    expect(method, str, "run takes one method by its name; `flyby run --method a,b` takes several")
    expect(
        data, (str, Path), "run reads its data itself: give a name or a path; arrays go to data.split and flyby.train"
    )
    config = _config(method, str(data), settings, words)
    quiet = options or Options(quiet=True)
    return compare({method: config}, Path(out), quiet)[method]


def _config(method: str, data: str, settings: Mapping[str, Any] | None, words: dict[str, Any]) -> RunConfig:
    allowed = (*NAMED, *STANDING, *SPLIT, *MEETINGS, "size")
    if strange := [word for word in words if word not in allowed]:
        raise unknown("word of a run", strange[0], allowed)
    split = {("name" if word == "split" else word): words[word] for word in SPLIT if word in words}
    return make_config(
        method,
        assignments=[*assignments(standing(words)), *assignments(settings)],
        data={"name": data, "size": words.get("size")},
        split=split,
        orient=_among(MEETINGS, words),
        **_among(NAMED, words),
    )


def _among(names: Sequence[str], words: Mapping[str, Any]) -> dict[str, Any]:
    return {word: words[word] for word in names if word in words}


def standing(words: Mapping[str, Any]) -> dict[str, Any]:
    """What was said of a backbone, as settings; it may be one that :func:`backbone` gave."""
    found = _among(STANDING, words)
    if isinstance(one := found.get("backbone"), Named):
        if known(one.name).backbone.sha256 != one.backbone.sha256:
            raise BadInput(f"{one.name} is another module by now; call flyby.backbone again, and with another name")
        found["backbone"] = one.name
    return {f"model.{word}": value for word, value in found.items()}


def assignments(settings: Mapping[str, Any] | None) -> list[str]:
    """Settings as the words of ``--set``."""
    return [f"{name}={json.dumps(value, default=_number)}" for name, value in _dict(settings).items()]


def _dict(settings: Mapping[str, Any] | None) -> Mapping[str, Any]:
    expect(settings, (Mapping, type(None)), 'settings are a dict such as {"train.lr": 0.01}')
    return settings or {}


def _number(value: Any) -> Any:
    """A number of numpy's, or an array of them, as JSON has it."""
    expect(value, (np.generic, np.ndarray), "a setting is a number, a word, true or false, or a list of them")
    return value.tolist()


def read_parcel(path: Path | str) -> Parcel:
    """A parcel, read and checked; nothing in it is ever run.

    >>> flyby.read_parcel(path).manifest.sender
    'site-0'
    """
    return parcels_file.read(path)


def write_parcel(parcel: Parcel, path: Path | str) -> int:
    """Write a parcel, whole or not at all; returns its size in bytes.

    >>> parcel = flyby.read_parcel(path)
    >>> flyby.write_parcel(parcel, path) == parcel.size
    True
    """
    return parcels_file.write(parcel, path)
