"""The seam ``Fusion``: parcels in, one predictor out. A fusion never sees a training image."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict

from flyby.data.classes import fitted
from flyby.data.dataset import Dataset
from flyby.data.site import Part, part_of
from flyby.errors import BadInput
from flyby.fusion.alignment import Aligned, aligned
from flyby.fusion.predictor import Predictor
from flyby.machine import as_a_site
from flyby.models import ModelSpec
from flyby.parcels.codecs import finite
from flyby.parcels.inbox import Inbox
from flyby.registry import Registry


class FusionSettings(BaseModel):
    """Base of every fusion's settings: strict, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass
class Server:
    """Where a rule runs: what it may use, and where it says what it found.

    ``proxy`` is unlabelled data for rules that can use some; never test data. ``work`` is a folder in which long work
    keeps its checkpoints, so that the same call goes on where it was interrupted. ``report`` takes sections of the
    report, as plain data: a ``title``, and as it likes ``text``, a ``table`` (columns, rows) and ``images`` (shape,
    columns, base64 of uint8 pixels).
    """

    proxy: Dataset | None = None
    seed: int = 0
    device: torch.device | str = "cpu"
    work: Path | None = None
    report: list[dict[str, Any]] = field(default_factory=list)


class Fusion(ABC):
    """A server rule. ``needs`` is checked against the objective's ``provides`` before anything is trained."""

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    about: ClassVar[str] = ""
    needs: frozenset[str] = frozenset({"weights"})  # of a rule: under its settings; of the class: under the defaults
    wants: frozenset[str] = frozenset()  # what it reads too, where it was sent
    heterogeneous: ClassVar[bool] = False
    data_free: bool = True  # False: it cannot work without proxy images
    draws: ClassVar[bool] = False  # it makes images of its own, or changes some, which are bytes
    softmax: bool = False  # it asks members for their softmax, which for one that knows a single class says nothing
    settings_type: ClassVar[type[FusionSettings]] = FusionSettings
    edition: ClassVar[int] = 1  # how often its defaults were changed: a study's older rows are then not its own

    def __init__(self, settings: FusionSettings | None = None) -> None:
        self.settings = settings if settings is not None else self.settings_type()
        self.needs = self.needed(self.settings)

    @classmethod
    def needed(cls, settings: FusionSettings) -> frozenset[str]:
        """What sites must send under these settings: ``needs``, where nothing else is written."""
        return cls.needs

    @property
    def reads(self) -> frozenset[str]:
        return self.needs | self.wants

    def fuse(self, parcels: Inbox, server: Server | None = None) -> Predictor:
        """One predictor from many parcels, by this rule's ``combine``, over all classes that one of them names; one
        that holds a number which is not finite is nobody's."""
        if len(parcels.class_names) < 2:
            raise BadInput(f"the parcels know one class, {parcels.class_names[0]}, so there is nothing to tell apart")
        if isinstance(parcels, Aligned) or not parcels.one_list:  # another rule may have wanted them otherwise
            shares = None if self.heterogeneous else self.row_shares(parcels)
            parcels = aligned(parcels, self.reads, whole=self.heterogeneous, shares=shares)
            self.check_members(parcels)
        for manifest in parcels.manifests:
            self.check_pixels(manifest.spec)
        server = server if server is not None else Server()
        # Rules that train take sums in one order, as sites do: one seed is then one student, however many threads.
        with as_a_site(str(server.device)) if self.draws else nullcontext():
            predictor = self.combine(parcels, server)
        for name, tensor in predictor.state_dict().items():
            if not finite(tensor):
                raise BadInput(
                    f"{self.name} made a model whose {name} is not finite, so it is not kept; one of the parcels must"
                    " be at fault: leave out those you do not trust, or judge them with --validation"
                )
        return predictor

    def row_shares(self, parcels: Inbox) -> Sequence[float] | None:
        """The weights of sites in the mean of rows that stands for the row of a class which a site does not know, where
        rows are combined; None: their median."""
        return weights_of(parcels, getattr(self.settings, "weights", "uniform"))

    def check_members(self, parcels: Inbox) -> None:
        """Refuse a member that knows one class where its softmax is asked for: it would say that class of every
        image."""
        alone = parcels.held.sum(1) == 1 if self.softmax and self.heterogeneous else torch.zeros(1)
        if bool(alone.any()):
            who = parcels.manifests[int(alone.nonzero()[0, 0])].sender
            raise BadInput(
                f"{who} knows one class only and finds it in every image, which {self.name} cannot weigh; train it with"
                " the list of all classes, --classes LIST, or use experts-calibrated, best or ridge"
            )

    def check_pixels(self, spec: ModelSpec) -> None:
        """Refuse tiles where the rule knows photographs only."""
        if self.draws and spec.pixels != "uint8":
            raise BadInput(
                f"{self.name} draws images of 8 bits, and these are tiles of {spec.pixels} numbers; use experts,"
                " ensemble or fedavg"
            )

    def teacher(self, parcels: Inbox, server: Server) -> Predictor | None:
        """For rules that distil, after ``combine``: the predictor their student learnt from, so that it can be judged
        beside it."""
        return None

    @abstractmethod
    def combine(self, parcels: Inbox, server: Server) -> Predictor:
        """What a rule is: the predictor that follows from the parcels and from what ``server`` lets it use."""


def labelled(proxy: Dataset, parcels: Inbox) -> Part:
    """Proxy images whose labels are to be believed, numbered as the parcels' classes are."""
    cure = "name images of classes that sites hold"
    return part_of(fitted(proxy, parcels.class_names, "the proxy", "no parcel", cure)[0])


# The server rules by name, filled where the room is opened: a rule that distils may have any other as its teacher.
FUSIONS: Registry[type[Fusion]] = Registry("fusion", {}, group="flyby.fusions")


def weights_of(parcels: Inbox, weighting: str) -> list[float]:
    """Normalised client weights: ``size`` n_k / N, or ``uniform`` 1 / K."""
    samples: Sequence[int] = parcels.samples if weighting == "size" else [1] * len(parcels)
    total = sum(samples)
    if total <= 0:
        raise BadInput("the parcels' sample counts add up to nothing; use fusion.weights=uniform")
    return [n / total for n in samples]
