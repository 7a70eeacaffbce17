"""The server rules, by name."""

from __future__ import annotations

from flyby.fusion.base import FUSIONS, Fusion, FusionSettings, Server
from flyby.fusion.closed.fishermix import FisherMix
from flyby.fusion.closed.lda import Lda, NaiveBayes
from flyby.fusion.closed.ridge import Ridge
from flyby.fusion.distilled.coboosting import CoBoosting
from flyby.fusion.distilled.compact import Compact
from flyby.fusion.distilled.dense import Dense
from flyby.fusion.distilled.fedcvae import FedCvae, FedCvaeKd
from flyby.fusion.distilled.feddf import FedDF
from flyby.fusion.distilled.intactofl import GatedPredictor, IntactOFL
from flyby.fusion.ensembles.best import Best, BestPredictor
from flyby.fusion.ensembles.experts import Experts, ExpertsCalibrated, ExpertsGate, ExpertsPredictor, ExpertsSoftmax
from flyby.fusion.ensembles.iffi import Iffi, IffiPredictor
from flyby.fusion.ensembles.prototypes import FedProto, FedTgp, NearestMeans
from flyby.fusion.ensembles.standardised import Standardised, StandardisedPredictor
from flyby.fusion.predictor import PREDICTORS, Predictor, load_predictor, save_predictor
from flyby.fusion.robust import Clipped, EnsembleMedian, EnsembleTrimmed, Median, RobustEnsemble, Trimmed
from flyby.fusion.weights.average import EnsembleFusion, FedAvg
from flyby.fusion.weights.fedlpa import FedLpa
from flyby.fusion.weights.maecho import MaEcho
from flyby.fusion.weights.ot import OtFusion
from flyby.parcels.inbox import Inbox

RULES: tuple[type[Fusion], ...] = (
    *(FedAvg, EnsembleFusion, Iffi, Experts, ExpertsSoftmax, ExpertsGate, ExpertsCalibrated, Best, Standardised),
    *(FedProto, FedTgp, FedCvae, FedCvaeKd, Dense, CoBoosting, FedDF, IntactOFL, Compact, FedLpa, MaEcho, OtFusion),
    *(Median, Trimmed, Clipped, EnsembleMedian, EnsembleTrimmed),
    *(Ridge, Lda, NaiveBayes, FisherMix),
)
for _rule in RULES:
    FUSIONS[_rule.name] = _rule
for _made in (
    *(IffiPredictor, ExpertsPredictor, BestPredictor, StandardisedPredictor),
    *(NearestMeans, GatedPredictor, RobustEnsemble),
):
    PREDICTORS[_made.kind] = _made

__all__ = ["FUSIONS", "Fusion", "FusionSettings", "Inbox", "Predictor", "Server", "load_predictor", "save_predictor"]
