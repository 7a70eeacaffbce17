"""The server rules, by name."""

from __future__ import annotations

from flyby.fusion.average import EnsembleFusion, FedAvg
from flyby.fusion.base import Fusion, FusionSettings, Inbox
from flyby.fusion.predictor import Predictor, load_predictor, save_predictor

FUSIONS: dict[str, type[Fusion]] = {f.name: f for f in (FedAvg, EnsembleFusion)}

__all__ = ["FUSIONS", "Fusion", "FusionSettings", "Inbox", "Predictor", "load_predictor", "save_predictor"]
