"""``masked-sums``: sums of features under masks that cancel in the total of a round (``flyby.parcels.masks``).

They travel as 64-bit words: how many images, the counts of all classes, S and the upper triangle of B, the latter two
in fixed point. Nothing else in such a parcel follows from the images: its manifest has no counts, and 0 for the number
of images. A receiver cannot tell one site's words from chance, so it cannot judge them either: only the sum of all
sites is checked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flyby.errors import BadInput
from flyby.names import PATTERN
from flyby.parcels import parcel
from flyby.parcels.masks import Masking, Round, Words
from flyby.parcels.parcel import Manifest, Parcel
from flyby.statistics import feature_sums as plain
from flyby.statistics.extras import Entry, Extra, Sent
from flyby.statistics.feature_sums import Choice, Sums, choice_of
from flyby.statistics.noised import Noise

NAME = "masked-sums"
ROUND = ("round", "round_digest", "round_bits", "round_sites")  # facts of the manifest, the same for all of a round


def is_masked(manifest: Manifest) -> bool:
    return f"{NAME}.words" in manifest.extras


def length(classes: int, width: int) -> int:
    return 1 + classes + classes * width + width * (width + 1) // 2


def words_of(sums: Sums, one: Round) -> Words:
    """Sums in fixed point, before any mask."""
    if sums.images > one.images:
        raise BadInput(
            f"the round {one.name} has room for {one.images:,} images per site, and there are {sums.images:,}; have a"
            " round made with a larger --images"
        )
    rows, columns = torch.triu_indices(sums.width, sums.width)
    values = torch.cat((sums.first.flatten(), sums.second[rows, columns])).numpy()
    whole = np.array([sums.images, *sums.counts.tolist()], dtype=np.int64).view(np.uint64)
    return np.concatenate((whole, one.fixed(values)))


def sums_of(words: Words, bits: int, classes: int, width: int, noise: Noise | None) -> Sums:
    """The sums that words without masks stand for."""
    signed = torch.from_numpy(words.view(np.int64).copy())
    images, counts, rest = int(signed[0]), signed[1 : 1 + classes], signed[1 + classes :].double()
    values = torch.ldexp(rest, torch.tensor(-bits))
    first, triangle = values[: classes * width].view(classes, width), values[classes * width :]
    rows, columns = torch.triu_indices(width, width)
    second = torch.empty(width, width, dtype=torch.float64)
    second[rows, columns] = second[columns, rows] = triangle
    return Sums(counts, first, second, None if noise is None else noise._replace(images=float(images)))


def masked(item: Parcel, masking: Masking) -> Parcel:
    """A parcel of plain sums as one that tells them only together with all others of the round."""
    manifest, one = item.manifest, masking.round
    if f"{plain.NAME}.choice" not in item.extras or len({name.partition(".")[0] for name in item.extras}) > 1:
        raise BadInput(
            f"masks hide {plain.NAME} and nothing else, and this site sends other things; use --method ridge, lda, nb"
            " or fishermix"
        )
    train = manifest.provenance.get("train")
    sums = Sums.unpacked(item.extras)
    words = masking.hidden(words_of(sums, one))
    extras: dict[str, Tensor] = {
        f"{NAME}.choice": item.extras[f"{plain.NAME}.choice"],
        f"{NAME}.words": torch.from_numpy(words.view(np.int64).copy()),
    }
    if sums.noise is not None:
        extras[f"{NAME}.noise"] = torch.tensor(sums.noise._replace(images=0.0), dtype=torch.float64)
    kept = {key: value for key, value in train.items() if key != "batch"} if isinstance(train, dict) else train
    told = dict(zip(ROUND, (one.name, one.digest, one.bits, one.names), strict=True))
    return parcel.make(
        sender=manifest.sender,
        method=manifest.method,
        spec=manifest.spec,
        class_names=manifest.class_names,
        samples=0,
        codec=manifest.codec,
        weights=item.weights,
        extras=extras,
        meta={**manifest.meta, **told},
        provenance={**manifest.provenance, "train": kept},  # the batch follows from how many images there are
    )


class MaskedSums(Extra):
    """Words of the right number: more cannot be told of them."""

    name = NAME
    cure = "train it with --method ridge --mask ROUND"

    def entries(self, manifest: Manifest, given: Sent) -> dict[str, Entry]:
        choice = choice_of({f"{plain.NAME}.choice": given.get(f"{NAME}.choice", torch.empty(0))})
        count = length(manifest.spec.classes, manifest.spec.feature_dim() + choice.random)
        told = {
            f"{NAME}.choice": Entry(torch.int64, (3,), 0, 2**53),
            f"{NAME}.words": Entry(torch.int64, (count,), -(2.0**63), 2.0**63),
        }
        noise = {f"{NAME}.noise": Entry(torch.float64, (len(Noise._fields),), 0, 2**53)}
        return told | (noise if f"{NAME}.noise" in given else {})

    def onto(self, manifest: Manifest, given: Sent, source: Sequence[int]) -> dict[str, Tensor]:
        raise BadInput(
            f"{manifest.sender} masked its sums for a list of classes that others do not have, and masks cancel only in"
            " one order; train all sites of a round with one --classes LIST"
        )

    def agree(self, manifest: Manifest, given: Sent) -> str:
        if tuple(chosen(given)) != tuple(given[f"{NAME}.choice"].tolist()):
            return f"{NAME}.choice asks for more than {plain.MOST_RANDOM} random features"
        name, digest, bits, sites = (manifest.meta.get(key) for key in ROUND)
        fits = type(bits) is int and 0 < bits <= 63 and isinstance(sites, list) and manifest.sender in sites
        if not fits or not isinstance(digest, str) or re.fullmatch(PATTERN, str(name)) is None:
            return "it does not say of which round it is"
        return ""


def chosen(given: Sent) -> Choice:
    return choice_of({f"{plain.NAME}.choice": given[f"{NAME}.choice"]})
