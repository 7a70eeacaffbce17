"""The server rules, by name."""

from __future__ import annotations

from flyby.fusion.base import Fusion, FusionSettings, Inbox
from flyby.fusion.distilled.coboosting import CoBoosting
from flyby.fusion.distilled.dense import Dense
from flyby.fusion.distilled.fedcvae import FedCvae, FedCvaeKd
from flyby.fusion.distilled.feddf import FedDF
from flyby.fusion.distilled.intactofl import GatedPredictor, IntactOFL
from flyby.fusion.ensembles.experts import Experts, ExpertsCalibrated, ExpertsGate, ExpertsPredictor, ExpertsSoftmax
from flyby.fusion.ensembles.iffi import Iffi, IffiPredictor
from flyby.fusion.ensembles.prototypes import FedProto, FedTgp, NearestMeans
from flyby.fusion.predictor import PREDICTORS, Predictor, load_predictor, save_predictor
from flyby.fusion.robust import Clipped, EnsembleMedian, EnsembleTrimmed, Median, RobustEnsemble, Trimmed
from flyby.fusion.weights.average import EnsembleFusion, FedAvg
from flyby.fusion.weights.fedlpa import FedLpa
from flyby.fusion.weights.maecho import MaEcho
from flyby.fusion.weights.ot import OtFusion

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
