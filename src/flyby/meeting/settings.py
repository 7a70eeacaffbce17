"""Every number of FOL in typed values, with the paper's as defaults; the files that use a field say what it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from flyby.data.views import ViewSettings
from flyby.registry import Registry
from flyby.training.settings import PRECISION, Precision

Backend = Literal["auto", "vmap", "matmul", "loop"]


@dataclass(frozen=True)
class Variant:
    """A way to personalise: names of stages, in order. ``teacher``: it answers with the ensemble, and not with the
    student distilled from it. ``settings`` hold where the user says nothing else."""

    about: str
    stages: tuple[str, ...]
    teacher: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def chooses(self) -> bool:
        """Whether it compares models, for which a node must have validation images."""
        return "score" in self.stages


MEET = ("admit", "screen", "prescreen", "company")
ADAPT = ("finetune", "prune", "posttune", "shrink")
MERGE = ("score", "early_exit", "select", "weigh", "distill", "accept")
PLUS: Mapping[str, Any] = {
    **{"members": "all", "fit": "val", "prior": 10.0, "threshold": None},
    **{"temperature_squared": True, "label_loss": 0.3, "pool": 4},
}
VARIANTS: Registry[Variant] = Registry(
    "variant of FOL",
    {
        "fol": Variant(
            "no server: neighbours' models adapted, selected and distilled into the own one", (*MEET, *ADAPT, *MERGE)
        ),
        "fol-a": Variant("FOL, answering with the ensemble it distils", (*MEET, *ADAPT, *MERGE), teacher=True),
        "fol-n": Variant("FOL without adapting the neighbours' models", (*MEET, *MERGE)),
        "fol-an": Variant("FOL-A without adapting the neighbours' models", (*MEET, *MERGE), teacher=True),
        "fol-plus": Variant(
            "FOL with all neighbours in the teacher, and a student that asks it on views (ours)",
            (*MEET, *ADAPT, *MERGE),
            settings=PLUS,
        ),
        "fol-plus-a": Variant(
            "fol-plus, answering with the ensemble it distils", (*MEET, *ADAPT, *MERGE), teacher=True, settings=PLUS
        ),
        "gossip": Variant("no server: each node averages its model with those it met", ("admit", "company", "average")),
    },
    group="flyby.variants",
)


class OrientSettings(BaseModel):
    """How one node personalises its model from what it received; ``epochs`` bounds each of the four training stages."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    buffer: Annotated[int, Field(ge=1, description="Q: most neighbour models a node holds")] = 29
    top: Annotated[
        int,
        Field(
            ge=1, description="K: members of the ensemble; K - 1 adapted peers and the new self stay for the next round"
        ),
    ] = 10
    readapt: Annotated[bool, Field(description="adapt kept peers again in the next round")] = False

    epochs: Annotated[int, Field(ge=1, description="most epochs of each training stage")] = 200
    finetune_epochs: Annotated[int | None, Field(ge=0, description="default: epochs, as in the next three")] = None
    prune_epochs: Annotated[int | None, Field(ge=0, description="of learning which filters may go")] = None
    post_epochs: Annotated[int | None, Field(ge=0, description="of tuning what is left after pruning")] = None
    distill_epochs: Annotated[int | None, Field(ge=0, description="of distilling the ensemble into the own model")] = (
        None
    )
    distill_steps: Annotated[
        int, Field(ge=0, description="least steps of distillation: an epoch of a small node is several passes")
    ] = 0
    patience: Annotated[
        int, Field(ge=1, description="epochs without a better validation loss before a model stops")
    ] = 20
    lr: Annotated[float, Field(gt=0, description="learning rate of all stages")] = 0.001
    momentum: Annotated[float, Field(ge=0, lt=1, description="of sgd")] = 0.9
    weight_decay: Annotated[float, Field(ge=0, description="pull of all weights towards 0")] = 0.001
    batch: Annotated[int, Field(ge=2, description="images in a step")] = 32
    views: ViewSettings | None = Field(
        None, description="augmentation while neighbours are adapted; default: the site's own"
    )
    precision: Precision = Field("auto", description=PRECISION)

    lambda_p: Annotated[float, Field(ge=0, description="eq. 5: alignment")] = 0.1
    gamma_shared: Annotated[float, Field(ge=0, description="eq. 5: group lasso of shared layers")] = 0.05
    gamma_unshared: Annotated[float, Field(ge=0, description="eq. 5: group lasso of unshared layers")] = 0.02
    squared: Annotated[bool, Field(description="eq. 5 squares the alignment norm (the poster does not)")] = True
    reduction: Annotated[Literal["mean", "sum"], Field(description="mean over filters, or eq. 5's literal sum")] = (
        "mean"
    )
    joint: Annotated[bool, Field(description="eq. 5 over weights and gates; false: gates only")] = True
    threshold: Annotated[
        float | None,
        Field(ge=0, description="a filter goes under this share of its layer's median; null: no filter goes by that"),
    ] = 0.01
    prune_to: Annotated[
        float | None, Field(gt=0, le=1, description="the share of its parameters that a neighbour keeps, instead")
    ] = None
    prune_to_ms: Annotated[
        float | None, Field(gt=0, description="the milliseconds it may take for an image, measured here, instead")
    ] = None
    curve: Annotated[
        tuple[Annotated[float, Field(gt=0, le=1)], ...],
        Field(description="shares of parameters for which accuracy is measured beside, on validation images"),
    ] = ()

    members: Annotated[
        Literal["top", "all"], Field(description="who is in the ensemble: the K best on validation data, or everybody")
    ] = "top"
    weights: Literal["simplex", "unconstrained"] = Field(
        "simplex", description="whether eq. 11's weights are at least 0 and add up to 1, or any numbers"
    )
    fit: Annotated[Literal["train", "val"], Field(description="where eq. 11 is fitted")] = "train"
    prior: Annotated[
        float, Field(ge=0, description="images' worth of belief that all members weigh the same, in eq. 11")
    ] = 0.0
    teacher: Annotated[
        Literal["ensemble", "experts"],
        Field(
            description="how members are heard together: weighted by eq. 11, or as experts for the classes they hold"
        ),
    ] = "ensemble"
    early_exit: Annotated[
        bool, Field(description="keep the own model when no neighbour beats it on validation data")
    ] = False
    screen: Annotated[
        bool, Field(description="refuse a neighbour that knows no more than chance of the classes it claims")
    ] = True

    prescreen: Annotated[
        int | None, Field(ge=1, description="adapt only so many new neighbours: those of the least validation log-loss")
    ] = None
    accept: Annotated[
        float | None,
        Field(
            ge=0,
            description="the student replaces the own model only if its validation log-loss is lower by so many"
            " standard errors; null: always",
        ),
    ] = None
    seconds: Annotated[
        float | None, Field(gt=0, description="time for a round; what it does not reach is left out and named")
    ] = None

    joules: Annotated[
        float | None,
        Field(gt=0, description="energy for a round, at so many watts; the same as joules / watts seconds"),
    ] = None
    watts: Annotated[float | None, Field(gt=0, description="what the board draws at full work, for joules")] = None

    temperature: Annotated[float, Field(gt=0, description="eq. 12: T")] = 4.0
    temperature_squared: Annotated[bool, Field(description="multiply eq. 12's KL by T^2")] = False
    label_loss: Annotated[float, Field(ge=0, description="weight of the labels' cross-entropy beside eq. 12's KL")] = (
        0.0
    )
    pool: Annotated[
        int,
        Field(ge=0, le=64, description="views of each image, beside itself, on which the teacher is asked and heard"),
    ] = 0
    pool_views: Annotated[
        ViewSettings | None, Field(description="what the views of the pool are; default: as in fine-tuning, closer")
    ] = None
    mix: Annotated[
        bool, Field(description="blend every view of the pool with another image's: only the teacher can label these")
    ] = False
    anchor: Annotated[float, Field(ge=0, description="eq. 12: lambda, pull towards the model before distillation")] = (
        0.01
    )
    watch: Annotated[
        Literal["labels", "teacher"],
        Field(description="validation loss of distillation: eq. 12's KL to the teacher, or cross-entropy"),
    ] = "teacher"
    gossip: Annotated[Literal["uniform", "size"], Field(description="weights of the gossip average")] = "uniform"

    together: Annotated[
        bool, Field(description="adapt neighbours of one architecture in one step; false: one after another")
    ] = True
    stack: Annotated[int | None, Field(ge=1, description="most models in one step; default: all")] = None
    backend: Annotated[Backend, Field(description="how several models take one step")] = "auto"
    graph: Annotated[bool, Field(description="replay training steps as CUDA graphs, on a GPU")] = True
    diagnostics: Annotated[bool, Field(description="measure latency and the theorems' quantities")] = True

    @model_validator(mode="after")
    def _energy(self) -> OrientSettings:
        if self.joules is not None and self.watts is None:
            raise ValueError("joules need watts: what the board draws at full work")
        return self

    @property
    def time(self) -> float | None:
        """Seconds for a round: those that are set, or what the energy lasts for, whichever is less."""
        energy = None if self.joules is None or self.watts is None else self.joules / self.watts
        return min((t for t in (self.seconds, energy) if t is not None), default=None)

    @property
    def prunes(self) -> bool:
        return any(limit is not None for limit in (self.threshold, self.prune_to, self.prune_to_ms))

    def stage_epochs(self, stage: Literal["finetune", "prune", "post", "distill"]) -> int:
        own: int | None = getattr(self, f"{stage}_epochs")
        return self.epochs if own is None else own


def _names(value: object) -> object:
    """Node numbers may be written as numbers, and one alone without a list."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return tuple(str(part) for part in (value if isinstance(value, list | tuple) else [value]))


Names = Annotated[tuple[str, ...], BeforeValidator(_names)]


class FleetSettings(OrientSettings):
    """A whole population: what one node does, and who meets whom."""

    rounds: Annotated[int, Field(ge=1, le=1000, description="E: collection rounds")] = 3
    sends: Annotated[Literal["pretrained", "current"], Field(description="what a neighbour sends when it is met")] = (
        "pretrained"
    )
    eval_nodes: Annotated[
        Names,
        Field(
            description="nodes that are personalised and judged: numbers, names, or quantiles:N by size; default: all"
        ),
    ] = ()
    judge_images: Annotated[
        int | None, Field(ge=2000, description="most common images that judge a node; default: all")
    ] = None
    fleet: Annotated[Names, Field(description="architectures, dealt to the nodes in turn; default: one for all")] = ()
    meetings: Annotated[str | None, Field(description="a saved meeting schedule to replay")] = None


def stage_defaults(size: tuple[int, int], variant: str = "fol") -> tuple[dict[str, Any], dict[str, Any]]:
    """(pretraining, adaptation) settings of a variant for images of a size where the user names none: the paper's for
    satellites, for CIFAR-like images, and ones found to work for tiny ones, which the paper has none of. The paper's
    Figure 1 shows at least 1,800 steps of distillation, whatever the node's size."""
    common = {"momentum": 0.9, "weight_decay": 0.001}
    if min(size) < 24:
        train = {"lr": 0.05, "batch": 32, "epochs": 100}
        stages = {"epochs": 20, "distill_epochs": 60, "distill_steps": 600}
    elif min(size) < 48:
        train, stages = {"lr": 0.01, "batch": 128, "epochs": 300}, {"epochs": 300, "distill_steps": 1800}
    else:
        train, stages = {"lr": 0.001, "batch": 32, "epochs": 200}, {"epochs": 200, "distill_steps": 1800}
    shared = {**common, "lr": train["lr"], "batch": train["batch"], **VARIANTS[variant].settings}
    if shared.get("pool") and min(size) >= 24:
        shared["pool"] = 16  # chosen on Hurricane, another seed; tiny images have too few views for so many
    return {**train, **common, "patience": 20, "schedule": "constant"}, {**shared, **stages}
