"""One rule for all uploads: the holders of a class say how far an image stands out for them, and how sure they are.

score_c(x) = sum over the clients k that hold c of (v_kc + w_k) t_kc(x) + v_kc a_kc(x) q_kc(x)^g, with

- t_kc = <z_k, e_kc> / sqrt(d), the client's features over their usual size, z_k = f_k(x) / u_k in every dimension, in
  the direction of the class; the mean over the ways of a shift. Features are short where a network sees nothing that it
  knows. u_k is their root mean square over the client's own images. FedSRA's ``standardised`` also takes their mean
  away (``centre``): at a client of few classes, most of what it knows;
- a_kc, the calibrated cosine, r clip((cos - m-) / (m+ - m-), 0, 1.2), where the negatives m-, s- are scraps (the extra
  ``calibration``), the site's own images of its other classes (``foreign``, leave-one-class-out), or for each class
  those that fooled its expert more (``worst``);
- q_kc = softmax(sharpness cos_k) over the classes that client k holds, 1 for a client of one class. A client of fifty
  classes must share its voice out among them, whatever its calibration says;
- v_kc ~ n_kc / (n_kc + enough N_c / K), one voice shared out among the holders of a class, and w_k ~ sqrt(n_k), one for
  each: a class that many hold and agree on gains.

Where some client sent no ``moments``, t is left out. The rule serves heads of every kind: linear rows, prototypes,
anchors, and prototypes of every way of a shift. All that was tried is a setting, so that a study can choose;
docs/best.md says what was chosen, and on which images.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from flyby.fusion.base import FusionSettings, Server
from flyby.fusion.ensembles.experts import (
    USUAL,
    WHISPER,
    Experts,
    ExpertsPredictor,
    ExpertsSettings,
    certainty,
    say_cost,
)
from flyby.fusion.ensembles.standardised import standardised
from flyby.fusion.predictor import Predictor
from flyby.models import ModelSpec, Network
from flyby.models.heads import HEADS, between, shown_directions
from flyby.models.shelf import Shelf
from flyby.models.shifts import WAYS
from flyby.parcels.inbox import Inbox
from flyby.parcels.parcel import Parcel
from flyby.settings import build
from flyby.statistics.calibration import SCRAP, SPREAD, calibrated
from flyby.statistics.catalogue import EXTRAS
from flyby.statistics.extras import sent

log = logging.getLogger(__name__)
LOUD = 1 / 6  # the usual temperature where what stands out is heard beside the experts; chosen as the form was
LOUDEST = 3.0  # times the usual length of features: who understates the usual one must not outshout all others


class BestPredictor(ExpertsPredictor):
    """Experts by the rule above. Beside the members are kept, of client k, the moments ``mean_k``
    and ``std_k`` [d] and the class directions ``rows_k`` [R, C, d], and of all the ``shares`` w [K]."""

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
        self.temperature = LOUD if chosen.seen or chosen.crowd else USUAL["calibrated"]
        shapes: dict[str, tuple[int, ...]] = {"shares": (len(self.specs),)}
        for k, spec in enumerate(self.specs):
            dim, ways = spec.skeleton().feature_dim, WAYS if HEADS[spec.head].shift else 1
            shapes |= {f"mean_{k}": (dim,), f"std_{k}": (dim,), f"rows_{k}": (ways, len(self.class_names), dim)}
        for name, shape in shapes.items():
            self.register_buffer(name, (kept or {}).get(name, torch.zeros(shape)))

    shares: Tensor

    def voice(self, k: int, network: Network, features: Tensor) -> Tensor:
        """Its cosines, and what stands out for it: [N, 2, C]."""
        seen = features.float()
        mean, std, rows = (getattr(self, f"{name}_{k}") for name in ("mean", "std", "rows"))
        return torch.stack((between(seen, rows), stands_out(seen, mean, std, rows, self.form_of.centre)), dim=1)

    def combine(self, voices: Sequence[Tensor], images: Tensor) -> Tensor:
        cosines, dots = torch.stack(tuple(voices)).unbind(2)
        return self.weighed(cosines, dots)

    def weighed(self, cosines: Tensor, dots: Tensor) -> Tensor:
        """The scores [N, C] from every client's cosines and what stands out for it, both [K, N, C]."""
        form, held = self.form_of, (self.votes > 0).float()
        volume = form.seen * self.votes + form.crowd * self.shares[:, None] * held
        scores = torch.einsum("kc,knc->nc", self.votes, self.said(cosines)) + torch.einsum("kc,knc->nc", volume, dots)
        return self.unspoken_last(scores, LOUDEST * (form.seen + form.crowd) + 2)

    def said(self, cosines: Tensor) -> Tensor:
        form, held = self.form_of, (self.votes > 0)[:, None]
        voice = calibrated(cosines, self.calibration, form.reliability) if form.calibrate else (1 + cosines) / 2
        shared = certainty(cosines, held, form.sharpness) ** form.exponent if form.exponent else 1.0
        return voice * shared + WHISPER * cosines  # where every expert is silent the cosines decide, not class 0


class FormSettings(FusionSettings):
    """What a predictor must know of the rule that made it."""

    calibrate: bool = True
    reliability: bool = True
    sharpness: float = Field(16.0, gt=0)
    exponent: float = Field(0.5, ge=0)
    seen: float = Field(1.0, ge=0)
    crowd: float = Field(1.0, ge=0)
    centre: bool = False


class BestSettings(ExpertsSettings):
    power: float | None = Field(None, ge=0, description="v_kc ~ n_kc ** power, in place of enough")
    negatives: Literal["none", "scraps", "foreign", "worst"] = Field(
        "scraps", description="what an expert is calibrated against; none: its cosine as it is"
    )
    reliability: bool = Field(True, description="an expert that finds its class everywhere whispers")
    exponent: float = Field(0.5, ge=0, description="of the softmax over the classes held; 0 leaves it out")
    seen: float = Field(1.0, ge=0, description="weight of what stands out, in one voice for a class")
    crowd: float = Field(1.0, ge=0, description="the same, in a voice for each client that holds it")
    centre: bool = Field(False, description="take the mean of a client's features away, as FedSRA does")


class Best(Experts):
    name = "best"
    about = "experts by how far features stand out, and by cosines calibrated at their site"
    edition = 2
    needs = frozenset({"weights", "class_counts", "prototypes", "calibration"})
    wants = frozenset({"moments"})
    enough = 1.0
    settings_type = BestSettings
    settings: BestSettings

    @classmethod
    def needed(cls, settings: FusionSettings) -> frozenset[str]:
        assert isinstance(settings, BestSettings)
        asked = {"none": set[str](), "scraps": {"calibration"}}.get(settings.negatives, {"calibration", "foreign"})
        return (cls.needs - {"calibration"}) | asked

    def combine(self, parcels: Inbox, server: Server) -> Predictor:
        networks, settings = parcels.networks(), self.settings
        calibrate = settings.negatives != "none"
        votes = self.votes(parcels, networks, server)
        tables = [calibration_of(item, settings.negatives) for item in parcels] if calibrate else []
        form = {name: getattr(settings, name) for name in FormSettings.model_fields if name != "calibrate"}
        silent = [item.manifest.sender for item in parcels if "moments.mean" not in item.extras]
        if silent and (settings.seen or settings.crowd):
            log.info("%s sent no moments, so that no client is heard by the size of its features", ", ".join(silent))
            form |= {"seen": 0.0, "crowd": 0.0}
        shares = torch.tensor(parcels.samples, dtype=torch.float64).sqrt()
        kept = {"shares": (shares / shares.sum().clamp_min(1e-12)).float()}
        for k, (item, network) in enumerate(zip(parcels, networks, strict=True)):
            kept[f"rows_{k}"] = shown_directions(network).float().clone()
            if not silent:
                found = sent(item, EXTRAS["moments"])
                kept |= {f"mean_{k}": found["moments.mean"], f"std_{k}": found["moments.std"]}
        say_cost(parcels, server)
        return BestPredictor(
            [m.spec for m in parcels.manifests],
            parcels.class_names,
            networks,
            form={"calibrate": calibrate, **form},
            votes=votes,
            calibration=torch.stack(tables) if tables else None,
            kept=kept,
        )


def stands_out(features: Tensor, mean: Tensor, std: Tensor, rows: Tensor, centre: bool = False) -> Tensor:
    """t_kc of features [N, d], or of those of every way [N, R, d]: [N, C]. Of usual features it is between -1 and 1."""
    middle, size = (mean, std) if centre else (torch.zeros_like(mean), (mean.square() + std.square()).sqrt())
    z, root = standardised(features.float(), middle, size), mean.shape[0] ** 0.5
    z = z * (LOUDEST * root / z.norm(dim=-1, keepdim=True).clamp_min(1e-12)).clamp(max=1.0) / root
    rows = F.normalize(rows.float(), dim=2)
    return z @ rows[0].T if z.ndim == 2 else torch.einsum("nrd,rcd->nc", z, rows) / len(rows)


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
