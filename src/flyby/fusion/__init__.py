"""The server rules, by name."""

from __future__ import annotations

from flyby.fusion.average import EnsembleFusion, FedAvg
from flyby.fusion.base import Fusion, FusionSettings, Inbox
from flyby.fusion.experts import Experts, ExpertsCalibrated, ExpertsGate, ExpertsPredictor, ExpertsSoftmax
from flyby.fusion.iffi import Iffi, IffiPredictor
from flyby.fusion.predictor import PREDICTORS, Predictor, load_predictor, save_predictor

FUSIONS: dict[str, type[Fusion]] = {
    f.name: f for f in (FedAvg, EnsembleFusion, Iffi, Experts, ExpertsSoftmax, ExpertsGate, ExpertsCalibrated)
}
PREDICTORS |= {p.kind: p for p in (IffiPredictor, ExpertsPredictor)}

__all__ = ["FUSIONS", "Fusion", "FusionSettings", "Inbox", "Predictor", "load_predictor", "save_predictor"]
