"""Parcels of sites that hold different classes, put onto one list of them by name: the one place where that is done.

The list is the union of all names. What a parcel has a number of per class goes to its class's place there: the rows of
its head (``Head.rows``), its counts, and every extra along the ``axis`` that is declared for it. What is missing:

- counts and statistics are 0: a class that a site does not know has no image there;
- a network that is kept whole (rules that take any architecture) is ``partial``: its logit for such a class is
  ``NEVER``, so its softmax is over the classes that it knows;
- where rows or weights of sites are combined into one, a missing row is the mean of those that sites sent who know the
  class, weighted as the rule weighs them: so the mean of all is the mean of these. Rules that take medians get the
  median of these.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flyby.data.classes import lookalikes, places, read_list, spread, union
from flyby.errors import BadInput
from flyby.files import read_json
from flyby.fusion.predictor import MODEL, model_folder
from flyby.models.heads import HEADS
from flyby.names import check_labels
from flyby.parcels import parcel
from flyby.parcels.inbox import Inbox
from flyby.parcels.parcel import Manifest, Parcel
from flyby.statistics.catalogue import EXTRAS
from flyby.statistics.extras import given, sent

log = logging.getLogger(__name__)
ANCHORS = "head.anchors"  # rows that nobody learns, so that sites must have the same
CURE = "train all sites with one list, --classes LIST"

COLUMNS, LINES = 8, 40  # of the table of who holds what

Rows = dict[str, Tensor]  # by tensor of a head: its rows [ways, classes, ...]


class Aligned(Inbox):
    """The same parcels over the union of their classes. ``raw`` are those that came, as they were sent."""

    def __init__(self, raw: Inbox, needs: Collection[str], whole: bool, shares: Sequence[float] | None = None) -> None:
        self.raw, self.sources, self.needs, self.kept_whole = raw, raw.sources, frozenset(needs), whole
        names = raw.class_names
        self._places = [places(names, m.class_names) for m in raw.manifests]
        self.manifests = [described(m, names, partial=self.kept_whole) for m in raw.manifests]
        self._fill = {} if whole else shared_rows(raw, shares)

    @property
    def held(self) -> Tensor:
        return torch.tensor(self._places) >= 0

    def read(self, place: int) -> Parcel:
        item = self.raw.read(place)
        return onto(item, self.class_names, self.needs, partial=self.kept_whole, fill=self._fill)


def aligned(
    parcels: Inbox, needs: Collection[str] = (), *, whole: bool = False, shares: Sequence[float] | None = None
) -> Inbox:
    """The parcels over one list of classes; themselves where they have one. ``needs`` are the extras that will be read,
    ``whole`` says that networks are kept, and else ``shares`` are the sites' weights in a missing row (None: it is the
    median)."""
    raw = parcels.raw if isinstance(parcels, Aligned) else parcels
    if raw.one_list:
        return raw
    if isinstance(parcels, Aligned) and parcels.kept_whole == whole and parcels.needs >= set(needs) and shares is None:
        return parcels
    if not whole and "weights" in needs:
        same_anchors(raw, needs)
    return Aligned(raw, needs, whole, shares)


def described(manifest: Manifest, names: Sequence[str], partial: bool = False) -> Manifest:
    """What a sender would say of itself over another list of classes."""
    if manifest.class_names == tuple(names):
        return manifest
    source = places(names, manifest.class_names)
    some = manifest.spec.partial or (partial and min(source) < 0)
    counts = None if manifest.counts is None else tuple(0 if old < 0 else manifest.counts[old] for old in source)
    spec = manifest.spec.replace(classes=len(names), partial=some)
    return manifest.model_copy(update={"class_names": tuple(names), "spec": spec, "counts": counts})


def onto(
    item: Parcel,
    names: Sequence[str],
    needs: Collection[str] = (),
    *,
    partial: bool = False,
    fill: Mapping[str, Tensor] | None = None,
) -> Parcel:
    """A parcel over another list of classes, with the extras that are needed. ``fill`` are rows for classes that it
    does not know, zeros where there are none."""
    manifest = described(item.manifest, names, partial)
    if manifest is item.manifest:
        return item
    source, weights = places(names, item.manifest.class_names), dict(item.weights)
    absent = torch.tensor(source) < 0
    for name, rows in rows_of(item).items():
        moved = spread(rows, source, 1)
        if fill is not None and name in fill and bool(absent.any()) and fill[name].shape[2:] == moved.shape[2:]:
            moved[:, absent] = fill[name][: len(moved), absent].to(moved)
        weights[name] = moved.flatten(0, 1).contiguous()
    if manifest.spec.partial:
        known = item.weights.get("head.absent")
        weights["head.absent"] = absent if known is None else spread(known, source, 0, True)
    extras: dict[str, Tensor] = {}
    for kind in EXTRAS.values():
        if kind.name in needs and given(item, kind):
            extras |= kind.onto(item.manifest, sent(item, kind), source)
    return dataclasses.replace(item, manifest=manifest, weights=weights, extras=extras)


def rows_of(item: Parcel) -> Rows:
    """The tensors of a parcel's head that have a row per class, ``[ways, classes, ...]``."""
    spec = item.manifest.spec
    head = HEADS[spec.head]
    if not head.rows:
        raise BadInput(
            f"the {spec.head} head of {item.manifest.sender} does not say which of its numbers are of which class;"
            f" {CURE}"
        )
    tensors = {f"head.{name}": (item.weights[f"head.{name}"], ways) for name, ways in head.rows.items()}
    return {name: value.reshape(ways, spec.classes, *value.shape[1:]) for name, (value, ways) in tensors.items()}


def shared_rows(raw: Inbox, shares: Sequence[float] | None) -> Rows:
    """For every class the weighted mean (without ``shares``: the median) of the rows of those who know it, ``[ways,
    classes, ...]``; who knows no shift shows the same row in every way."""
    names, rows, known = raw.class_names, dict[str, list[Tensor]](), dict[str, list[Tensor]]()
    for item, share in zip(raw, shares or [1.0] * len(raw), strict=True):
        source = places(names, item.manifest.class_names)
        for name, own in rows_of(item).items():
            moved = spread(own, source, 1).double()
            if name in rows and rows[name][0].shape[2:] != moved.shape[2:]:
                continue  # another width, which the rule will refuse
            rows.setdefault(name, []).append(moved)
            known.setdefault(name, []).append((torch.tensor(source) >= 0).double() * max(share, 1e-12))
    found: Rows = {}
    for name, each in rows.items():
        ways, weights = max(len(one) for one in each), torch.stack(known[name])
        table = torch.stack([one.expand(ways, *one.shape[1:]) for one in each])  # [K, ways, classes, ...]
        columns = [_row(table[weights[:, c] > 0, :, c], weights[:, c], shares is None) for c in range(len(names))]
        found[name] = torch.stack(columns, dim=1)
    return found


def _row(rows: Tensor, weights: Tensor, median: bool) -> Tensor:
    """One row of several [holders, ways, ...]."""
    if median:
        return rows.quantile(0.5, dim=0) if len(rows) else rows.sum(0)
    held = weights[weights > 0]
    mean: Tensor = torch.tensordot(held / held.sum(), rows, dims=1)
    return mean


def same_anchors(raw: Inbox, needs: Collection[str]) -> None:
    """Refuse fixed anchors that are not the same for a class: networks that were drawn to different ones cannot be
    combined. Of prototypes that only began or were drawn there a line in the log is enough."""
    seen: dict[str, tuple[str, Tensor]] = {}
    for item in raw:
        if ANCHORS not in item.weights:
            continue
        for name, row in zip(item.manifest.class_names, item.weights[ANCHORS], strict=True):
            who, other = seen.setdefault(name, (item.manifest.sender, row))
            if other.shape != row.shape or float((other - row).abs().max()) > 1e-5:
                raise BadInput(
                    f"the anchor of {name} at {item.manifest.sender} is not that at {who}: anchors follow from the list"
                    f" of classes, and theirs differ; {CURE}, or use ensemble or experts"
                )
    if not seen and ("prototypes" in needs or any("anchor_seed" in m.meta for m in raw.manifests)):
        log.warning("note: where lists of classes differ, sites begin at different prototypes and anchors; %s", CURE)


# -- who holds what, and a list to go by


def holdings(manifests: Sequence[Manifest]) -> dict[str, dict[str, int | None]]:
    """By class and sender: how many images, None where that is not told; a class that a sender does not know is left
    out."""
    found: dict[str, dict[str, int | None]] = {name: {} for name in union(m.class_names for m in manifests)}
    for m in manifests:
        for place, name in enumerate(m.class_names):
            found[name][m.sender] = None if m.counts is None else m.counts[place]
    return found


def table(held: Mapping[str, Mapping[str, int | None]]) -> list[str]:
    """Who holds what, a line per class: a column per site, or of many sites how many; - where a site does not know the
    class, ? where it does not tell how many images it has."""
    senders = list(dict.fromkeys(who for each in held.values() for who in each))
    rows = [["class", *senders]]
    if len(senders) > COLUMNS:
        rows = [["class", "images", f"of {len(senders)} sites"]]
    for name, each in list(held.items())[:LINES]:
        cells = ["-" if who not in each else _told(each[who]) for who in senders]
        if len(senders) > COLUMNS:
            cells = [_told(None if None in each.values() else sum(n or 0 for n in each.values())), str(len(each))]
        rows.append([name if len(name) <= 40 else f"{name[:37]}...", *cells])
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [
        f"  {row[0]:<{widths[0]}}" + "".join(f"  {c:>{w}}" for c, w in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
    return lines + ([f"  and {len(held) - LINES} more classes"] if len(held) > LINES else [])


def _told(count: int | None) -> str:
    return "?" if count is None else f"{count:,}"


def remarks(manifests: Sequence[Manifest]) -> list[str]:
    """What people should know where sites name different classes: which names look like one word."""
    return [
        f"{one} and {other} look like the same class; if they are, train with --synonyms FILE that says {other}: {one}"
        for one, other in lookalikes(m.class_names for m in manifests)[:LINES]
    ]


def class_list(path: Path) -> tuple[str, ...]:
    """The classes that ``--classes`` names: of a text file, of another site's parcel, or of a model folder."""
    if path.is_dir():
        config: Any = read_json(model_folder(path) / MODEL)
        names = config.get("class_names") if isinstance(config, dict) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise BadInput(f"{path} names no classes; name a model folder, a .parcel or a text file of names")
        check_labels(names, str(path))
        return tuple(names)
    return parcel.read_manifest(path).class_names if path.suffix == ".parcel" else read_list(path)
