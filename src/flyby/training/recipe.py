"""The noun ``Recipe``: all that decides an upload, resolved and typed. It travels whole to every process and
machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, ValidationInfo, field_validator, model_validator

from flyby.data.views import ViewSettings
from flyby.errors import BadInput
from flyby.files import digest
from flyby.models import ModelSpec
from flyby.objectives import OBJECTIVES, Objective, ObjectiveSettings
from flyby.settings import build
from flyby.statistics.catalogue import EXTRAS, named
from flyby.training.privacy import check_privacy
from flyby.training.settings import Counts, TrainSettings


def check_epochs(objective: type[Objective], epochs: int) -> None:
    """Refuse a training of no epochs, and epochs where nothing is trained."""
    if objective.trains and epochs == 0:
        raise BadInput(f"train.epochs = 0 will not do: {objective.name} trains, so give it at least 1")
    if not objective.trains and epochs:
        raise BadInput(f"{objective.name} trains nothing; its recipe has train.epochs = 0")


def check_counts(send: Sequence[str], counts: Counts, private: bool = False) -> None:
    """Refuse a statistic that tells exactly what the site asked to blur; ``private`` ones do not."""
    telling = [name for name, _ in map(named, send) if name in EXTRAS and EXTRAS[name].counts]
    if counts != "exact" and telling and not private:
        raise BadInput(
            f"{telling[0]} tells exact class counts, and counts = {counts} was asked for; leave it out of"
            " objective.send, or set counts=exact"
        )


class Recipe(BaseModel):
    """All that decides a site's upload: two sites or two runs with equal recipes and equal data send equal bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    spec: ModelSpec
    objective: str
    objective_settings: SerializeAsAny[ObjectiveSettings]
    train: TrainSettings
    views: ViewSettings
    seed: int
    codec: str = "fp32"
    counts: Counts = Field("exact", description="what a site tells about its classes: exact, noisy or binary counts")
    epsilon: float = Field(1.0, gt=0, description="how exact noisy counts are")

    @field_validator("objective_settings", mode="before")
    @classmethod
    def _typed(cls, value: Any, info: ValidationInfo) -> Any:
        """JSON comes back as the settings of the named objective."""
        kind = OBJECTIVES[info.data["objective"]]
        return build(kind.settings_type, value, "objective") if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _private(self) -> Self:
        check_privacy(
            self.spec, OBJECTIVES[self.objective], self.objective_settings, self.train, self.views, self.counts
        )
        return self

    @model_validator(mode="after")
    def _trained(self) -> Self:
        """Zero epochs and an objective that trains nothing belong together."""
        check_epochs(OBJECTIVES[self.objective], self.train.epochs)
        return self

    @model_validator(mode="after")
    def _blurred(self) -> Self:
        check_counts(self.objective_settings.send, self.counts, private=self.train.dp_epsilon is not None)
        return self

    def make_objective(self) -> Objective:
        """The local loss, with its settings."""
        return OBJECTIVES[self.objective](self.objective_settings)

    def key(self, origin: str) -> str:
        """The name of an upload: this recipe over the data that ``origin`` names."""
        return digest({"recipe": self.model_dump(mode="json"), "split": origin})
