"""Shifts at a site: every image is shown in one of four ways r (quarter turns, or another ``shift``), the same for all
of its views, and a loss learns the 4 C labels r C + y. A site of one class then has something to tell apart.

Turns mean nothing where images have no up (aerial ones, cells). So a site first asks a small network whether the four
ways can be told apart on images of its own that it did not learn from; where that stays near 1/4, it trains as without
a shift and says so. It does the same where it holds many classes: telling them apart is work enough, and the joint task
was seen to lose there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from flyby.data.site import Site
from flyby.errors import BadInput
from flyby.models import ModelSpec, Network
from flyby.models.optimisers import Adam
from flyby.models.shifts import WAYS, shifted, spread, ways_of
from flyby.objectives.base import Batch, Objective, ObjectiveSettings
from flyby.rng import generator

log = logging.getLogger(__name__)
CHANCE = 1 / WAYS
LEAST = 0.32  # of held-out images that must be told right: chance is 1/4
SURE = 2.0  # standard errors above chance, where so few images are held out that LEAST could be luck
STEPS, BATCH, SIDE, LEARN, JUDGE = 120, 64, 16, 2000, 400  # of the small network and its images


class ShiftSettings(ObjectiveSettings):
    shift: Literal["turns", "patches", "colour", "none"] = Field(
        "turns", description="the four ways in which images are shown; none: as they are"
    )
    test: bool = Field(
        True, description="ask first whether the ways can be told apart at this site, and else show none"
    )
    most_classes: int = Field(10, ge=1, description="a site that holds more classes shows no ways")
    tries: int = Field(1, ge=1, le=100, description="how often that test learns on before its answer is no")

    later = frozenset({"tries"})


class Found(NamedTuple):
    """What a site decided: the shift, why it is not the one asked for, and how well the ways were told apart (None
    where nobody looked)."""

    shift: str
    why: str = ""
    accuracy: float | None = None


class Shifting(Objective):
    """A local loss on (class, way). Its network has the head named as the shift; where the site shows no ways, that of
    the objective itself."""

    settings: ShiftSettings
    found: Found | None = None

    @classmethod
    def suited(cls, spec: ModelSpec) -> dict[str, Any]:
        """What a backbone knows of shifts it has learned elsewhere."""
        return super().suited(spec) | ({} if spec.backbone is None else {"shift": "none"})

    def fitted(self, spec: ModelSpec, site: Site, seed: int) -> ModelSpec:
        self.found = self.decided(spec, site, seed)
        if self.found.why:
            log.info("%s shows no %s: %s", site.id, self.settings.shift, self.found.why)
        if self.found.shift == "none" and spec.classes == 1:
            raise BadInput(
                f"{site.id} has one class and shows it in no other way ({self.found.why or 'objective.shift=none'}), so"
                " there is nothing to learn; give the classes of all sites with --classes LIST, or use --method ridge"
            )
        return spec if self.found.shift != "none" else spec.replace(head=self.head)

    def decided(self, spec: ModelSpec, site: Site, seed: int) -> Found:
        shift, held = self.settings.shift, sum(n > 0 for n in site.counts)
        if shift == "none":
            return Found("none")
        if held > self.settings.most_classes:
            return Found("none", f"it holds {held} classes, more than most_classes = {self.settings.most_classes}")
        if not self.settings.test:
            return Found(shift)
        for accuracy, judged in told_apart(spec, site, shift, seed, self.settings.tries):
            if accuracy >= (least := asked_for(judged)):
                break
        else:
            why = f"they were told right in {accuracy:.0%} of {judged} held-out images, and {least:.0%} are asked for"
            return Found("none", why, accuracy)
        return Found(shift, "", accuracy)

    @staticmethod
    def in_ways(model: Network, batch: Batch) -> Batch:
        """The batch as the network's head has it: its images shown in the ways of the shift, with labels r C + y."""
        shift = model.head.shift
        if not shift:
            return batch
        labels = ways_of(len(batch.labels), batch.views, batch.labels.device) * model.spec.classes + batch.labels
        return Batch(spread(batch.images, shift, batch.views), labels, batch.views)

    def extras(self, model: Network, site: Site, seed: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, facts = super().extras(model, site, seed)
        if "shift" in self.settings.silent():
            return tensors, facts
        found = self.found or Found(model.head.shift or "none")
        told = {} if found.accuracy is None else {"shift_accuracy": round(found.accuracy, 3)}
        return tensors, facts | {"shift": found.shift, **told}


def asked_for(judged: int) -> float:
    """The share that must be told right of so many images."""
    return max(LEAST, CHANCE + SURE * math.sqrt(CHANCE * (1 - CHANCE) / max(1, judged)))


def told_apart(spec: ModelSpec, site: Site, shift: str, seed: int, tries: int = 1) -> Iterator[tuple[float, int]]:
    """How often a small network, trained for a moment on four fifths of the site's images, tells the way in which the
    others are shown, and how many those are; then after another moment, and so on. On the CPU, so that a training that
    goes on decides as before."""
    rng = generator(seed, site.id, "bearings")
    order = torch.randperm(len(site.train), generator=rng).to(site.train.images.device)
    judged = min(JUDGE, len(order) // 5)
    if judged == 0:
        yield 0.0, 0
        return
    images = spec.prepare(site.train.images[order[: judged + LEARN]]).cpu()
    size = min(spec.size[0], SIDE), min(spec.size[1], SIDE)
    images = F.adaptive_avg_pool2d(images, size)
    small = ModelSpec(name="cnn-small", classes=WAYS, channels=spec.channels, size=size, width=0.5)
    network = small.build(rng)
    optimizer = Adam(network.parameters(), lr=3e-3)
    learn, judge = images[judged:], images[:judged]
    for _ in range(tries):
        network.train()
        for _ in range(STEPS):
            rows = torch.randint(len(learn), (BATCH,), generator=rng)
            loss = F.cross_entropy(network(spread(learn[rows], shift, 1)), ways_of(BATCH, 1, rows.device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        network.eval()
        with torch.no_grad():
            right = [(network(shifted(judge, shift, way)).argmax(1) == way).double().mean() for way in range(WAYS)]
        yield float(torch.stack(right).mean()), judged
