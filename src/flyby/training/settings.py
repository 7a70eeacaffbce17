"""How a site trains, as one typed value."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from flyby.training.privacy import PrivacySettings

Counts = Literal["exact", "noisy", "binary"]


class TrainSettings(PrivacySettings):
    """How to train. ``batch: null`` takes the objective's own batch, halved while a site would make fewer than four
    steps an epoch."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    later = frozenset({"init"})

    epochs: int = Field(20, ge=0, le=100_000, description="0 only for objectives that train nothing")
    batch: int | None = Field(None, ge=1)
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = Field(0.05, gt=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    weight_decay: float = Field(5e-4, ge=0)
    schedule: Literal["constant", "cosine", "step"] = "cosine"
    milestones: tuple[float, ...] = (0.5, 0.75)
    gamma: float = Field(0.1, gt=0, description="factor at each milestone of schedule: step")
    clip: float | None = Field(None, gt=0, description="largest gradient norm")
    init: Literal["shared", "own"] = Field(
        "shared", description="whether all sites start from the same random weights, or each from its own"
    )
    patience: int | None = Field(None, ge=1, description="epochs without a better validation loss before stopping")
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    # YAML reads a bare ``off`` as False.
    compile: Annotated[
        Literal["auto", "off", "graph", "full"], BeforeValidator(lambda v: "off" if v is False else v)
    ] = Field(
        "auto",
        description="on a GPU: replay the step as a CUDA graph (graph), compile the network too (full), or none (off)",
    )
    snapshots: int = Field(0, ge=0, description="keep the weights of every n-th epoch for offline study; never sent")


def batch_size(settings: TrainSettings, preferred: int, samples: int) -> int:
    """The batch asked for, or the objective's own, halved (to 16 at the least) while a site would make fewer than four
    steps an epoch."""
    if settings.batch is not None:
        return settings.batch
    batch = preferred
    while batch > 16 and samples < 4 * batch:
        batch //= 2
    return batch
