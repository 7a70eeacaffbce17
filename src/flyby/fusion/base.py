"""The seam ``Fusion``: parcels in, one predictor out. A fusion never sees a training image."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict

from flyby.data.dataset import Dataset
from flyby.errors import BadInput
from flyby.fusion.predictor import Predictor
from flyby.models import Network
from flyby.models.shelf import IN_MEMORY, Shelf, bytes_of
from flyby.parcels import parcel
from flyby.parcels.parcel import Manifest, Parcel


class FusionSettings(BaseModel):
    """Base of every fusion's settings: strict, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Inbox:
    """The parcels a fusion may use, in sender order. Manifests are at hand; the tensors are read one parcel at a
    time."""

    def __init__(self, sources: Iterable[Path | str | Parcel]) -> None:
        items = [s if isinstance(s, Parcel) else Path(s) for s in sources]
        if not items:
            raise BadInput("there are no parcels to fuse; name .parcel files")
        pairs = [(parcel.read_manifest(s) if isinstance(s, Path) else s.manifest, s) for s in items]
        pairs.sort(key=lambda pair: natural(pair[0].sender))
        self.manifests: list[Manifest] = [m for m, _ in pairs]
        self._sources: list[Path | Parcel] = [s for _, s in pairs]
        self._agree()

    def __len__(self) -> int:
        return len(self._sources)

    def __iter__(self) -> Iterator[Parcel]:
        for source in self._sources:
            yield parcel.read(source) if isinstance(source, Path) else source

    def networks(self) -> list[Network] | Shelf:
        """All networks, for ensembles that let their members speak one at a time: those that together are too large
        stay in their parcels."""
        if sum(bytes_of(m.spec) for m in self.manifests) <= IN_MEMORY:
            return [item.network() for item in self]

        def read(place: int) -> Network:
            source = self._sources[place]
            return (parcel.read(source) if isinstance(source, Path) else source).network()

        return Shelf(len(self), read)

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.manifests[0].class_names

    @property
    def samples(self) -> list[int]:
        return [m.samples for m in self.manifests]

    @property
    def counts(self) -> torch.Tensor:
        """Class counts [K, C]; an error names the first sender that did not share them."""
        for manifest in self.manifests:
            if manifest.counts is None:
                raise BadInput(
                    f"{manifest.sender} did not share its class counts, which this fusion needs; use fedavg or ensemble"
                )
        return torch.tensor([m.counts for m in self.manifests], dtype=torch.float64)

    def _agree(self) -> None:
        first = self.manifests[0]
        seen: set[str] = set()
        for m in self.manifests:
            if m.sender in seen:
                raise BadInput(f"two parcels come from {m.sender!r}; each participant sends exactly one")
            seen.add(m.sender)
            if m.class_names != first.class_names:
                raise BadInput(
                    f"{m.sender} and {first.sender} name different classes; parcels can only be fused over the same"
                    " classes"
                )
            if (m.spec.size, m.spec.channels) != (first.spec.size, first.spec.channels):
                raise BadInput(
                    f"{m.sender} takes {m.spec.size}x{m.spec.channels} images, {first.sender}"
                    f" {first.spec.size}x{first.spec.channels}; they cannot be fused"
                )

    def same_spec(self, rule: str) -> None:
        """Refuse mixed architectures, for rules that combine weights."""
        first = self.manifests[0]
        for m in self.manifests:
            if m.spec != first.spec:
                raise BadInput(
                    f"{rule} needs one architecture, but {m.sender} sent {m.spec.name} and {first.sender}"
                    f" {first.spec.name} (or other widths or head); use ensemble"
                )

    def same_features(self, rule: str) -> None:
        """Refuse features of different widths, for rules that add features up (heads and architectures may differ)."""
        dims = {m.spec.skeleton().feature_dim: m.sender for m in self.manifests}
        if len(dims) > 1:
            (a, one), (b, other) = list(dims.items())[:2]
            raise BadInput(
                f"{rule} adds features up, but {one} sends {a} dimensions and {other} {b}; use ensemble or experts"
            )


def natural(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """A sort key by which site-2 comes before site-10; the name itself puts site-01 and site-1 in one order always."""
    import re

    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part], name


class Fusion(ABC):
    """A server rule. ``needs`` is checked against the objective's ``provides`` before anything is trained."""

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    about: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset({"weights"})
    heterogeneous: ClassVar[bool] = False
    data_free: ClassVar[bool] = True  # False: it cannot work without proxy images
    settings_type: ClassVar[type[FusionSettings]] = FusionSettings

    def __init__(self, settings: FusionSettings | None = None) -> None:
        self.settings = settings if settings is not None else self.settings_type()
        self.sections: list[
            dict[str, Any]
        ] = []  # what ``fuse`` found worth showing: sections of the report (title, text, table, svg)

    @abstractmethod
    def fuse(
        self,
        parcels: Inbox,
        *,
        proxy: Dataset | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        work: Path | None = None,
    ) -> Predictor:
        """One predictor from many parcels. ``proxy`` is unlabelled data for rules that can use some; never test data.

        ``work`` is a folder in which long server work keeps its checkpoints, so that the same call goes on where it was
        interrupted.
        """


def weights_of(parcels: Inbox, weighting: str) -> list[float]:
    """Normalised client weights: ``size`` n_k / N, or ``uniform`` 1 / K."""
    samples: Sequence[int] = parcels.samples if weighting == "size" else [1] * len(parcels)
    total = sum(samples)
    if total <= 0:
        raise BadInput("the parcels' sample counts add up to nothing; use fusion.weights=uniform")
    return [n / total for n in samples]
