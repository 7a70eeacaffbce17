"""Bearings, flyby's own client: SALT on (class, quarter turn), so that a site of one class has something to tell apart.

SALT learns the 4 C labels of :mod:`flyby.objectives.shifting` with prototypes p_{c,r}. An expert then asks whether an
image looks like its class *in every way*: the mean over r of cos(f(way r of x), p_{c,r}). What was never seen looks
wrong in all of them, as in CSI [Tack et al., NeurIPS 2020].
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from flyby.models import ModelSpec, Network
from flyby.objectives.base import Batch, ObjectiveSettings, Terms
from flyby.objectives.salt import Salt, SaltSettings
from flyby.objectives.shifting import Shifting, ShiftSettings


class BearingsSettings(ShiftSettings, SaltSettings):
    pass


class Bearings(Shifting, Salt):
    name = "bearings"
    about = "SALT on classes and quarter turns, so that a site of one class has something to tell apart"
    paper = "flyby"
    provides = Salt.provides | {"moments"}
    sends = ("moments",)
    one_class = True
    settings_type: ClassVar[type[ObjectiveSettings]] = BearingsSettings
    settings: BearingsSettings

    @classmethod
    def adapt_spec(cls, spec: ModelSpec, settings: ObjectiveSettings) -> ModelSpec:
        assert isinstance(settings, BearingsSettings)
        return spec.replace(head=cls.head if settings.shift == "none" else settings.shift)

    def loss(self, model: Network, batch: Batch, progress: Tensor) -> Terms:
        return super().loss(model, self.in_ways(model, batch), progress)
