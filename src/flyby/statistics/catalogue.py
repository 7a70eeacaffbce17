"""Statistics a site can send beside its weights, for server rules that need them: ``--set objective.send=[NAME,...]``,
with options after a colon: ``kfac:samples=2000;half=false``.

One entry is a function (network, site, seed) -> named tensors, computed after training on the site's own images. They
become extras of the parcel, so they are hashed and counted in its bytes. Each has its declaration in ``EXTRAS``, which
says what a receiver may believe of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from flyby.data.site import Part, Site
from flyby.errors import BadInput, unknown
from flyby.models import Network
from flyby.parcels.parcel import Parcel
from flyby.registry import Registry
from flyby.statistics.calibration import Calibration
from flyby.statistics.class_means import ClassMeans, class_means
from flyby.statistics.decoder import Painter
from flyby.statistics.extras import Extra, Sizes, examine, given
from flyby.statistics.feature_sums import FeatureSums, feature_sums
from flyby.statistics.foreign import Foreign, foreign
from flyby.statistics.kfac import Kfac, kfac
from flyby.statistics.masked_sums import MaskedSums
from flyby.statistics.moments import Moments, moments
from flyby.statistics.null_space import NullSpace, null_space

Statistic = Callable[..., dict[str, Tensor]]

STATISTICS: Registry[Statistic] = Registry(
    "statistic to send",
    {
        "class-means": class_means,
        "feature-sums": feature_sums,
        "foreign": foreign,
        "kfac": kfac,
        "moments": moments,
        "null-space": null_space,
    },
)
# All that may travel beside weights: what these statistics make, and what objectives add on their own.
KINDS = (
    *(Calibration(), ClassMeans(), FeatureSums(), Foreign(), Kfac(), MaskedSums(), Moments(), NullSpace(), Painter()),
)
EXTRAS: Registry[Extra] = Registry("extra", {kind.name: kind for kind in KINDS})


def named(text: str) -> tuple[str, dict[str, Any]]:
    """A statistic's name and its options, both known to exist."""
    import yaml

    name, _, rest = text.partition(":")
    there = [p.name for p in inspect.signature(STATISTICS[name]).parameters.values() if p.kind is p.KEYWORD_ONLY]
    options = {}
    for part in rest.split(";") if rest else ():
        key, _, value = part.partition("=")
        if key not in there:
            raise unknown(f"option of {name}", key, there) if there else BadInput(f"{name} has no options")
        options[key] = yaml.safe_load(value)
    return name, options


def computed(text: str, network: Network, site: Site, seed: int) -> dict[str, Tensor]:
    """The tensors of one statistic, under ``NAME.REST``."""
    name, options = named(text)
    return {f"{name}.{key}": value for key, value in STATISTICS[name](network, site, seed, **options).items()}


def examined(item: Parcel, validation: Part | None, device: torch.device | str, *, used: Collection[str] = ()) -> Sizes:
    """What a gate asks of a parcel's extras: BadInput where one of a known kind cannot be what it says, else the sizes
    by which they are compared with those of others. ``used`` are the kinds that a rule will read, which are looked at
    more closely. Extras of unknown kinds are never read by flyby's own rules, so they are nobody's concern."""
    sizes: Sizes = {}
    for kind in EXTRAS.values():
        if given(item, kind):
            sizes |= examine(item, kind, kind.name in used, validation, device)
    return sizes
