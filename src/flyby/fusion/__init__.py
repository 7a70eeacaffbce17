"""The server rules, by name."""

from __future__ import annotations

from flyby.fusion.average import EnsembleFusion, FedAvg
from flyby.fusion.base import Fusion, FusionSettings, Inbox
from flyby.fusion.coboosting import CoBoosting
from flyby.fusion.dense import Dense
from flyby.fusion.experts import Experts, ExpertsCalibrated, ExpertsGate, ExpertsPredictor, ExpertsSoftmax
from flyby.fusion.fedcvae import FedCvae, FedCvaeKd
from flyby.fusion.feddf import FedDF
from flyby.fusion.fedlpa import FedLpa
from flyby.fusion.iffi import Iffi, IffiPredictor
from flyby.fusion.intactofl import GatedPredictor, IntactOFL
from flyby.fusion.maecho import MaEcho
from flyby.fusion.ot import OtFusion
from flyby.fusion.predictor import PREDICTORS, Predictor, load_predictor, save_predictor
from flyby.fusion.prototypes import FedProto, FedTgp, NearestMeans
from flyby.fusion.robust import Clipped, EnsembleMedian, EnsembleTrimmed, Median, RobustEnsemble, Trimmed

FUSIONS: dict[str, type[Fusion]] = {
    f.name: f for f in (FedAvg, EnsembleFusion, Iffi, Experts, ExpertsSoftmax, ExpertsGate, ExpertsCalibrated)
}
PREDICTORS |= {p.kind: p for p in (IffiPredictor, ExpertsPredictor)}
FUSIONS |= {f.name: f for f in (FedProto, FedTgp, FedCvae, FedCvaeKd)}
PREDICTORS |= {NearestMeans.kind: NearestMeans}
FUSIONS |= {f.name: f for f in (Dense, CoBoosting, FedDF, IntactOFL)}
PREDICTORS |= {GatedPredictor.kind: GatedPredictor}
FUSIONS |= {f.name: f for f in (FedLpa, MaEcho, OtFusion)}
FUSIONS |= {f.name: f for f in (Median, Trimmed, Clipped, EnsembleMedian, EnsembleTrimmed)}
PREDICTORS |= {RobustEnsemble.kind: RobustEnsemble}

__all__ = ["FUSIONS", "Fusion", "FusionSettings", "Inbox", "Predictor", "load_predictor", "save_predictor"]
