"""IntactOFL [Zeng et al., ACM MM 2024]: the clients' models stay whole as experts, and only a linear gate on the pixels
is trained.

h = x W^T + b; g = softmax of h over its k largest entries, 0 elsewhere; scores = sum_k g_k(x) f_k(x). The gate learns
on DENSE-style images by CE(scores, y) + .01 std(g over all images and experts) + T^2 KL at T = 4 to the plain ensemble,
on inputs moved as in Co-Boosting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from flyby.fusion.base import FusionSettings
from flyby.fusion.distilled.coboosting import PushSettings, pushed
from flyby.fusion.distilled.dense import Dense
from flyby.fusion.distilled.distill import Learner
from flyby.fusion.distilled.teachers import Teachers, held_by, mix, normalise
from flyby.fusion.predictor import Predictor
from flyby.models import ModelSpec, Network
from flyby.models.heads import uniform_fan_in
from flyby.objectives.kd import softened_kl
from flyby.parcels.inbox import Inbox
from flyby.rng import generator


class IntactOFLSettings(PushSettings):
    student: Literal[None] = Field(None, description="there is none: the experts stay")
    lr: float = Field(0.01, gt=0)
    weight_decay: float = Field(1e-4, ge=0)
    schedule: Literal["constant", "cosine", "one-cycle"] = "cosine"
    clip: float | None = Field(10.0, gt=0)
    temperature: float = Field(4.0, gt=0)
    top: int | None = Field(None, ge=1, description="experts that answer for an image; all where not given")
    balance: float = Field(0.01, ge=0, description="weight of the spread of a batch's gate weights")
    kd: float = Field(1.0, ge=0, description="weight of the distillation term")


def gate_weights(h: Tensor, top: int) -> Tensor:
    """The softmax of each row's ``top`` largest entries, at their places; 0 elsewhere."""
    values, places = h.topk(top, dim=1)
    return torch.zeros_like(h).scatter(1, places, values.softmax(1))


class ExpertGate(Learner):
    """The gate alone is trained; the experts' logits come from outside."""

    def __init__(
        self, spec: ModelSpec, clients: int, top: int, rng: torch.Generator, held: Tensor | None = None
    ) -> None:
        super().__init__()
        self.spec, self.top = spec, top
        self.register_buffer("held", held, persistent=False)
        self.linear = nn.utils.skip_init(nn.Linear, spec.channels * spec.size[0] * spec.size[1], clients)  # type: ignore[no-untyped-call]
        uniform_fan_in(self.linear, rng)

    held: Tensor | None

    def weights(self, x: Tensor) -> Tensor:
        return gate_weights(self.linear(normalise(x, self.spec).flatten(1)).float(), self.top)

    def scores(self, x: Tensor, said: Tensor) -> Tensor:
        return self.mixed(self.weights(x), said[:, :, : self.spec.classes])

    def mixed(self, gates: Tensor, said: Tensor) -> Tensor:
        return mix(gates, said, self.held)


class GatedPredictor(Predictor):
    """All networks kept, mixed image by image: sum_k g_k(x) f_k(x)."""

    kind = "gated"

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        class_names: Sequence[str],
        networks: Sequence[Network] | None = None,
        *,
        top: int = 1,
        held: Tensor | None = None,
    ) -> None:
        super().__init__(specs, class_names, networks, top=top)
        self.hold(held)
        self.gate = nn.utils.skip_init(nn.Linear, self.channels * self.size[0] * self.size[1], len(self.specs))  # type: ignore[no-untyped-call]
        self.top = top

    def combine(self, voices: Sequence[Tensor], images: Tensor) -> Tensor:
        weights = gate_weights(self.gate(self.specs[0].prepare(images).flatten(1)).float(), self.top)
        return mix(weights, torch.stack(tuple(voices)), self.held)


class IntactOFL(Dense):
    """A gate over whole client models, trained without data."""

    name = "intactofl"
    paper = "IntactOFL: Zeng et al., ACM MM 2024"
    about = "all client models kept as experts under a gate trained on synthetic images"
    settings_type: ClassVar[type[FusionSettings]] = IntactOFLSettings
    settings: IntactOFLSettings

    def __init__(self, settings: FusionSettings | None = None) -> None:
        super().__init__(settings)
        self.softmax = True  # whoever teaches, the gate weighs members' logits

    def learner(self, parcels: Inbox, seed: int) -> Learner:
        clients = len(parcels)
        top = min(self.settings.top or clients, clients)
        spec, rng = parcels.manifests[0].spec, generator(seed, "server", "gate")
        return ExpertGate(spec, clients, top, rng, held_by(parcels, "cpu"))

    def predictor(self, parcels: Inbox, learner: Learner) -> Predictor:
        assert isinstance(learner, ExpertGate)
        networks = [item.network() for item in parcels]
        specs, held = [m.spec for m in parcels.manifests], parcels.held
        made = GatedPredictor(specs, parcels.class_names, networks, top=learner.top, held=held)
        made.gate.load_state_dict(learner.linear.state_dict())
        return made

    def inputs(
        self, images: Tensor, said: Tensor, weights: Tensor, teachers: Teachers, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        return pushed(images, weights, teachers, rng, self.settings)

    def loss(self, learner: Learner, x: Tensor, said: Tensor, told: Tensor, labels: Tensor) -> Tensor:
        assert isinstance(learner, ExpertGate)
        s, gates = self.settings, learner.weights(x)
        scores = learner.mixed(gates, said[:, :, : told.shape[1]])
        apart = s.temperature**2 * softened_kl(scores, told, s.temperature).mean()
        return F.cross_entropy(scores, labels) + s.balance * gates.std(correction=0) + s.kd * apart
