"""No training at all: a site looks at its images once and sends what it was asked to measure.

For rules that need sums of features and nothing that was learned at a site (``objective.send``). The weights in the
parcel are those every site starts from, drawn from the seed.
"""

from __future__ import annotations

from torch import Tensor

from flyby.data.views import PLAIN, ViewSettings
from flyby.models import Network
from flyby.objectives.base import Batch, Objective, Terms


class Frozen(Objective):
    """Trains nothing: its epochs are 0, whatever was asked for, and its loss is never called."""

    name = "frozen"
    about = "nothing is trained: a site looks at its images once and sends what it is asked to measure"
    trains = False
    one_class = True
    provides = frozenset({"weights", "class_counts"})

    @classmethod
    def views(cls, size: tuple[int, int], mirror: bool) -> ViewSettings:
        return PLAIN

    def loss(self, model: Network, batch: Batch, progress: Tensor) -> Terms:
        raise TypeError("the objective 'frozen' has no loss: it trains nothing")
