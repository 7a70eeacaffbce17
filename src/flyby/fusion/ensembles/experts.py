"""Experts, flyby's own server rule: whoever has seen a class speaks for it.

score_c(x) = sum_k v_kc a_kc(x), with v_kc = n_kc / sum_k n_kc the share of class c that client k holds and a_kc(x) what
client k says about c. No weight and no prototype is averaged across feature spaces, so architectures and heads may
differ.

An expert must also know what it does not know: a client with one class finds that class everywhere.
``experts-calibrated`` uses a_kc(x) = r_kc clip((cos_kc(x) - m-_kc) / (m+_kc - m-_kc), 0, 1.2), with the client's own
mean cosine on images of the class (m+) and on scraps (m-). r_kc = sqrt(d' / (1 + d')), d' = (m+ - m-) / s-, is how well
the class stands out from scraps whose cosines spread by s-: an expert that finds its class everywhere whispers. The
shares are v_kc ~ sqrt(n_kc), between a vote by size and one voice each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import torch
from pydantic import Field
from torch import Tensor

from flyby.data.dataset import Dataset
from flyby.errors import BadInput, unknown
from flyby.fusion.base import Fusion, FusionSettings, Server, labelled
from flyby.fusion.predictor import Predictor
from flyby.models import ModelSpec, Network
from flyby.models.cost import cost_of
from flyby.models.features import pieces_of
from flyby.models.heads import HEADS, cosine
from flyby.models.shelf import Shelf
from flyby.models.shifts import WAYS
from flyby.parcels.inbox import Inbox
from flyby.statistics.calibration import calibrated
from flyby.statistics.catalogue import EXTRAS
from flyby.statistics.extras import sent

WHISPER = 1e-3
TINY = 1e-12
Form = Literal["cosine", "softmax", "gate", "calibrated"]
# How sure scores usually are: shares are softmax(score / T), where no site measured T itself (docs/quality.md).
USUAL: dict[str, float] = {"cosine": 0.1, "softmax": 1 / 6, "gate": 1 / 3, "calibrated": 0.1}


class ExpertsPredictor(Predictor):
    """All networks kept. ``votes`` [K, C] are the shares v; ``calibration`` [K, R, C] each client's own statistics."""

    kind = "experts"
    streams = shows = True

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        class_names: Sequence[str],
        networks: Sequence[Network] | Shelf | None = None,
        *,
        form: str = "cosine",
        sharpness: float = 16.0,
        votes: Tensor | None = None,
        calibration: Tensor | None = None,
    ) -> None:
        if form not in get_args(Form):
            raise unknown("form of experts", form, get_args(Form))
        super().__init__(specs, class_names, networks, form=form, sharpness=sharpness)
        self.form, self.sharpness, self.temperature = form, sharpness, USUAL[form]
        shape = (len(self.specs), len(self.class_names))
        self.register_buffer("votes", torch.zeros(shape) if votes is None else votes)
        self.register_buffer("calibration", torch.zeros(shape[0], 3, shape[1]) if calibration is None else calibration)

    votes: Tensor
    calibration: Tensor

    def voice(self, k: int, network: Network, features: Tensor) -> Tensor:
        """cos(f_k(x), direction of class c at client k): [N, C]."""
        return cosine(network, features)

    def said(self, cosines: Tensor) -> Tensor:
        """What each client says of each class, [K, N, C], from its cosines."""
        held = (self.votes > 0)[:, None]
        if self.form == "cosine":
            return cosines
        if self.form == "softmax":
            return certainty(cosines, held, self.sharpness)
        if self.form == "gate":
            best = cosines.masked_fill(~held, -1.0).amax(2)
            return cosines * (self.sharpness * best).softmax(0)[:, :, None] * len(cosines)
        # Where every expert is silent the cosines decide, not class 0.
        return calibrated(cosines, self.calibration) + WHISPER * cosines

    def combine(self, voices: Sequence[Tensor], images: Tensor) -> Tensor:
        return self.unspoken_last(torch.einsum("kc,knc->nc", self.votes, self.said(torch.stack(tuple(voices)))))

    def unspoken_last(self, scores: Tensor, most: float = 1.0) -> Tensor:
        """A class nobody speaks for comes after all others, none of which is further than ``most`` from 0."""
        return scores.masked_fill(self.votes.sum(0) == 0, -max(float(len(self.votes)), most))


class ExpertsSettings(FusionSettings):
    sharpness: float = Field(16.0, gt=0, description="inverse temperature of the softmax and gate forms")
    power: float | None = Field(
        None, ge=0, description="v_kc ~ n_kc ** power; default 1, and .5 for experts-calibrated"
    )
    enough: float | None = Field(
        None,
        gt=0,
        description="v_kc ~ n_kc / (n_kc + enough N_c / K) in place of a power: more than a share adds little",
    )
    cap_counts: float | None = Field(
        None, gt=0, description="no client's counts add up to more than this many times the median client's"
    )
    validated: bool = Field(
        False, description="weigh each client's voice for a class by its F1 there on labelled --proxy images"
    )


class Experts(Fusion):
    name = "experts"
    paper = "flyby"
    about = "whoever has seen a class speaks for it, by the cosine to its prototype"
    needs = frozenset({"weights", "class_counts", "prototypes"})
    heterogeneous = True
    form: Form = "cosine"
    power = 1.0
    enough: float | None = None
    settings_type = ExpertsSettings
    settings: ExpertsSettings

    def combine(self, parcels: Inbox, server: Server) -> Predictor:
        networks, tables = parcels.networks(), []
        if "calibration" in self.needs:
            tables = [sent(item, EXTRAS["calibration"])["calibration"] for item in parcels]
        votes = self.votes(parcels, networks, server)
        say_cost(parcels, server)
        return ExpertsPredictor(
            [m.spec for m in parcels.manifests],
            parcels.class_names,
            networks,
            form=self.form,
            sharpness=self.settings.sharpness,
            votes=votes,
            calibration=torch.stack(tables) if tables else None,
        )

    def votes(self, parcels: Inbox, networks: Iterable[Network], server: Server) -> Tensor:
        """v [K, C], as the settings have it."""
        counts = (
            parcels.counts if self.settings.cap_counts is None else capped(parcels.counts, self.settings.cap_counts)
        )
        trust = self._validated(parcels, networks, server.proxy) if self.settings.validated else None
        power, enough = self.settings.power, self.settings.enough
        if power is None and enough is None:
            power, enough = self.power, self.enough
        return expert_votes(counts, 1.0 if power is None else power, trust, enough).float()

    def _validated(self, parcels: Inbox, networks: Iterable[Network], proxy: Dataset | None) -> Tensor:
        if proxy is None or len(proxy) == 0:
            raise BadInput(
                "fusion.validated needs images with labels that can be believed; give them with --proxy PATH"
            )
        judges = labelled(proxy, parcels)
        return torch.stack([f1_scores(network, judges.images, judges.labels) for network in networks])


def certainty(cosines: Tensor, held: Tensor, sharpness: float) -> Tensor:
    """softmax(sharpness cos) over the classes that each client holds. Not -inf for the others: a client that holds
    nothing (noisy counts can say so) has no vote, and must not be NaN either."""
    return (sharpness * cosines).masked_fill(~held, torch.finfo(cosines.dtype).min).softmax(2)


def expert_votes(counts: Tensor, power: float, trust: Tensor | None = None, enough: float | None = None) -> Tensor:
    """v_kc = n_kc^power / sum_k n_kc^power over the clients that hold c, or of n_kc / (n_kc + enough N_c / K) with the
    N_c images of a class, N_c / K a fair share of them; all 0 for a class nobody holds: nobody speaks for it.
    ``trust`` [K, C] is one more factor of every voice."""
    voices = counts**power if enough is None else counts / (counts + enough * counts.mean(0)).clamp_min(TINY)
    voices = torch.where(counts > 0, voices, 0.0)  # 0^0 is 1, but who holds nothing has no voice
    voices = voices if trust is None else voices * trust.to(voices)
    return voices / voices.sum(0, keepdim=True).clamp_min(torch.finfo(voices.dtype).tiny)


def say_cost(parcels: Inbox, server: Server) -> None:
    """Into the report, where some members look at every image in several ways: what one answer costs."""
    shifts = [HEADS[m.spec.head].shift for m in parcels.manifests]
    if not any(shifts):
        return
    ways = [WAYS if shift else 1 for shift in shifts]
    each = [cost_of(m.spec) for m in parcels.manifests]
    rows: list[list[object]] = [
        [m.sender, shift or "none", way, f"{way * cost.multiply_adds / 1e6:,.1f}"]
        for m, shift, way, cost in zip(parcels.manifests, shifts, ways, each, strict=True)
    ]
    total = sum(way * cost.multiply_adds for way, cost in zip(ways, each, strict=True)) / 1e6
    plain = sum(cost.multiply_adds for cost in each) / 1e6
    text = (
        f"An answer takes {sum(ways)} passes through {len(ways)} networks and {total:,.1f} million multiply-adds per"
        f" image, {total / plain:.1f} times those of one pass each."
    )
    columns = ["site", "shift", "passes per image", "million multiply-adds"]
    server.report.append({"title": "What an answer costs", "text": text, "table": {"columns": columns, "rows": rows}})


def capped(counts: Tensor, most: float) -> Tensor:
    """Counts [K, C] with every row scaled down to ``most`` times the median client's total at the most: while liars are
    fewer than half, that median is one that an honest client might have."""
    totals = counts.sum(1)
    return counts * (most * totals.quantile(0.5) / totals.clamp_min(1e-12)).clamp(max=1)[:, None]


@torch.no_grad()
def f1_scores(network: Network, images: Tensor, labels: Tensor) -> Tensor:
    """F1 of every class on labelled images: who never names a class, or names it everywhere, scores little. 1 for a
    class without images."""
    classes = network.spec.classes
    answers = torch.cat([network(network.spec.prepare(piece)).argmax(1) for piece in pieces_of(network, images)])
    right = torch.bincount(labels[answers == labels], minlength=classes)
    named, there = torch.bincount(answers, minlength=classes), torch.bincount(labels, minlength=classes)
    return torch.where(there > 0, 2 * right / (named + there).clamp_min(1), 1.0)


class ExpertsSoftmax(Experts):
    name = "experts-softmax"
    about = "experts on the softmax of their cosines over the classes they hold"
    form: Form = "softmax"


class ExpertsGate(Experts):
    name = "experts-gate"
    about = "experts weighed by how close their best class is"
    form: Form = "gate"


class ExpertsCalibrated(Experts):
    name = "experts-calibrated"
    about = "experts that know what they do not know: cosines calibrated at each site"
    needs = frozenset({"weights", "class_counts", "prototypes", "calibration"})
    form: Form = "calibrated"
    power = 0.5
