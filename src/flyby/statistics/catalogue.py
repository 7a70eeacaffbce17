"""Statistics a site can send beside its weights, for server rules that need them: ``--set objective.send=[NAME,...]``,
with options after a colon: ``kfac:samples=2000;half=false``.

One entry is a function (network, site, seed) -> named tensors, computed after training on the site's own images. They
become extras of the parcel, so they are hashed and counted in its bytes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from flyby.data.site import Site
from flyby.errors import BadInput, unknown
from flyby.models import Network
from flyby.registry import Registry
from flyby.statistics.class_means import class_means
from flyby.statistics.kfac import kfac
from flyby.statistics.null_space import null_space

Statistic = Callable[..., dict[str, Tensor]]

STATISTICS: Registry[Statistic] = Registry(
    "statistic to send", {"class-means": class_means, "kfac": kfac, "null-space": null_space}
)


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
