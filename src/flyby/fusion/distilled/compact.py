"""``compact``, flyby's own: any rule's predictor as one network of the clients' architecture, the one to deploy.

An ensemble of K networks is K times as large and slow as one. Here its answers are distilled into one, on unlabelled
proxy images where the server has some, on images made from the networks alone as DENSE makes them, or on both. On proxy
images the student sees what the teacher sees, always: every pass shows new shifts, mirror images and blends of two, and
the teacher is asked about each of them ("patient and consistent", Beyer et al., CVPR 2022). KL(softmax(b t) ||
softmax(s)), with b >= 1 so that the teacher is sure enough; SGD with momentum, one cycle of the learning rate. The
student starts at the largest client's backbone with a fresh linear head.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from flyby.data.dataset import Dataset
from flyby.errors import BadInput
from flyby.fusion.base import FusionSettings, Server
from flyby.fusion.distilled.dense import Dense, DenseSettings
from flyby.fusion.distilled.distill import Learner, Student, student_spec
from flyby.fusion.distilled.feddf import add_proxy
from flyby.fusion.distilled.synthesis import Pool, as_unit
from flyby.fusion.distilled.teachers import TeacherName, Teachers
from flyby.fusion.distilled.views import blend
from flyby.fusion.ensembles.experts import ExpertsCalibrated
from flyby.fusion.predictor import Predictor
from flyby.models import Network
from flyby.parcels.inbox import Inbox
from flyby.rng import generator

LOOK = 1024  # images on which a teacher's confidence is measured


class CompactSettings(DenseSettings):
    teacher: TeacherName = Field(ExpertsCalibrated.name, description="the rule to be made one network of")
    source: Literal["auto", "synthetic", "proxy", "both"] = Field(
        "auto",
        description="what it learns on; auto: proxy images where there are some, synthetic ones where there are none",
    )
    start: Literal["largest", "fresh"] = Field(
        "largest", description="where the student starts: the backbone of the client with most images, or afresh"
    )
    confidence: float | None = Field(
        0.95,
        gt=0,
        lt=1,
        description="a teacher less sure is sharpened until its mean largest chance is this; null leaves it as it is",
    )
    blends: float = Field(0.5, ge=0, le=1, description="share of a batch that is blended with other images")
    epochs: int = Field(200, ge=1, le=100_000)
    batch: int = Field(128, ge=2)
    lr: float = Field(0.05, gt=0)
    weight_decay: float = Field(5e-4, ge=0)
    schedule: Literal["constant", "cosine", "one-cycle"] = "one-cycle"
    clip: float | None = Field(10.0, gt=0)
    temperature: float = Field(1.0, gt=0)


class Compact(Dense):
    """One network that answers as an ensemble does."""

    name = "compact"
    edition = 2
    paper = "flyby"
    about = "any rule's ensemble distilled into one network, on proxy images (--proxy PATH) or synthetic ones"
    needs = ExpertsCalibrated.needs  # its teacher's, where no other is named
    settings_type: ClassVar[type[FusionSettings]] = CompactSettings
    settings: CompactSettings
    sharpness: float = 1.0  # what the teacher's log-chances are multiplied by
    looked: Pool | None = None

    def combine(self, parcels: Inbox, server: Server) -> Predictor:
        source, given = self.settings.source, server.proxy is not None and len(server.proxy) > 0
        if source in ("proxy", "both") and not given:
            raise BadInput(
                f"fusion.source={source} needs unlabelled images; name some with --proxy PATH (flyby run: --set"
                " proxy=PATH), or set fusion.source=synthetic"
            )
        self.synthetic = source in ("synthetic", "both") or not given
        self.sharpness, self.looked = 1.0, None
        return super().combine(parcels, server)

    def learner(self, parcels: Inbox, seed: int) -> Learner:
        spec = student_spec(parcels, self.settings.student).replace(head="linear", logit_scale=False)
        network = spec.build(generator(seed, "server", "student"))
        if self.settings.start == "largest":
            inherit(network, parcels)
        return Student(network)

    def pool(self, teachers: Teachers, proxy: Dataset | None) -> Pool:
        pool = Pool(teachers.specs[0], len(teachers), teachers.device, kept=self.synthetic)
        if self.settings.source == "both" or not self.synthetic:
            add_proxy(pool, teachers, proxy, self.name, asked=self.synthetic)
        return pool

    def grow(self, pool: Pool, teachers: Teachers, learner: Learner, seed: int, epoch: int) -> dict[str, float]:
        noted = super().grow(pool, teachers, learner, seed, epoch) if self.synthetic else {}
        if self.settings.confidence is not None and self.looked is not pool:
            # From images that an interrupted fusion would find again at the same places.
            first = pool.images[: self.settings.images] if self.synthetic else pool.images[:: -(-len(pool) // LOOK)]
            told = teachers.answer(pool.weights, teachers.say(as_unit(first)))
            self.sharpness, self.looked = sharpness(told, self.settings.confidence), pool
        return noted

    def inputs(
        self, images: Tensor, said: Tensor, weights: Tensor, teachers: Teachers, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        x = teachers.view(as_unit(images), rng) if self.settings.augment else as_unit(images)
        x = blend(x, self.settings.blends, rng)
        return x, teachers.say(x)

    def loss(self, learner: Learner, x: Tensor, said: Tensor, told: Tensor, labels: Tensor) -> Tensor:
        return super().loss(learner, x, said, self.sharpness * told, labels)


def sharpness(told: Tensor, confidence: float, most: float = 64.0) -> float:
    """The least b >= 1 for which the mean over images of max softmax(b t) reaches ``confidence``: an expert's chances
    say who is right more than how surely, and a student learns faster from the former."""
    low, high = 1.0, most
    for _ in range(30):
        middle = (low + high) / 2
        reached = float((middle * told).softmax(1).amax(1).mean()) >= confidence
        low, high = (low, middle) if reached else (middle, high)
    return high if float(told.softmax(1).amax(1).mean()) < confidence else 1.0


def inherit(network: Network, parcels: Inbox) -> None:
    """Give the network the backbone of the client with most images among those of its architecture; its head stays."""
    alike = [
        (m.samples, -k)
        for k, m in enumerate(parcels.manifests)
        if m.spec.replace(head=network.spec.head, logit_scale=False, partial=False) == network.spec
    ]
    if alike:
        theirs = parcels.read(-max(alike)[1]).network().state_dict()
        mine = network.state_dict()
        network.load_state_dict(mine | {name: t for name, t in theirs.items() if not name.startswith("head.")})
