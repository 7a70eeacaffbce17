"""The noun ``Round``: one collection of parcels over Flower, as the few plain values that Flower's run config can
carry.

A node's own settings (``NodeSettings``: where its data is, what it is called, its signing key) come from its SuperNode
and never cross.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from flyby.data.settings import DataSettings
from flyby.errors import BadInput
from flyby.fusion import FUSIONS
from flyby.names import check_name
from flyby.objectives import OBJECTIVES
from flyby.parcels.arrivals import seconds
from flyby.runs.config import RunConfig, make_config
from flyby.runs.methods import METHODS, check_pair
from flyby.settings import build

MEGABYTE = 1_000_000
SEPARATOR = ";"


def _dashed(name: str) -> str:
    return name.replace("_", "-")


class _Plain(BaseModel):
    """Scalars under names with dashes, as Flower's configs want them; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=_dashed, populate_by_name=True)

    def scalars(self) -> dict[str, str | int | float | bool]:
        return self.model_dump(by_alias=True)

    def toml(self) -> str:
        """One ``key = value`` line a setting; a JSON string (but for DEL), number or truth value is
        the same in TOML."""
        written = {
            key: json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
            for key, value in self.scalars().items()
        }
        return "".join(f"{key} = {value}\n" for key, value in written.items())


class Round(_Plain):
    """What all hosts of a round agree on. An empty text or a zero stands for the default of the method (or of the
    data)."""

    method: str = Field("aurora", description="whose local training, a method of `flyby methods`")
    fusion: str = Field("", description="another server rule than the method's own")
    model: str = Field("", description="architecture; by default one that fits the images")
    epochs: int = Field(0, ge=0, description="local epochs")
    seed: int = Field(0, description="everything random follows from it")
    size: int = Field(0, ge=0, description="resize images to this many pixels a side")
    settings: str = Field("", description="other settings, as with --set, separated by semicolons")
    sites: int = Field(
        0,
        ge=0,
        description="how many sites are expected: the round ends when all have answered; 0 waits for the deadline",
    )
    min_sites: int = Field(0, ge=0, description="fewest parcels to fuse; 0: all sites that are expected")
    deadline: str = Field("10m", description="the round ends after this time whoever is missing, e.g. 90s, 10m, 2h")
    max_megabytes: int = Field(500, ge=1, le=4000, description="largest parcel that a site may send")
    trust: str = Field("", description="a file of `flyby keys trust` on the server's host: whose signing key is whose")
    require_signed: bool = Field(False, description="take only parcels signed with a trusted key")
    device: str = Field("auto", description="where the server fuses: auto, cpu or cuda")
    export: bool = Field(True, description="also write model.pt2, which plain PyTorch loads")
    out: str = Field("flower-round", description="the server's folder for the model, the parcels and result.json")

    @property
    def seconds(self) -> float:
        return seconds(self.deadline)

    @property
    def quorum(self) -> int:
        return self.min_sites or self.sites or 1

    @property
    def max_bytes(self) -> int:
        return self.max_megabytes * MEGABYTE

    @property
    def assignments(self) -> list[str]:
        return assignments(self.settings)

    @property
    def rule(self) -> str:
        """The server rule by name; methods without a server are refused."""
        method = METHODS[self.method]
        rule = self.fusion or method.fusion
        if rule is None or method.orient:
            raise BadInput(
                f"{self.method} sends nothing to a server; name a method that is fused, such as aurora or fedavg"
            )
        return rule

    def config(self, data: str, own: Iterable[str] = ()) -> RunConfig:
        """A site's training, as ``flyby train`` would be told it. ``own`` are the site's own settings, which win over
        the round's."""
        source = DataSettings(name=data, size=self.size or None, holdout=0.0)
        config = make_config(
            self.method,
            fusion=self.fusion or None,
            seed=self.seed,
            data=source.model_dump(),
            model=self.model or None,
            epochs=self.epochs or None,
            assignments=[*self.assignments, *own],
        )
        if config.data != source:  # else a server could choose any folder of a site's host
            raise BadInput(
                "the settings of a round may not say which data a site reads, nor how; leave out data.* (there is size"
                " for the size)"
            )
        return config

    def fusion_settings(self) -> list[str]:
        """The rule's settings as assignments: the method's own for this rule, then what the round sets."""
        own = METHODS[self.method].fusion_settings.get(self.rule, {})
        values = {**own, **self.config("data").fusion}
        return [f"{key}={json.dumps(value)}" for key, value in values.items()]

    def check(self) -> Round:
        """Refuse what cannot work before anything is trained; returns itself."""
        if self.sites and self.quorum > self.sites:
            raise BadInput(f"{self.quorum} parcels cannot come from {self.sites} sites; lower --min-sites")
        config = self.config("data")
        method, rule = METHODS[self.method], FUSIONS[self.rule]
        objective = OBJECTIVES[method.objective]
        check_pair(
            objective,
            rule,
            build(objective.settings_type, {**method.objective_settings, **config.objective}, "objective"),
        )
        if not rule.data_free and config.proxy is None:
            raise BadInput(
                f"{rule.name} learns from unlabelled proxy images; name some on the server's host with --set proxy=PATH"
            )
        if self.require_signed and not self.trust:
            raise BadInput(
                "require-signed needs trust, the file on the server's host that says whose key is whose; make one with:"
                " flyby keys trust"
            )
        _ = self.seconds
        return self


class NodeSettings(_Plain):
    """What a SuperNode's ``--node-config`` says about its site; it stays there."""

    data: str = Field(description="this site's own images")
    site: str = Field(description="this site's name, as it was registered")
    key: str = Field("", description="the site's signing key")
    settings: str = Field("", description="the site's own settings, separated by semicolons; they win over the round's")
    work: str = Field("", description="folder for the parcel and the checkpoints; by default a temporary one")
    device: str = Field("auto", description="where the site trains: auto, cpu or cuda")


def assignments(text: str) -> list[str]:
    return [part.strip() for part in text.split(SEPARATOR) if part.strip()]


def joined(settings: Iterable[str]) -> str:
    """Several ``--set`` values as the one text that a round carries."""
    parts = list(settings)
    for part in parts:
        if SEPARATOR in part:
            raise BadInput(f"--set {part!r} cannot travel: a semicolon separates settings; give each its own --set")
    return SEPARATOR.join(parts)


def read_round(config: Mapping[str, Any]) -> Round:
    return build(Round, config, "run-config")


def read_node(config: Mapping[str, Any]) -> NodeSettings:
    missing = [name for name in ("data", "site") if not config.get(name)]
    if missing:
        raise BadInput(
            f'this SuperNode does not say its {missing[0]}; start it with --node-config \'data="/path"'
            ' site="hospital-a"\''
        )
    node = build(NodeSettings, config, "node-config")
    check_name(node.site)
    return node


def must_be_new(folder: Path) -> None:
    """An output folder may be there already if it is empty: nothing is ever replaced."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder} is already there; name a new folder for the output")
