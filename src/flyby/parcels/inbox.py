"""The noun ``Inbox``: the parcels that a rule may use together, in one order. Their classes may differ: a rule sees
them over the union of all names (``flyby.fusion.alignment``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import torch

from flyby.data.classes import union
from flyby.errors import BadInput
from flyby.models import Network
from flyby.models.cost import Limits
from flyby.models.heads import HEADS
from flyby.models.shelf import IN_MEMORY, Shelf, bytes_of
from flyby.names import natural
from flyby.parcels import parcel
from flyby.parcels.parcel import Manifest, Parcel


class Inbox:
    """Parcels in sender order. Manifests are at hand; tensors are read when they are asked for, one parcel at a time.

    What was read is kept where all parcels together take at most half of ``IN_MEMORY`` (the networks made of them take
    as much again), so that no file is read twice; larger ones are read anew each time, and one of them is held.
    ``limits`` are for parcels that have come through no gate.
    """

    def __init__(self, sources: Iterable[Path | str | Parcel], limits: Limits | None = None) -> None:
        items = [s if isinstance(s, Parcel) else Path(s) for s in sources]
        if not items:
            raise BadInput("there are no parcels to fuse; name .parcel files")
        pairs = [(parcel.read_manifest(s) if isinstance(s, Path) else s.manifest, s) for s in items]
        if limits is not None:
            for manifest, _ in pairs:
                limits.check(manifest.spec, manifest.sender)
        pairs.sort(key=lambda pair: natural(pair[0].sender))
        self.manifests: list[Manifest] = [m for m, _ in pairs]
        self.sources: list[Path | Parcel] = [s for _, s in pairs]
        self._agree()
        self._keeps = sum(parcel.decoded_bytes(m) for m, s in pairs if isinstance(s, Path)) <= IN_MEMORY // 2
        self._kept: dict[int, Parcel] = {}

    def __len__(self) -> int:
        return len(self.sources)

    def __iter__(self) -> Iterator[Parcel]:
        return (self.read(place) for place in range(len(self)))

    def read(self, place: int) -> Parcel:
        """One parcel with its tensors."""
        source = self.sources[place]
        if isinstance(source, Parcel):
            return source
        if place in self._kept:
            return self._kept[place]
        item = parcel.read(source)
        if self._keeps:
            self._kept[place] = item
        return item

    def of(self, senders: Collection[str]) -> Inbox:
        """Only what these senders sent; where files are kept at all, none is read a second time for it."""
        places = [place for place, manifest in enumerate(self.manifests) if manifest.sender in senders]
        return Inbox(self.read(place) if self._keeps else self.sources[place] for place in places)

    def networks(self) -> list[Network] | Shelf:
        """All networks, for ensembles that let their members speak one at a time: those that together are too large
        stay in their parcels."""
        if sum(bytes_of(m.spec) for m in self.manifests) <= IN_MEMORY:
            return [item.network() for item in self]
        return Shelf(len(self), lambda place: self.read(place).network())

    @property
    def one_list(self) -> bool:
        """Whether all parcels name the same classes in the same order."""
        return all(m.class_names == self.manifests[0].class_names for m in self.manifests)

    @property
    def class_names(self) -> tuple[str, ...]:
        """All classes that a parcel names, those of one list in its order."""
        return union(m.class_names for m in self.manifests)

    @property
    def held(self) -> torch.Tensor:
        """Which classes each network knows, bool [K, C]."""
        return torch.ones(len(self), len(self.class_names), dtype=torch.bool)

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
            takes, wanted = ((one.spec.size, one.spec.channels, one.spec.pixels) for one in (m, first))
            if takes != wanted:
                raise BadInput(
                    f"{m.sender} takes {m.spec.size}x{m.spec.channels} images of {m.spec.pixels}, {first.sender}"
                    f" {first.spec.size}x{first.spec.channels} of {first.spec.pixels}; they cannot be fused"
                )

    def same_spec(self, rule: str) -> None:
        """Refuse mixed architectures, for rules that combine weights."""
        first = self.manifests[0]
        for m in self.manifests:
            if m.spec != first.spec:
                raise BadInput(unlike(rule, m, first))

    def same_features(self, rule: str) -> None:
        """Refuse features of different widths, for rules that add features up (heads and architectures may differ)."""
        dims = {m.spec.feature_dim(): m.sender for m in self.manifests}
        if len(dims) > 1:
            (a, one), (b, other) = list(dims.items())[:2]
            raise BadInput(
                f"{rule} adds features up, but {one} sends {a} dimensions and {other} {b}; use ensemble or experts"
            )


def unshifted(item: Parcel) -> Parcel:
    """The same upload for a rule that shows images as they are: of a head that knows a shift only the rows for those
    are left, as a plain prototype head."""
    spec = item.manifest.spec
    if not HEADS[spec.head].shift:
        return item
    weights = item.weights | {"head.prototypes": item.weights["head.prototypes"][: spec.classes]}
    manifest = item.manifest.model_copy(update={"spec": spec.replace(head="prototype")})
    return dataclasses.replace(item, manifest=manifest, weights=weights, revised=True)


def unlike(rule: str, one: Manifest, other: Manifest) -> str:
    """Why a rule that combines weights cannot take two parcels together, and what to do."""
    if one.spec.unclassed() == other.spec.unclassed():
        return (
            f"{rule} needs networks for the same classes, and {one.sender} and {other.sender} know different ones;"
            " train all sites with one list, --classes LIST"
        )
    if one.spec.replace(mean=other.spec.mean, std=other.spec.std) == other.spec:
        return (
            f"{rule} needs one normalisation, and {one.sender} and {other.sender} have each their own; train all sites"
            " with one (--set model.mean=... model.std=...; `flyby data PATH` prints them), or use ensemble"
        )
    if one.spec.backbone != other.spec.backbone:
        return (
            f"{rule} needs one backbone, and those of {one.sender} and {other.sender} have different weights, image"
            " sizes or tuned parts; train all sites with the same --backbone, --backbone-size and --tune"
        )
    sent = f"{one.sender} sent {one.spec.name} and {other.sender} {other.spec.name} (or other widths or head)"
    return f"{rule} needs one architecture, but {sent}; train all with flyby train --like PARCEL, or use ensemble"
