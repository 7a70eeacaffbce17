"""A round of masked parcels becomes one parcel of their sum: the masks of all sites cancel, and nothing of a single one
is seen.

Where a site of the round did not send, its partners' masks towards it are left in the sum. They can reveal those seeds
(``flyby keys reveal``), which are then taken off. A parcel of a site whose seeds were revealed is refused, since they
would open it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from flyby.errors import BadInput
from flyby.fusion.alignment import aligned
from flyby.fusion.closed.base import KIND, same_eyes
from flyby.parcels import masks, parcel
from flyby.parcels.inbox import Inbox
from flyby.parcels.masks import Revealed, Words
from flyby.parcels.parcel import Manifest, Parcel
from flyby.statistics.catalogue import examined
from flyby.statistics.extras import sent
from flyby.statistics.feature_sums import Choice
from flyby.statistics.masked_sums import NAME, ROUND, MaskedSums, chosen, sums_of
from flyby.statistics.noised import Noise

MASKED = MaskedSums()


def unmasked(parcels: Inbox, rule: str, revealed: Sequence[Revealed] = ()) -> Parcel:
    """The sum over all sites of a round as the parcel of a region, checked as any other. Masks cancel in one order
    alone, so the list of classes must be one."""
    parcels = aligned(parcels, (NAME,))
    parcels.same_spec(rule)
    same_eyes(parcels, rule)
    manifests, first = parcels.manifests, parcels.manifests[0]
    total, noises, choice = _added(parcels)
    _one_round(manifests)
    missing = _missing(manifests, revealed)
    for one in revealed:
        seeds = {name: bytes.fromhex(seed) for name, seed in one.seeds.items() if name in missing}
        total = total - masks.mask(seeds, one.sender, len(total))
    name = str(first.meta["round"])
    width = first.spec.feature_dim() + choice.random
    bits = first.meta["round_bits"]
    assert isinstance(bits, int)
    sums = sums_of(total, bits, first.spec.classes, width, _joined(noises))
    hidden = BadInput(
        f"the sum of the round {name} is not one of images: a site used another key or sent something else, or a"
        " revealed seed is wrong; masks hide which, so have a new round made"
    )
    if not 0 < sums.images <= 2**53 or bool((sums.counts.abs() > 2**53).any()):
        raise hidden
    made = parcel.make(
        sender=name,
        method=first.method,
        spec=first.spec,
        class_names=first.class_names,
        samples=sums.images,
        codec=first.codec,
        weights=parcels.read(0).weights,
        extras={f"{KIND.name}.{part}": value for part, value in sums.packed(choice, torch.float64).items()},
        meta={
            "sites": len(manifests),
            "site_names": [m.sender for m in manifests],
            "site_digests": sorted(m.content_digest((NAME,))[:16] for m in manifests),
        },
    )
    try:
        examined(made, None, "cpu", used={KIND.name})
    except BadInput:
        raise hidden from None
    return made


def _added(parcels: Inbox) -> tuple[Words, list[Noise], Choice]:
    """The words of all parcels added up, each parcel held to its declaration."""
    total, noises, choice = np.zeros(1, dtype=np.uint64), list[Noise](), chosen(sent(parcels.read(0), MASKED))
    for item in parcels:
        given = sent(item, MASKED)
        if chosen(given)[:2] != choice[:2]:
            raise BadInput(f"{item.manifest.sender} has other random features; send the same from all sites of a round")
        total = total + given[f"{NAME}.words"].numpy().view(np.uint64)
        if f"{NAME}.noise" in given:
            noises.append(Noise(*given[f"{NAME}.noise"].tolist()))
    return total, noises, choice


def _joined(noises: Sequence[Noise]) -> Noise | None:
    """The noise of the total; how many images it is of stands in the total itself."""
    if not noises:
        return None
    deviations = (math.hypot(*column) for column in zip(*(one[2:] for one in noises), strict=True))
    return Noise(0.0, max(one.norm for one in noises), *deviations)


def _one_round(manifests: Sequence[Manifest]) -> None:
    """Refuse parcels of different rounds, and a site that no round has."""
    first = manifests[0]
    for manifest in manifests:
        told = [[m.meta.get(key) for key in ROUND] for m in (first, manifest)]
        if told[0] != told[1]:
            raise BadInput(
                f"{manifest.sender} and {first.sender} masked for different rounds"
                f" ({manifest.meta.get('round')} and {first.meta.get('round')}), so their masks do not cancel; have all"
                " sites train with one round file"
            )


def _missing(manifests: Sequence[Manifest], revealed: Sequence[Revealed]) -> list[str]:
    """The sites that did not send, and whose masks all others revealed; else BadInput."""
    first, there = manifests[0], [m.sender for m in manifests]
    name, digest, sites = (first.meta.get(key) for key in ("round", "round_digest", "round_sites"))
    assert isinstance(sites, list)
    missing = [str(one) for one in sites if one not in there]
    if len({one.sender for one in revealed}) < len(revealed):
        raise BadInput("one site's revealed seeds are named twice; name each file once")
    for one in revealed:
        if one.round != digest:
            raise BadInput(f"what {one.sender} revealed is of another round than {name}; ask it for that of {name}")
        if one.sender not in there:
            raise BadInput(f"{one.sender} revealed seeds, and its own parcel is not here; leave its file out")
        if opened := sorted(set(one.seeds) & set(there)):
            raise BadInput(
                f"{one.sender} revealed its seed towards {opened[0]}, and a parcel of {opened[0]} is here, which it"
                f" could open; the parcel is refused: leave it out, or fuse without --revealed"
            )
    lacking = {
        who: [m for m in missing if not any(o.sender == who and m in o.seeds for o in revealed)] for who in there
    }
    silent = [who for who, wanted in lacking.items() if wanted]
    if silent:
        raise BadInput(
            f"{', '.join(missing)} of the round {name} did not send, so masks are left in the sum; wait for it, or have"
            f" {', '.join(silent)} run: flyby keys reveal ROUND --missing {' --missing '.join(missing)} --key KEY, and"
            " give their files with --revealed"
        )
    return missing
