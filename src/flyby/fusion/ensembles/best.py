"""One rule for all uploads: experts whose voice is calibrated at their site and shared out among what they hold.

score_c(x) = sum_k l_k(x) (v_kc a_kc(x) q_kc(x)^g + crowd w_k cos_kc(x)), v_kc ~ n_kc^power (or n / (n + enough)), with

- a_kc, what the expert says: its cosine as it is, or calibrated, r clip((cos - m-) / (m+ - m-), 0, 1.2), where the
  negatives m-, s- are scraps (the extra ``calibration``), the site's own images of its other classes (``foreign``,
  leave-one-class-out), or for each class the ones that fooled its expert more (``worst``);
- q_kc = softmax(sharpness cos_k) over the classes that client k holds, 1 for a client of one class. A client of fifty
  classes must share its voice out among them, whatever its calibration says;
- the crowd: the plain cosines of all clients, w_k ~ sqrt(n_k). v shares one voice out among the holders of a class;
  here each has its own, so that a class which many hold and agree on gains;
- l_k = (||f_k(x)|| / what it usually is at its site)^norms: features are short where a network sees nothing it knows.

It serves heads of every kind: linear rows, prototypes, anchors, and prototypes of every way of a shift. Cosines may be
those of raw features or of standardised ones (``features``), which have no calibration. All candidates are settings, so
that a study chooses between them; the values that `--method best` has stand in ``flyby.runs.methods``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from flyby.errors import BadInput
from flyby.fusion.base import FusionSettings, Server
from flyby.fusion.ensembles.experts import WHISPER, Experts, ExpertsPredictor, ExpertsSettings, certainty, say_cost
from flyby.fusion.ensembles.standardised import standardised
from flyby.fusion.predictor import Predictor
from flyby.models import ModelSpec, Network
from flyby.models.heads import between, shown_directions
from flyby.models.shelf import Shelf
from flyby.models.shifts import WAYS
from flyby.parcels.inbox import Inbox
from flyby.parcels.parcel import Parcel
from flyby.settings import build
from flyby.statistics.calibration import SCRAP, SPREAD, calibrated
from flyby.statistics.catalogue import EXTRAS
from flyby.statistics.extras import sent

LOUDEST = 3.0  # times the usual length of features: whoever says that his are short must not outshout all others


class BestPredictor(ExpertsPredictor):
    """Experts by the rule above. With ``standardise`` members say what they see, and ``mean``, ``std`` [K, d] and the
    class directions ``rows`` [K, R, C, d] are kept beside them."""

    kind = "best"

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        class_names: Sequence[str],
        networks: Sequence[Network] | Shelf | None = None,
        *,
        form: Mapping[str, Any] | None = None,
        votes: Tensor | None = None,
        calibration: Tensor | None = None,
        kept: Mapping[str, Tensor] | None = None,
    ) -> None:
        chosen = build(FormSettings, form or {}, "form")
        super().__init__(specs, class_names, networks, votes=votes, calibration=calibration)
        self.form_of, self.settings = chosen, {"form": chosen.model_dump()}
        members, shapes = len(self.specs), dict[str, tuple[int, ...]]()
        if chosen.standardise:
            classes, dim = len(self.class_names), self.specs[0].skeleton().feature_dim
            shapes |= {"mean": (members, dim), "std": (members, dim), "rows": (members, chosen.ways, classes, dim)}
        shapes |= ({"shares": (members,)} if chosen.crowd else {}) | ({"usual": (members,)} if chosen.norms else {})
        for name, shape in shapes.items():
            self.register_buffer(name, (kept or {}).get(name, torch.zeros(shape)))

    mean: Tensor
    std: Tensor
    rows: Tensor
    shares: Tensor
    usual: Tensor

    def voice(self, network: Network, features: Tensor) -> Tensor:
        """The cosines [N, C], and in one more column the length of the features where that counts."""
        if self.form_of.standardise:
            return features.float()
        cosines = super().voice(network, features)
        return torch.cat((cosines, lengths(features)[:, None]), 1) if self.form_of.norms else cosines

    def combine(self, voices: Sequence[Tensor], images: Tensor) -> Tensor:
        form = self.form_of
        if form.standardise:
            each = zip(voices, self.mean, self.std, self.rows, strict=True)
            voices = [between(standardised(f, m, s), rows) for f, m, s, rows in each]
        cosines = torch.stack(tuple(voices))
        loud: Tensor | float = 1.0
        if form.norms:
            cosines, seen = cosines[..., :-1], cosines[..., -1:]
            loud = (seen / self.usual[:, None, None].clamp_min(1e-12)).clamp(max=LOUDEST) ** form.norms
        scores = torch.einsum("kc,knc->nc", self.votes, loud * self.said(cosines))
        if form.crowd:
            scores = scores + form.crowd * torch.einsum("k,knc->nc", self.shares, loud * cosines)
        return self.unspoken_last(scores, LOUDEST**form.norms * (2 + form.crowd))

    def said(self, cosines: Tensor) -> Tensor:
        form, held = self.form_of, (self.votes > 0)[:, None]
        voice = calibrated(cosines, self.calibration, form.reliability) if form.calibrate else (1 + cosines) / 2
        shared = certainty(cosines, held, form.sharpness) ** form.exponent if form.exponent else 1.0
        return voice * shared + WHISPER * cosines  # where every expert is silent the cosines decide, not class 0


class FormSettings(FusionSettings):
    """What a predictor must know of the rule that made it."""

    calibrate: bool = True
    reliability: bool = True
    standardise: bool = False
    ways: int = Field(1, ge=1, le=WAYS)
    sharpness: float = Field(16.0, gt=0)
    exponent: float = Field(0.5, ge=0)
    crowd: float = Field(0.0, ge=0)
    norms: float = Field(0.0, ge=0)


class BestSettings(ExpertsSettings):
    negatives: Literal["none", "scraps", "foreign", "worst"] = Field(
        "scraps", description="what an expert is calibrated against; none: its cosine as it is"
    )
    reliability: bool = Field(True, description="an expert that finds its class everywhere whispers")
    exponent: float = Field(0.5, ge=0, description="of the softmax over the classes held; 0 leaves it out")
    features: Literal["raw", "standardised"] = Field(
        "raw", description="standardised: by the client's own moments, without calibration"
    )
    crowd: float = Field(0.0, ge=0, description="weight of what all clients say of all classes, beside the experts")
    norms: float = Field(
        0.0, ge=0, description="exponent of a client's loudness: the length of its features, over the usual one"
    )


class Best(Experts):
    name = "best"
    about = "experts calibrated at their site, each voice shared out among the classes it holds"
    needs = frozenset({"weights", "class_counts", "prototypes", "calibration"})
    settings_type = BestSettings
    settings: BestSettings

    @classmethod
    def needed(cls, settings: FusionSettings) -> frozenset[str]:
        assert isinstance(settings, BestSettings)
        standardise = settings.features == "standardised"
        if standardise and settings.negatives != "none":
            raise BadInput(
                "calibration is measured on raw features; with fusion.features=standardised take fusion.negatives=none"
            )
        if standardise and settings.norms:
            raise BadInput("standardised features have no usual length; take fusion.norms=0, or fusion.features=raw")
        asked = {"none": set[str](), "scraps": {"calibration"}}.get(settings.negatives, {"calibration", "foreign"})
        return (cls.needs - {"calibration"}) | asked | ({"moments"} if standardise or settings.norms else set())

    def combine(self, parcels: Inbox, server: Server) -> Predictor:
        networks, settings = parcels.networks(), self.settings
        calibrate, standardise = settings.negatives != "none", settings.features == "standardised"
        votes = self.votes(parcels, networks, server)
        tables = [calibration_of(item, settings.negatives) for item in parcels] if calibrate else []
        kept = seen_by(parcels, self.name) if standardise else {}
        form = {"calibrate": calibrate, "standardise": standardise, "ways": kept["rows"].shape[1] if standardise else 1}
        form |= {name: getattr(settings, name) for name in ("reliability", "sharpness", "exponent", "crowd", "norms")}
        if settings.crowd:
            shares = torch.tensor(parcels.samples, dtype=torch.float64).sqrt()
            kept["shares"] = (shares / shares.sum().clamp_min(1e-12)).float()
        if settings.norms:
            kept["usual"] = torch.stack([usual_length(item) for item in parcels])
        say_cost(parcels, server)
        return BestPredictor(
            [m.spec for m in parcels.manifests],
            parcels.class_names,
            networks,
            form=form,
            votes=votes,
            calibration=torch.stack(tables) if tables else None,
            kept=kept,
        )


def calibration_of(item: Parcel, negatives: str) -> Tensor:
    """A client's table [3, C] of (m+, m-, s-) with the negatives that were asked for; scraps where a class has no
    others beside it."""
    table = sent(item, EXTRAS["calibration"])["calibration"]
    if negatives == "scraps":
        return table
    others = sent(item, EXTRAS["foreign"])
    mean, std = others["foreign.mean"], others["foreign.std"]
    there = (mean != 0) | (std != 0)
    taken = there if negatives == "foreign" else there & (mean > table[SCRAP])
    found = table.clone()
    found[SCRAP], found[SPREAD] = torch.where(taken, mean, table[SCRAP]), torch.where(taken, std, table[SPREAD])
    return found


def lengths(features: Tensor) -> Tensor:
    """||f|| of features [N, d], or its root mean square over the ways, [N, R, d]: [N]."""
    squares = features.float().square().sum(-1)
    return (squares if features.ndim == 2 else squares.mean(1)).sqrt()


def usual_length(item: Parcel) -> Tensor:
    """The root mean square of ||f|| over a client's own images, from the moments of its features."""
    table = sent(item, EXTRAS["moments"])
    return (table["moments.mean"].square() + table["moments.std"].square()).sum().sqrt()


def seen_by(parcels: Inbox, rule: str) -> dict[str, Tensor]:
    """Each client's moments and class directions, for features that are standardised first."""
    parcels.same_features(rule)
    tables = [sent(item, EXTRAS["moments"]) for item in parcels]
    rows = [shown_directions(item.network()).float() for item in parcels]
    ways = max(len(one) for one in rows)
    return {
        "mean": torch.stack([table["moments.mean"] for table in tables]),
        "std": torch.stack([table["moments.std"] for table in tables]),
        "rows": torch.stack([one.expand(ways, -1, -1) if len(one) == 1 else one for one in rows]),
    }
