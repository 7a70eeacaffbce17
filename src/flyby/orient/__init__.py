"""FOL: a node personalises its model from those of neighbours it met, with no server."""

from __future__ import annotations

from flyby.orient.candidate import Candidate
from flyby.orient.collect import Schedule, make_schedule
from flyby.orient.pipeline import History, Personal, orient
from flyby.orient.settings import VARIANTS, OrientSettings

__all__ = ["VARIANTS", "Candidate", "History", "OrientSettings", "Personal", "Schedule", "make_schedule", "orient"]
