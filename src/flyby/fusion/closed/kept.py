"""Sums outlive the fusion: kept in the model folder, a site can be added to it or taken out of it later without the
others; put together by a hub, those of a region travel on as one parcel.

``sums.safetensors`` of a model folder holds, for each parcel that went in, its manifest and its sums as they were sent
(or one parcel of their total), and which rule was used. Manifests tell the hashes of their sums, so damage is noticed,
and the folder's signature covers the file; solving again gives the same bytes as a fusion of the parcels themselves.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from flyby.errors import BadInput
from flyby.files import write_bytes
from flyby.fusion.alignment import Aligned, described, onto
from flyby.fusion.closed.base import KIND, ClosedForm, Contributions, members
from flyby.models import Network
from flyby.models.shelf import read_tensors
from flyby.names import check_name
from flyby.parcels import container, parcel
from flyby.parcels.codecs import parse_json
from flyby.parcels.inbox import Inbox
from flyby.parcels.parcel import EXTRA, Manifest, Parcel
from flyby.statistics.extras import given, sent
from flyby.statistics.feature_sums import NAME, Choice, Sums
from flyby.statistics.masked_sums import is_masked
from flyby.statistics.temperature import NAME as TEMPERATURE
from flyby.statistics.temperature import fused_temperature

SUMS = "sums.safetensors"
TOTAL = "total"
MOST_NAMES = 200_000  # a manifest has room for so many


# -- regions


def region_of(parcels: Inbox, name: str, rule: str, *, names: bool = True, method: str | None = None) -> Parcel:
    """One parcel that speaks for all of these: their sums in float64, how many sites, and who they are (without
    ``names`` only digests of their sums, by which a copy is known)."""
    check_name(name)
    sums = Contributions(parcels, rule)
    parcels = sums.parcels
    first, manifests = parcels.manifests[0], parcels.manifests
    told = [members(manifest) for manifest in manifests]
    alone = [manifest.sender for manifest in manifests if "site_digests" not in manifest.meta]
    inside = [one for manifest, (known, _) in zip(manifests, told, strict=True) for one in known[1:]]
    if len(alone) + len(inside) > MOST_NAMES:
        raise BadInput(f"a region can name {MOST_NAMES:,} sites at the most; make smaller ones, or give --no-names")
    meta: dict[str, Any] = {
        "sites": sum(manifest.sites for manifest in manifests),
        "site_digests": sorted(digest for _, digests in told for digest in digests),
    }
    if (temperature := fused_temperature(manifests)) is not None:
        meta[TEMPERATURE] = float(f"{temperature:.4g}")
    if names:
        meta["site_names"] = sorted([*alone, *inside])
    return _made(parcels.read(0), name, sums.sent, sums.choice, meta, manifests, method or first.method)


def _made(
    like: Parcel,
    name: str,
    sums: Sums,
    choice: Choice,
    meta: Mapping[str, Any],
    manifests: Sequence[Manifest],
    method: str,
) -> Parcel:
    counts = [manifest.counts for manifest in manifests]
    exact = all(manifest.counts_kind == "exact" for manifest in manifests) and None not in counts
    return parcel.make(
        sender=name,
        method=method,
        spec=like.manifest.spec,
        class_names=like.manifest.class_names,
        samples=sum(manifest.samples for manifest in manifests),
        counts=[sum(column) for column in zip(*counts, strict=True)] if exact else None,
        codec=like.manifest.codec,
        weights=like.weights,
        extras={f"{NAME}.{part}": value for part, value in sums.packed(choice, torch.float64).items()},
        meta=meta,
    )


def taken_out(region: Parcel, site: Parcel) -> Parcel:
    """A region's parcel without one of its sites, whose own parcel must be at hand: the server has only their sum."""
    name, who = region.manifest.sender, site.manifest.sender
    meta: dict[str, Any] = dict(region.manifest.meta)
    digest = members(site.manifest)[1]
    digests = [str(one) for one in _listed(meta, "site_digests")]
    if len(digest) != 1 or digest[0] not in digests:
        raise BadInput(f"the parcel of {who} is not one of those that {name} is made of; name the one that went in")
    digests.remove(digest[0])
    if not digests:
        raise BadInput(f"{who} is all that {name} is made of; take {name} out as a whole")
    left = [one for one in _listed(meta, "site_names") if one != who]
    sums, own = sent(region, KIND), sent(onto(site, region.manifest.class_names, (NAME,)), KIND)
    rest = Sums.unpacked(sums) - Sums.unpacked(own)
    choice = Choice(*sums[f"{NAME}.choice"].tolist())
    meta |= {"sites": region.manifest.sites - 1, "site_digests": digests} | ({"site_names": left} if left else {})
    old = region.manifest
    gone = described(site.manifest, old.class_names)
    counts = None
    if old.counts is not None and gone.counts is not None and old.counts_kind == gone.counts_kind == "exact":
        counts = tuple(max(0, a - b) for a, b in zip(old.counts, gone.counts, strict=True))
    kept = old.model_copy(update={"samples": old.samples - gone.samples, "counts": counts})
    return _made(region, name, rest, choice, meta, [kept], old.method)


def _listed(meta: Mapping[str, Any], key: str) -> list[Any]:
    value = meta.get(key, [])
    return value if isinstance(value, list) else []


# -- in a model folder


@dataclass(frozen=True)
class Kept:
    """What a folder keeps: the parcels, with their sums as the only tensors that count, and how they were fused."""

    items: list[Parcel]
    rule: str
    settings: dict[str, Any]

    @property
    def senders(self) -> list[str]:
        return [item.manifest.sender for item in self.items]

    def without(self, who: str) -> Kept:
        """The rest, when one is taken out: a sender by name, or a site of a region (or of a total) by its parcel."""
        path = Path(who)
        site = parcel.read(path) if path.is_file() else None
        name = site.manifest.sender if site else who
        if name in self.senders:
            own = self.items[self.senders.index(name)]
            if site and site.manifest.content_digest((NAME,)) != own.manifest.content_digest((NAME,)):
                raise BadInput(f"{who} is not the parcel of {name} that went into this model; give --remove {name}")
            return dataclasses.replace(self, items=[item for item in self.items if item is not own])
        homes = [item for item in self.items if name in members(item.manifest)[0]]
        if site is not None:
            digest = members(site.manifest)[1]
            homes = [item for item in self.items if set(digest) <= set(members(item.manifest)[1])]
        if not homes and site is not None and is_masked(site.manifest):
            raise BadInput(f"{who} is masked, and cannot be taken out alone; have a new round without it")
        if not homes:
            raise BadInput(f"{name} is not in this model; it is made of {', '.join(self.senders[:20])}")
        if site is None:
            raise BadInput(
                f"{name} is in the sum {homes[0].manifest.sender}, of which only the whole is kept; give its parcel:"
                f" --remove {name}.parcel (a masked one cannot be taken out alone)"
            )
        left = taken_out(homes[0], site)
        return dataclasses.replace(self, items=[left if item is homes[0] else item for item in self.items])


def write_kept(folder: Path, parcels: Inbox, rule: ClosedForm) -> None:
    """The file of a model folder from which it can be changed later."""
    from safetensors.torch import save

    parcels = parcels.raw if isinstance(parcels, Aligned) else parcels  # as they were sent: hashes are kept beside them
    items: Sequence[Parcel] = list(parcels)
    if rule.settings.keep == "total":
        items = [region_of(parcels, TOTAL, rule.name)]
    tensors: dict[str, Tensor] = {}
    for place, item in enumerate(items):
        tensors[f"{place}.manifest"] = torch.frombuffer(bytearray(item.manifest.to_bytes()), dtype=torch.uint8)
        tensors |= {f"{place}.{name}": value.contiguous() for name, value in given(item, KIND).items()}
    told = {"rule": rule.name, "settings": rule.settings.model_dump(mode="json")}
    write_bytes(folder / SUMS, save(tensors, {"flyby": json.dumps(told, sort_keys=True)}))


def read_kept(folder: Path, network: Network) -> Kept:
    """What :func:`write_kept` wrote, every number checked against its manifest; ``network`` is the folder's own, whose
    weights before the head are those of all parcels."""
    from safetensors import SafetensorError, safe_open

    path = folder / SUMS
    if not path.is_file():
        raise BadInput(
            f"{folder} keeps no sums, so nothing can be added to it or taken out; fuse the parcels by ridge, lda, nb or"
            " fishermix"
        )
    try:
        with safe_open(path, "pt") as file:
            told, names = json.loads((file.metadata() or {})["flyby"]), list(file.keys())
        rule, settings = str(told["rule"]), dict(told["settings"])
        items = [_item(path, place, names, network) for place in range(sum(n.endswith(".manifest") for n in names))]
    except (SafetensorError, KeyError, TypeError, ValueError, OSError, BadInput) as error:
        raise BadInput(f"{path} is damaged ({type(error).__name__}); fuse the parcels again") from None
    return Kept(items, rule, settings)


def _item(path: Path, place: int, names: Sequence[str], network: Network) -> Parcel:
    start = f"{place}."
    own = read_tensors(path, [name for name in names if name.startswith(start)])
    text = own.pop(f"{start}manifest").numpy().tobytes()
    if len(text) > container.MAX_JSON:
        raise ValueError("a manifest is too large")
    parse_json(text)
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError:
        raise ValueError("a manifest cannot be read") from None
    extras = {name.removeprefix(start): value for name, value in own.items()}
    wanted = {name for name in manifest.extras if name.startswith(f"{NAME}.")}
    if extras.keys() != wanted:
        raise ValueError("sums are missing")
    for name, value in extras.items():
        if hashlib.sha256(container.raw(value)).hexdigest() != manifest.tensors[EXTRA + name].sha256:
            raise ValueError("sums were changed")
    state = network.state_dict()
    weights = {
        name: state[name] if name in state and tuple(state[name].shape) == shape else torch.zeros(shape, dtype=dtype)
        for name, (shape, dtype) in manifest.spec.shapes().items()
    }
    return Parcel(manifest, weights, extras)
