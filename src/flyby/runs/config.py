"""A run is a typed value: ``RunConfig`` is what was asked for, ``plan`` is what will be done, with every default filled
in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from flyby.contacts.schedule import ContactSettings
from flyby.data.dataset import DataBundle, Dataset, channel_statistics
from flyby.data.settings import DataSettings
from flyby.data.splits import SplitSettings
from flyby.data.views import ViewSettings
from flyby.errors import BadInput, unknown
from flyby.fusion import FUSIONS, Fusion, FusionSettings
from flyby.meeting.settings import FleetSettings
from flyby.models import ModelSpec
from flyby.models.backbones import Layers, Looks, Tune, seen_as
from flyby.objectives import OBJECTIVES, Objective, ObjectiveSettings
from flyby.parcels.codecs import CODECS
from flyby.runs.attacks import AttackSettings
from flyby.runs.backbones import backbone_at, tuned
from flyby.runs.methods import METHODS, Method, check_pair
from flyby.settings import Grown, build, parse_assignment, put
from flyby.training.recipe import Recipe, check_epochs
from flyby.training.settings import Counts, TrainSettings


class ModelSettings(Grown):
    """The network; sizes, channels and classes come from the data, the head from the objective."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    later = frozenset({"backbone", "backbone_size", "tune", "rank", "looks", "layers"})

    name: str | None = Field(None, description="an architecture; default: one that fits the images")
    width: float = Field(1.0, description="factor on the number of filters in every layer")
    stem: str = Field(
        "cifar",
        description="of a resnet or mobilenetv2; imagenet for images of 96 pixels and more, where none is asked for",
    )
    backbone: str | None = Field(
        None, description="one to put the head on: efficientnet-lite0|1|2, timm:NAME, hf:NAME, or a path"
    )
    backbone_size: int | None = Field(
        None, ge=8, le=4096, description="pixels a side that images get for the backbone; fewer are faster"
    )
    tune: Tune | None = Field(
        None,
        description="what of the backbone is trained and sent beside the head: last, all or lora; default: head, none",
    )
    rank: int | None = Field(None, ge=1, description="of the matrices of tune: lora; default: 4")
    looks: Looks | None = Field(
        None, description="what a frozen backbone tells of an image: of it alone (one), or mirrored: the mean of both"
    )
    layers: Layers | None = Field(
        None, description="of a frozen EfficientNet-Lite: all stages, pooled, beside the last features; default: last"
    )
    projector: tuple[int, ...] = Field((), description="widths of layers between network and head, such as [256]")
    mean: tuple[float, ...] = Field(
        (), description="of each channel, which inputs are centred by; default: from the data, or 0.5"
    )
    std: tuple[float, ...] = Field(
        (), description="of each channel, which inputs are divided by; default: from the data, or 0.5"
    )


class RunConfig(Grown):
    """One run, as asked for. Sections that depend on the method (objective, train, views, fusion) hold only what was
    set."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    later = frozenset({"contacts"})

    method: str = "fedavg"
    seed: int = 0
    data: DataSettings = DataSettings()
    split: SplitSettings = SplitSettings()
    model: ModelSettings = ModelSettings()
    fusion_name: str | None = None
    objective: dict[str, Any] = Field(default_factory=dict)
    train: dict[str, Any] = Field(default_factory=dict)
    views: dict[str, Any] = Field(default_factory=dict)
    fusion: dict[str, Any] = Field(default_factory=dict)
    orient: dict[str, Any] = Field(default_factory=dict)
    codec: str = Field("fp32", description="how weights are packed for the one crossing")
    counts: Counts = Field(
        "exact", description="what a site tells about its classes: exact, noisy (Laplace, epsilon) or binary counts"
    )
    epsilon: float = Field(1.0, gt=0, description="privacy of noisy counts: smaller is more noise")
    proxy: str | None = Field(
        None, description="unlabelled images for rules that learn from some; never the test images"
    )
    server_seed: int | None = Field(None, ge=0, description="what the server draws by, where not by the run's seed")
    locals: bool = Field(True, description="also judge each site's own model on the common test set")
    attack: AttackSettings = AttackSettings()
    contacts: ContactSettings = ContactSettings()
    admission: Literal["none", "default", "validated"] = Field(
        "none", description="the gate before the server, without or with held-out images"
    )
    judge: Literal["test", "held-out"] = Field(
        "test", description="what accuracies are of: held-out are the sites' validation images, to choose settings by"
    )


def data_of(config: RunConfig) -> DataSettings:
    """The data as its model wants it: images that are mixed or large are read at the size of its backbone."""
    data, model = config.data, config.model
    if model.backbone is None or data.size is not None or data.fit is not None:
        return data
    side = model.backbone_size or max(backbone_at(model.backbone).backbone.size)
    return data.model_copy(update={"fit": side})


SECTIONS: dict[str, type[BaseModel]] = {
    "data": DataSettings,
    "split": SplitSettings,
    "model": ModelSettings,
    "attack": AttackSettings,
    "contacts": ContactSettings,
}
TOP = ("codec", "counts", "epsilon", "proxy", "server_seed", "locals", "admission", "judge")


def make_config(
    method: str,
    *,
    fusion: str | None = None,
    seed: int = 0,
    model: str | None = None,
    epochs: int | None = None,
    assignments: Iterable[str] = (),
    **sections: Mapping[str, Any] | None,
) -> RunConfig:
    """A RunConfig from command-line words; ``--set`` wins over the named options. ``sections`` are ``data``, ``split``
    and ``orient``; what is None in them was not asked for."""
    recipe = METHODS[method]
    rule = fusion or recipe.fusion
    kinds: dict[str, type[BaseModel] | None] = {**SECTIONS, "train": TrainSettings, "views": ViewSettings}
    kinds["objective"] = OBJECTIVES[recipe.objective].settings_type
    kinds["fusion"] = FUSIONS[rule].settings_type if rule else None
    kinds["orient"] = FleetSettings if recipe.orient else None
    fields = {name: set(kind.model_fields) if kind else set() for name, kind in kinds.items()}
    asked = {**sections, "model": {"name": model}, "train": {"epochs": epochs}}
    values: dict[str, dict[str, Any]] = {name: {} for name in kinds}
    for section, words in asked.items():
        if kinds[section] is not None:
            values[section] |= {name: value for name, value in (words or {}).items() if value is not None}
    top: dict[str, Any] = {}
    for text in assignments:
        key, value = parse_assignment(text)
        section, name = _place(key, fields)
        put(values[section] if section else top, name, value)
    epochs = build(TrainSettings, values["train"], "train").epochs
    if epochs == 0 and OBJECTIVES[recipe.objective].trains:
        check_epochs(OBJECTIVES[recipe.objective], epochs)
    build(ViewSettings, {k: tuple(v) if isinstance(v, list) else v for k, v in values["views"].items()}, "views")
    build(FleetSettings, values["orient"], "orient")
    typed = {name: build(kind, values[name], name) for name, kind in SECTIONS.items()}
    rest = {name: values[name] for name in ("objective", "train", "views", "fusion", "orient")}
    return build(RunConfig, {"method": method, "seed": seed, "fusion_name": fusion, **typed, **rest, **top}, "run")


def concerning(method: str, methods: Iterable[str], assignments: Iterable[str]) -> list[str]:
    """Of what was asked for several methods at once, what concerns this one: how nodes orient means nothing to a method
    with a server beside them."""
    others = not METHODS[method].orient and any(METHODS[name].orient for name in methods)
    return [text for text in assignments if not (others and text.strip().startswith("orient."))]


def _place(key: str, fields: dict[str, set[str]]) -> tuple[str, str]:
    """Where a ``--set`` key belongs: ``train.lr``, or plain ``lr`` where only one section has it."""
    section, dot, name = key.partition(".")
    if dot:
        if section not in fields:
            raise unknown("settings section", section, fields)
        if name.partition(".")[0] not in fields[section]:
            raise (
                unknown(f"{section} setting", name, fields[section])
                if fields[section]
                else BadInput(f"this method has no {section} settings; leave {key} out, or name a method that has some")
            )
        return section, name
    if key in TOP:
        return "", key
    homes = [s for s, names in fields.items() if key in names]
    if len(homes) == 1:
        return homes[0], key
    if homes:
        raise BadInput(f"--set {key} could mean {' or '.join(f'{s}.{key}' for s in homes)}; say which")
    raise unknown("setting", key, {f"{s}.{n}" for s, names in fields.items() for n in names} | set(TOP))


@dataclass(frozen=True)
class Plan:
    """What a run will do: the recipe every site follows and the server's rule (None for ``local``)."""

    config: RunConfig
    recipe: Recipe
    fusion: Fusion | None

    def normalised(self, data: Dataset, rows: npt.NDArray[np.int64] | None = None) -> Plan:
        """The same with the statistics of each channel, where the images are tiles and nobody gave them: those of
        these training images, which then travel in the spec."""
        spec = self.recipe.spec
        if spec.pixels == "uint8" or (spec.mean and spec.std):
            return self
        if self.recipe.train.dp_epsilon is not None:
            raise BadInput(
                "the mean and spread of a site's tiles are not private (train.dp_epsilon); give numbers known otherwise"
                " with --set model.mean=[...] --set model.std=[...]"
            )
        mean, std = channel_statistics(data, rows)
        spec = spec.replace(mean=spec.mean or mean, std=spec.std or std)
        return replace(self, recipe=self.recipe.model_copy(update={"spec": spec}))


def plan(config: RunConfig, bundle: DataBundle) -> Plan:
    """Fill in every default from the method, the objective and the data; refuse what cannot work before anything is
    trained."""
    method = METHODS[config.method]
    objective = OBJECTIVES[method.objective]
    if config.codec not in CODECS:
        raise unknown("codec", config.codec, CODECS)
    data = bundle.train
    spec = _spec(config.model, data, objective.trains)
    chosen = {**method.objective_settings, **objective.suited(spec), **config.objective}
    settings = build(objective.settings_type, chosen, "objective")
    fusion = rule_of(config, method, objective, settings)
    if fusion is not None:
        fusion.check_pixels(spec)
    defaults = objective.defaults(settings) | method.train
    if spec.backbone is not None and spec.backbone.tune != "head" and "dp_epsilon" not in config.train:
        defaults = {"clip": 1.0, **defaults}  # a head that has learned nothing yet tears at what has
    train = build(TrainSettings, {**defaults, **config.train}, "train")
    if not objective.trains:  # epochs may have been asked for: one command can compare it with methods that train
        train = train.model_copy(update={"epochs": 0})
    views = objective.views(data.size, bundle.mirror)
    views = views.stilled() if spec.backbone is not None and spec.backbone.keeps else views
    views = build(type(views), {**views.model_dump(), **config.views}, "views")
    # Private sums tell noisy counts: nobody need ask for them.
    blurred = train.dp_epsilon is not None and not objective.trains and "counts" not in config.model_fields_set
    recipe = Recipe(
        spec=objective.adapt_spec(spec, settings),
        objective=objective.name,
        objective_settings=settings,
        train=train,
        views=views,
        seed=config.seed,
        codec=config.codec,
        counts="noisy" if blurred else config.counts,
        epsilon=config.epsilon,
    )
    recipe.spec.skeleton()
    return Plan(config, recipe, fusion)


def _spec(asked: ModelSettings, data: Dataset, trains: bool) -> ModelSpec:
    """The network for these images: the architecture that was asked for or one that fits, or one on a backbone."""
    of_backbone = ModelSettings.later
    shape = asked.model_dump(exclude={"name", *of_backbone})
    shape |= {"classes": data.classes, "size": data.size, "channels": data.channels, "pixels": data.pixels}
    if asked.backbone is not None:
        for name in ("name", "width", "stem"):
            if name in asked.model_fields_set and getattr(asked, name) is not None:
                raise BadInput(
                    f"a backbone comes whole, without model.{name}; --set model.projector=[256] puts layers after it"
                )
        found = seen_as(backbone_at(asked.backbone, asked.backbone_size), asked.looks or "one", asked.layers or "last")
        # Where nothing is trained, tuning may have been asked for too: of the methods that it is compared with.
        backbone = tuned(found.backbone, asked.tune, asked.rank) if trains else found.backbone
        return ModelSpec(**shape, name=found.name, backbone=backbone)
    for name in sorted(of_backbone):
        if getattr(asked, name) is not None:
            raise BadInput(f"model.{name} belongs to a backbone; name one with --backbone, or leave it out")
    if "stem" not in asked.model_fields_set and min(data.size) >= 96:
        shape["stem"] = "imagenet"
    return ModelSpec(**shape, name=asked.name or ("cnn-small" if min(data.size) < 24 else "resnet18"))


def settings_of(kind: type[Fusion], config: RunConfig, method: Method) -> FusionSettings:
    """The settings of a server rule: those of the method, and what was asked for."""
    return build(kind.settings_type, {**method.fusion_settings.get(kind.name, {}), **config.fusion}, "fusion")


def rule_of(
    config: RunConfig, method: Method, objective: type[Objective], settings: ObjectiveSettings
) -> Fusion | None:
    """The server's rule with its settings; None where there is no server."""
    if method.fusion is None:
        if config.fusion_name is not None:
            raise BadInput(
                f"{config.method} exchanges nothing, so there is nothing to fuse; leave the rule out, or name a method"
                " whose sites send: ensemble trains in the same way"
            )
        return None
    name = config.fusion_name or method.fusion
    kind = FUSIONS[name]
    rule = kind(settings_of(kind, config, method))
    check_pair(objective, rule, settings)
    if not rule.data_free and config.proxy is None:
        raise BadInput(
            f"{name} learns from unlabelled proxy images; name some with --set proxy=PATH (never the test images)"
        )
    return rule
