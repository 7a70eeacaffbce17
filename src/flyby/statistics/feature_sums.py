"""The statistic ``feature-sums``: what closed forms need of a site, for ridge, LDA, naive Bayes and FisherMix.

Over the site's training images, seen as they are (no augmentation), with features x of D numbers and classes c:

    n_c = number of images,    S_c = sum of x over class c,    B = sum of x x^T over all classes

Sums of sites add up to those of all their images, so whatever is solved from them is the same for every split. The
constant feature of a linear model needs no row of its own: its products are n and S. What is sent are averages, m_c =
S_c / n_c and the upper triangle of B / N, whose size does not grow with the images. They are computed in float64, in
the order of the images, and sent in float32 unless ``dtype=float64`` is asked for: 4 (D (D + 1) / 2 + H D) + 8 (C + 3)
bytes for the H classes that a site holds.

``random=4000;draw=7`` puts that many random features relu(R x) beside x, the same R for all sites with that draw
[Fed3R: Fani et al., ICML 2024]. The mean of one image is that image's feature, so classes with fewer than ``least``
images are left out of all sums. Exact counts are part of what is sent, so a site that tells noisy or binary ones cannot
send it, unless all of it is noised (``flyby.statistics.noised``): then S / N of all classes travels in place of the
means, counts may be negative, and ``noise`` says how large it is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flyby.data.site import Site
from flyby.errors import BadInput
from flyby.models import Network
from flyby.models.cost import at_once
from flyby.models.features import beyond, features_of, pooled_of
from flyby.parcels.parcel import Manifest
from flyby.rng import generator
from flyby.statistics.extras import Entry, Extra, Sent, Sizes
from flyby.statistics.noised import TOLD, Draw, Noise, multiplier

log = logging.getLogger(__name__)

LEAST = 2
MOST_RANDOM = 16_384
NAME = "feature-sums"
PROBES = 64  # noise images by which features' norms are told
# Rounding to float32 moves a matrix by at most 2^-24 of its trace; this leaves room for averages of averages.
ROUNDING = 2.0**-20


class Choice(NamedTuple):
    """What a site chose: how many random features, of which draw (in these all must agree), and the fewest images of a
    class."""

    random: int = 0
    draw: int = 0
    least: int = LEAST


@dataclass(frozen=True)
class Sums:
    """The sums of some images: ``counts`` [C], ``first`` [C, D] and ``second`` [D, D], the latter two float64; and what
    is known of the noise on them, where there is any."""

    counts: Tensor
    first: Tensor
    second: Tensor
    noise: Noise | None = None

    def __iadd__(self, other: Sums) -> Sums:
        """Both together, in the memory of the first, which must be nobody else's."""
        noise = self.public.joined(other.public) if self.noise or other.noise else None
        return Sums(self.counts + other.counts, self.first.add_(other.first), self.second.add_(other.second), noise)

    def __sub__(self, other: Sums) -> Sums:
        """What is left of a whole when a part is taken out."""
        counts, first, second = self.counts - other.counts, self.first - other.first, self.second - other.second
        if self.noise or other.noise:
            return Sums(counts, first, second, self.public.joined(other.public, -1))
        if bool((counts < 0).any()):
            raise BadInput("more images of a class would be taken out than are in; name the parcel that was put in")
        empty = counts == 0  # nothing of such a class is left, not even rounding
        return Sums(counts, first.masked_fill(empty[:, None], 0.0), second)

    @property
    def public(self) -> Noise:
        """What noised sums tell of themselves; of others it is made up."""
        images = self.images
        return self.noise or Noise(images, math.sqrt(float(self.second.diagonal().sum()) / max(1, images)))

    @property
    def images(self) -> int:
        return int(self.counts.sum()) if self.noise is None else round(self.noise.images)

    def settled(self, told: float = TOLD) -> Sums:
        """As rules may use them: where there is noise, as near as can be to sums of images."""
        if self.noise is None:
            return self
        return Sums(*self.noise.settled(self.counts, self.first, self.second, told), self.noise)

    @property
    def width(self) -> int:
        return self.first.shape[1]

    def packed(self, choice: Choice, dtype: torch.dtype) -> dict[str, Tensor]:
        """As it is sent, by names without the statistic's own."""
        held, (rows, columns) = self.counts > 0, torch.triu_indices(self.width, self.width, device=self.first.device)
        told = {
            "choice": torch.tensor(choice, dtype=torch.int64),
            "counts": self.counts,
            "moments": (self.second[rows, columns] / self.images).to(dtype),
        }
        if self.noise is None:
            return told | {"means": (self.first[held] / self.counts[held, None]).to(dtype)}
        first = (self.first / self.images).to(dtype)
        return told | {"first": first, "noise": torch.tensor(self.noise, dtype=torch.float64)}

    @classmethod
    def unpacked(cls, given: Sent, device: torch.device | str = "cpu") -> Sums:
        """The sums that whole names stand for; they must have been checked (``flyby.statistics.extras.sent``)."""
        noise = noise_of(given)
        counts, moments = (given[f"{NAME}.{part}"].to(device) for part in ("counts", "moments"))
        rest = given[f"{NAME}.{'means' if noise is None else 'first'}"].to(device).double()
        width, images = rest.shape[1], counts.sum() if noise is None else round(noise.images)
        if noise is None:
            first, held = torch.zeros(len(counts), width, dtype=torch.float64, device=device), counts > 0
            first[held] = rest * counts[held, None]
        else:
            first = rest * images
        rows, columns = torch.triu_indices(width, width, device=device)
        second = torch.empty(width, width, dtype=torch.float64, device=device)
        second[rows, columns] = second[columns, rows] = moments.double() * images
        return cls(counts, first, second, noise)

    @property
    def alike(self) -> float:
        """A mean square so small beside that of the features that it is rounding."""
        return 2.0**-40 * float(self.second.diagonal().mean()) / max(1, self.images)

    def within(self) -> Tensor:
        """The scatter of images about the means of their classes, B - sum_c n_c m_c m_c^T."""
        scaled = self.first / self.counts.clamp_min(1).double().sqrt()[:, None]
        return self.second - scaled.T @ scaled


@lru_cache(maxsize=4)
def random_rows(count: int, width: int, draw: int) -> Tensor:
    """R [count, width] of the random features relu(R x), N(0, 1 / width), the same float32 numbers everywhere."""
    drawn = torch.randn(count, width, generator=generator("feature-sums", "random", draw, count, width))
    return drawn.div_(math.sqrt(width))


def widened(features: Tensor, choice: Choice) -> Tensor:
    """Features [N, d] in float64 with the random ones beside them, [N, d + random]."""
    features = features.double()
    if not choice.random:
        return features
    rows = random_rows(choice.random, features.shape[1], choice.draw).to(features)
    return torch.cat((features, (features @ rows.T).relu()), dim=1)


def feature_sums(
    network: Network,
    site: Site,
    seed: int,
    *,
    dtype: str = "float32",
    random: int = 0,
    draw: int = 0,
    least: int = LEAST,
) -> dict[str, Tensor]:
    """``choice`` [3], ``counts`` [C], ``means`` [H, D] of the H classes with images, in rising order, and ``moments``
    [D (D + 1) / 2]."""
    choice = _choice(dtype, random, draw, least)
    return _sent(sums_of(network, site, choice), site, choice, dtype)


def noised_sums(
    network: Network,
    site: Site,
    options: Mapping[str, Any],
    budget: tuple[float, float],
    norm: float | None,
    draw: Draw,
) -> dict[str, Tensor]:
    """The same with Gaussian noise for a ``budget`` of (epsilon, delta), of features that are shortened to ``norm`` (by
    default :func:`usual_norm`)."""
    asked = {"dtype": "float32", "random": 0, "draw": 0, **options, "least": 1}  # exact counts decide nothing
    choice = _choice(**asked)
    norm = norm or usual_norm(network, choice)
    exact = sums_of(network, site, choice, norm)
    noise = Noise.planned(len(site.train), norm, multiplier(*budget))
    made = Sums(*noise.added(exact.counts, exact.first, exact.second, draw), noise)
    return _sent(made, site, choice, asked["dtype"])


@torch.no_grad()
def usual_norm(network: Network, choice: Choice) -> float:
    """Twice the median norm of what the network makes of noise: fixed before any image is looked at. Photographs give
    about three times that of noise, and to shorten them all to two thirds costs hardly anything."""
    noise = network.spec.noise(PROBES, generator("feature-sums", "norm"))
    return 2 * float(widened(features_of(network, noise), choice).norm(dim=1).median()) or 1.0


def _choice(dtype: str, random: int, draw: int, least: int) -> Choice:
    if dtype not in ("float32", "float64"):
        raise BadInput(f"{NAME}:dtype={dtype} will not do; choose float32 or float64")
    numbers = {"random": (random, MOST_RANDOM), "draw": (draw, 2**53), "least": (least, 2**53)}
    for name, (value, most) in numbers.items():
        if type(value) is not int or not (name == "least") <= value <= most:
            raise BadInput(f"{NAME}:{name}={value} will not do; give a whole number up to {most}")
    return Choice(random, draw if random else 0, least)


def _sent(sums: Sums, site: Site, choice: Choice, dtype: str) -> dict[str, Tensor]:
    found = sums.packed(choice, getattr(torch, dtype))
    size = sum(tensor.nbytes for tensor in found.values())
    level = logging.INFO if site.real else logging.DEBUG  # of a simulated one nobody asks
    log.log(level, "%s: sums of %d features in %s take %s bytes", site.id, sums.width, dtype, f"{size:,}")
    return found


@torch.no_grad()
def sums_of(network: Network, site: Site, choice: Choice, norm: float | None = None) -> Sums:
    """One pass over a site's training images, in their order; features longer than ``norm`` are shortened to it."""
    device, classes = next(network.parameters()).device, len(site.class_names)
    labels = site.train.labels.to(device)
    counts = torch.bincount(labels, minlength=classes)
    few = (counts > 0) & (counts < choice.least)
    if bool(few.any()):
        names = ", ".join(site.class_names[c] for c in few.nonzero()[:, 0].tolist())
        log.warning("note: %s leaves out classes with fewer than %d images: %s", site.id, choice.least, names)
    counts = counts.masked_fill(few, 0)
    if not int(counts.sum()):
        raise BadInput(
            f"no class of {site.id} has {choice.least} images, so there are no sums to send; lower least in"
            f" --set objective.send=[{NAME}:least=...], or leave this site out"
        )
    kept = (counts[labels] > 0).nonzero()[:, 0]
    width = network.feature_dim + choice.random
    first = torch.zeros(classes, width, dtype=torch.float64, device=device)
    second = torch.zeros(width, width, dtype=torch.float64, device=device)
    network.eval()
    pooled = pooled_of(network, site.train.images, site.id)  # of a frozen backbone, perhaps known from another run
    for rows in torch.split(kept, at_once(network.spec, 512, device) if pooled is None else 512):
        if pooled is None:
            images = site.train.images[rows.to(site.train.images.device)].to(device)
            features = network.features(network.spec.prepare(images))
        else:
            features = beyond(network, pooled[rows.cpu()].to(device))
        if not bool((sound := features.isfinite().all(1)).all()):
            place = int(rows[~sound][0])
            raise BadInput(
                f"the features of image {place} of {site.id} are not finite; take that image away, or use another"
                " backbone"
            )
        features = widened(features, choice)
        if norm is not None:
            features = features * (norm / features.norm(dim=1, keepdim=True).clamp_min(1e-300)).clamp_max(1.0)
        # A product, not index_add_, whose order on a GPU is nobody's to say.
        first += torch.nn.functional.one_hot(labels[rows], classes).to(features).T @ features
        second += features.T @ features
    return Sums(counts, first, second)


def choice_of(given: Mapping[str, Tensor]) -> Choice:
    """What a sender chose, as far as it can be read; what cannot is refused by the declaration."""
    told = given.get(f"{NAME}.choice")
    if told is None or told.dtype != torch.int64 or tuple(told.shape) != (3,):
        return Choice()
    random, draw, least = told.tolist()
    return Choice(random if 0 <= random <= MOST_RANDOM else 0, draw, least)


def noise_of(given: Mapping[str, Tensor]) -> Noise | None:
    """What a sender says of its noise; None where it has none."""
    told = given.get(f"{NAME}.noise")
    return None if told is None else Noise(*told.flatten().tolist()) if told.numel() == len(Noise._fields) else None


class FeatureSums(Extra):
    """Counts, means and second moments of features that could all be of the same images."""

    name = NAME
    cure = "train it with --method ridge, or with --set objective.send=[feature-sums]"
    counts = True

    def entries(self, manifest: Manifest, given: Sent) -> dict[str, Entry]:
        classes = manifest.spec.classes
        width = manifest.spec.feature_dim() + choice_of(given).random
        noised = f"{NAME}.noise" in given
        own = given.get(f"{NAME}.{'first' if noised else 'means'}", torch.empty(0))
        dtype = torch.float64 if own.dtype == torch.float64 else torch.float32
        told = {
            f"{NAME}.choice": Entry(torch.int64, (3,), 0, 2**53),
            f"{NAME}.counts": Entry(torch.int64, (classes,), -(2**53) if noised else 0, 2**53, axis=0),
            f"{NAME}.moments": Entry(dtype, (width * (width + 1) // 2,)),
        }
        if noised:
            noise = Entry(torch.float64, (len(Noise._fields),), 0, 2**53)
            return told | {f"{NAME}.first": Entry(dtype, (classes, width), axis=0), f"{NAME}.noise": noise}
        held = int((given.get(f"{NAME}.counts", torch.empty(0)) > 0).sum())
        return told | {f"{NAME}.means": Entry(dtype, (held, width))}

    def onto(self, manifest: Manifest, given: Sent, source: Sequence[int]) -> dict[str, Tensor]:
        """Means are those of the classes with images, in rising order."""
        found, means, held = super().onto(manifest, given, source), given.get(f"{NAME}.means"), given[f"{NAME}.counts"]
        if means is not None:
            rows = torch.where(held > 0, (held > 0).cumsum(0) - 1, -1).tolist()
            picked = [rows[old] for old in source if old >= 0 and rows[old] >= 0]
            found[f"{NAME}.means"] = means[torch.tensor(picked, dtype=torch.int64)]
        return found

    def agree(self, manifest: Manifest, given: Sent) -> str:
        choice, counts, noise = choice_of(given), given[f"{NAME}.counts"], noise_of(given)
        if tuple(choice) != tuple(given[f"{NAME}.choice"].tolist()):
            return f"{NAME}.choice asks for more than {MOST_RANDOM} random features"
        if noise is not None:
            return self._noised(manifest, given, noise)
        if not 0 < sum(counts.tolist()) <= manifest.samples:
            return f"{NAME}.counts are not those of its {manifest.samples} images"
        if manifest.counts is not None and manifest.counts_kind == "exact":
            told = torch.tensor(manifest.counts)
            # Of a region each site left out its own few, so the sums may hold fewer.
            wrong = counts > told if manifest.sites > 1 else counts != told.masked_fill(told < choice.least, 0)
            if bool(wrong.any()):
                return f"{NAME}.counts are not the parcel's own"
        means, squares = given[f"{NAME}.means"].double(), _diagonal(given).double()
        share = counts[counts > 0].double() / counts.sum()
        least = (share[:, None] * means.square()).sum(0)
        if bool((squares < least - ROUNDING * (least + squares.abs())).any()):
            return "the squares of its features are smaller than those of their means"
        return ""

    def _noised(self, manifest: Manifest, given: Sent, noise: Noise) -> str:
        """The same of sums with noise."""
        counts = given[f"{NAME}.counts"]
        if not noise.images <= manifest.samples or noise.images != round(noise.images):
            return f"its noise is said to be on other images than its {manifest.samples}"
        if manifest.counts is not None and list(manifest.counts) != blurred(counts):
            return f"{NAME}.counts are not the parcel's own"
        first, squares = (noise.images * part.double() for part in (given[f"{NAME}.first"], _diagonal(given)))
        return noise.unlikely(counts, first, squares, manifest.sites)

    def sound(self, manifest: Manifest, given: Sent) -> str:
        sums, slack = Sums.unpacked(given), ROUNDING * float(_diagonal(given).double().sum().abs())
        if sums.noise is None:
            scatter = sums.within() / sums.images
        else:
            mean = sums.first.sum(0) / sums.images
            scatter = sums.second / sums.images - torch.outer(mean, mean)
            slack += sums.noise.slack(mean, len(sums.counts)) / sums.images
        scatter.diagonal().add_(slack + torch.finfo(torch.float64).tiny)
        bad = bool(torch.linalg.cholesky_ex(scatter).info)
        return "its second moments are those of no images with these means" if bad else ""

    def sizes(self, manifest: Manifest, given: Sent) -> Sizes:
        """The root mean square feature."""
        return {f"{NAME}.moments": float(_diagonal(given).double().clamp_min(0).mean().sqrt())}

    @torch.no_grad()
    def answers(self, network: Network, given: Sent, images: Tensor) -> tuple[Tensor, Sequence[int]] | None:
        """The nearest class mean, in the features that are not random; noise may have left one site no opinion."""
        if noise_of(given) is not None:
            return None
        held = (given[f"{NAME}.counts"] > 0).nonzero()[:, 0]
        means = given[f"{NAME}.means"][:, : network.feature_dim].to(images.device, torch.float32)
        features = features_of(network, images)
        return held.to(images.device)[torch.cdist(features, means).argmin(1)], held.tolist()


def blurred(counts: Tensor) -> list[int]:
    """Noisy counts as a manifest tells them."""
    return [max(0, count) for count in counts.tolist()]


def _diagonal(given: Sent) -> Tensor:
    """The mean square of every feature."""
    width = (math.isqrt(8 * len(given[f"{NAME}.moments"]) + 1) - 1) // 2
    steps = torch.arange(width, 0, -1)  # a row of the triangle is one shorter than the one before
    return given[f"{NAME}.moments"][torch.cat((torch.zeros(1, dtype=torch.int64), steps[:-1].cumsum(0)))]
