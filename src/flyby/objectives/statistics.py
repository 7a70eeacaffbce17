"""Statistics a site can send beside its weights, for server rules that need them: ``--set objective.send=[NAME,...]``.

One entry is a function (network, site, seed) -> named tensors, computed after training on the site's own images. They become extras of
the parcel, so they are hashed and counted in its bytes.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from flyby.data.site import Site
from flyby.models import Network
from flyby.objectives.class_means import class_means
from flyby.objectives.kfac import kfac
from flyby.objectives.null_space import null_space

Statistic = Callable[[Network, Site, int], dict[str, Tensor]]

STATISTICS: dict[str, Statistic] = {"class-means": class_means, "kfac": kfac, "null-space": null_space}
