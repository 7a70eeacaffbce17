"""FOL: a node personalises its model from those of neighbours it met, with no server."""

from __future__ import annotations

from flyby.meeting.candidate import Candidate
from flyby.meeting.collect import Schedule, make_schedule
from flyby.meeting.pipeline import History, Personal, orient
from flyby.meeting.settings import VARIANTS, OrientSettings

__all__ = ["VARIANTS", "Candidate", "History", "OrientSettings", "Personal", "Schedule", "make_schedule", "orient"]
