"""How a site trains, as one typed value."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from flyby.training.privacy import PrivacySettings

Counts = Literal["exact", "noisy", "binary"]
Portion = Annotated[float, Field(gt=0, le=1)]
# YAML reads a bare ``off`` as False.
Compile = Annotated[Literal["auto", "off", "graph", "full"], BeforeValidator(lambda v: "off" if v is False else v)]
Precision = Literal["auto", "fp32", "bf16"]
PRECISION = "of the arithmetic; auto: bf16 on a GPU, and for large networks on a CPU that has it"


class TrainSettings(PrivacySettings):
    """How to train. ``batch: null`` takes the objective's own batch, halved while a site would make fewer than four
    steps an epoch."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    later = frozenset({"init", "ema", "muon_lr", "lr_batch", "warmup", "resolution", "one_view"})

    epochs: int = Field(20, ge=0, le=100_000, description="0 only for objectives that train nothing")
    batch: int | None = Field(
        None, ge=1, description="images in a step; default: the objective's own, fewer at small sites"
    )
    optimizer: Literal["sgd", "adam", "adamw", "muon"] = Field(
        "sgd", description="muon: for matrices and filters, at muon_lr; sgd at lr for the rest"
    )
    lr: float = Field(0.05, gt=0, description="learning rate")
    muon_lr: float = Field(0.02, gt=0, description="learning rate of muon's matrices and filters")
    lr_batch: int | None = Field(
        None, ge=1, description="the batch that lr is meant for: others scale it in proportion"
    )
    warmup: float = Field(
        0.0, ge=0, lt=1, description="share of the epochs in which the learning rate rises to its full"
    )
    ema: float = Field(
        0.0, ge=0, lt=1, description="decay of a moving mean of the weights, which is what is sent; 0: off"
    )
    resolution: tuple[Portion, ...] = Field(
        (), description="shares of the images' side in equal phases of the epochs, such as [0.5, 0.75, 1]; empty: whole"
    )
    one_view: float = Field(1.0, gt=0, le=1, description="share of the epochs after which images get one view only")
    momentum: float = Field(0.9, ge=0, lt=1, description="of sgd and muon")
    weight_decay: float = Field(5e-4, ge=0, description="pull of all weights towards 0")
    schedule: Literal["constant", "cosine", "step"] = Field("cosine", description="how the learning rate falls")
    milestones: tuple[float, ...] = Field((0.5, 0.75), description="shares of the epochs at which schedule: step falls")
    gamma: float = Field(0.1, gt=0, description="factor at each milestone of schedule: step")
    clip: float | None = Field(None, gt=0, description="largest gradient norm")
    init: Literal["shared", "own"] = Field(
        "shared", description="whether all sites start from the same random weights, or each from its own"
    )
    patience: int | None = Field(None, ge=1, description="epochs without a better validation loss before stopping")
    precision: Precision = Field("auto", description=PRECISION)
    compile: Compile = Field(
        "auto",
        description="on a GPU: replay the step as a CUDA graph (graph), compile the network too (full), or none (off)",
    )
    snapshots: int = Field(0, ge=0, description="keep the weights of every n-th epoch for offline study; never sent")

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.ema and self.patience is not None:
            raise ValueError("a mean of weights (ema) has no best epoch (patience); leave one of them out")
        return self


class Phase(NamedTuple):
    """What stays alike over some epochs, so that a recorded step serves them all: the side of the images, and how many
    views of each."""

    size: tuple[int, int]
    views: int


def phase_of(settings: TrainSettings, size: tuple[int, int], views: int, epoch: int) -> Phase:
    """The phase of the epoch that follows ``epoch`` finished ones, for images of this size."""
    done, shares = epoch / settings.epochs, settings.resolution or (1.0,)
    share = shares[min(int(done * len(shares) + 1e-9), len(shares) - 1)]
    sides = tuple(side if share == 1 else min(side, max(4, round(side * share / 4) * 4)) for side in size)
    return Phase((sides[0], sides[1]), views if done < settings.one_view else 1)


def batch_size(settings: TrainSettings, preferred: int, samples: int) -> int:
    """The batch asked for, or the objective's own, halved (to 16 at the least) while a site would make fewer than four
    steps an epoch."""
    if settings.batch is not None:
        return settings.batch
    batch = preferred
    while batch > 16 and samples < 4 * batch:
        batch //= 2
    return batch
