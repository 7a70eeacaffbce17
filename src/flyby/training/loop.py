"""``train_site``: the one training loop. It knows nothing of any method: the objective brings the loss.

Everything random asks for its generator by (seed, site, stage, epoch), so a resumed run needs only the weights, the
optimiser, the objective's buffers and the epoch number to give the same bytes as one that was never interrupted. Inside
an epoch nothing waits for the device. Batches all have one shape: the last one of an epoch is filled up from the
epoch's own first samples, so a site smaller than a batch trains, and nothing is dropped.
"""

from __future__ import annotations

import functools
import math
import secrets
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from pydantic import BeforeValidator, ConfigDict, Field
from torch import Tensor, nn

from flyby import __version__
from flyby.data.site import Part, Site
from flyby.data.views import ViewSettings, augment
from flyby.errors import BadInput, Diverged
from flyby.files import digest
from flyby.models import ModelSpec, Network
from flyby.objectives.base import Batch, Objective
from flyby.parcels import parcel
from flyby.rng import generator, legacy_numpy, seed_of
from flyby.training import graphs
from flyby.training.checkpoint import TrainingState
from flyby.training.graphs import Captured, one_shape
from flyby.training.privacy import PrivacySettings, PrivateTraining, check_privacy

P = ParamSpec("P")
Result = TypeVar("Result")
Work = Generator[int, None, Result]
Row = dict[str, Any]
Counts = Literal["exact", "noisy", "binary"]
WORTH_COMPILING = 4_000_000
CHECKPOINT_SECONDS, CHECKPOINT_SHARE = (
    5.0,
    50.0,
)  # seconds between checkpoints, and how many times what the last one cost


class TrainSettings(PrivacySettings):
    """How to train. ``batch: null`` takes the objective's own batch, halved while a site would make fewer than four
    steps an epoch."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    epochs: int = Field(20, ge=1, le=100_000)
    batch: int | None = Field(None, ge=1)
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = Field(0.05, gt=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    weight_decay: float = Field(5e-4, ge=0)
    schedule: Literal["constant", "cosine", "step"] = "cosine"
    milestones: tuple[float, ...] = (0.5, 0.75)
    gamma: float = Field(0.1, gt=0, description="factor at each milestone of schedule: step")
    clip: float | None = Field(None, gt=0, description="largest gradient norm")
    patience: int | None = Field(None, ge=1, description="epochs without a better validation loss before stopping")
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    # YAML reads a bare ``off`` as False.
    compile: Annotated[
        Literal["auto", "off", "graph", "full"], BeforeValidator(lambda v: "off" if v is False else v)
    ] = Field(
        "auto",
        description=(
            "on a GPU: replay the step as a CUDA graph (graph), compile the network too (full), or neither (off)"
        ),
    )
    snapshots: int = Field(0, ge=0, description="keep the weights of every n-th epoch for offline study; never sent")


@dataclass(frozen=True)
class Trained:
    """A finished site: what it will send, and what happened while it trained."""

    parcel: parcel.Parcel
    rows: list[Row]
    seconds: float


def training(
    site: Site,
    spec: ModelSpec,
    objective: Objective,
    settings: TrainSettings,
    views: ViewSettings,
    seed: int,
    *,
    method: str = "",
    codec: str = "fp32",
    counts: Counts = "exact",
    epsilon: float = 1.0,
    simulated: bool = True,
    device: torch.device | str = "cpu",
    folder: Path | None = None,
    on_epoch: Callable[[Row], None] | None = None,
    provenance: dict[str, Any] | None = None,
) -> Work[Trained]:
    """Train ``spec`` on one site's data under ``objective`` and wrap the result as a Parcel.

    The initial weights depend on the seed alone: all sites start from one point. A real site (``simulated`` False)
    draws the noise of noisy counts from the operating system. With ``folder`` the state is checkpointed there and a
    later call goes on from it.

    It pauses where the steps of an epoch are on their way to the device, and says how many samples they take: another
    site's can be sent after them. ``train_site`` is the same without pauses.
    """
    device = torch.device(device)
    _check(site, spec, settings)
    check_privacy(spec, objective.name, objective.settings, settings, views, counts)
    model = spec.build(generator(seed, "shared", "init")).to(device)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if fully_compiled(settings, spec, device, len(site.train) * views.views * settings.epochs):
        model.backbone.compile(dynamic=False)
    objective.to(device)
    objective.prepare(model, site, seed)
    optimizer = make_optimizer(model, objective, settings)
    train, val = site.train.to(device), site.val.to(device)
    batch = batch_size(settings, objective.batch, len(train))
    mean, std = spec.statistics(device)
    identity = digest(
        [
            spec.model_dump(mode="json"),
            objective.name,
            objective.settings.model_dump(mode="json"),
            settings.model_dump(mode="json"),
            seed,
        ]
    )
    state = TrainingState(folder / f"{site.id}.ckpt" if folder else None, identity, model, optimizer, objective)
    state.restore()
    private = None
    if settings.dp_epsilon is not None:
        private = PrivateTraining(
            settings, views, settings.epochs, len(train), batch, site.id, seed if simulated else None, epsilon
        )

    def pack(epoch: int) -> parcel.Parcel:
        """The network as it stands, as this site would send it."""
        with torch.compiler.set_stance(
            "force_eager"
        ):  # a compiled backbone serves training; other batch shapes are not worth a compilation
            extras, meta = objective.extras(model.eval(), site, seed)
        return parcel.make(
            sender=site.id,
            method=method or objective.name,
            spec=spec,
            class_names=site.class_names,
            samples=len(site.train),
            codec=codec,
            weights={name: t.detach().cpu() for name, t in model.state_dict().items()},
            extras={name: t.detach().cpu() for name, t in extras.items()},
            counts=shared_counts(site, counts, epsilon, seed if simulated else None),
            counts_kind=counts,
            meta={"epochs": state.epoch, "best_epoch": epoch, **meta},
            provenance={
                "objective": {"name": objective.name, **objective.settings.model_dump(mode="json")},
                "seed": seed,
                "train": {**settings.model_dump(mode="json"), "batch": batch},
                "views": views.model_dump(mode="json"),
                "versions": {"flyby": __version__, "torch": torch.__version__.split("+")[0]},
                **(provenance or {}),
                **({"privacy": private.facts(state.epoch)} if private else {}),
            },
        )

    started = last_saved = time.perf_counter()
    patience_to_save = CHECKPOINT_SECONDS
    views_rng = torch.Generator(device=device)
    view = partial(augment, settings=views, mean=mean, std=std, rng=views_rng)
    step = Step(model, objective, optimizer, train, view, settings, views.views, (views_rng,))
    with state:  # whatever ends the loop early, the state after the last whole epoch is saved
        while state.epoch < settings.epochs and not state.stopped:
            epoch = state.epoch + 1
            tick = time.perf_counter()
            lr = set_learning_rate(optimizer, settings, state.epoch)
            views_rng.manual_seed(seed_of(seed, site.id, "views", epoch))
            model.train()
            if private:
                means = private.epoch(
                    model, objective, optimizer, train, epoch, step.progress.fill_(epoch / settings.epochs)
                )
            else:
                one_epoch(
                    step,
                    batches(len(train), batch, generator(seed, site.id, "order", epoch), device),
                    epoch / settings.epochs,
                )
                yield len(train)
                means = step.means()
            row: Row = {"site": site.id, "epoch": epoch, **means, "lr": lr}
            row |= {name: value.tolist() for name, value in objective.epoch_state(model).items()}
            if len(val):
                with torch.compiler.set_stance("force_eager"):
                    row |= evaluate_part(model, spec, val, settings, device)
            bad = [name for name, v in row.items() if isinstance(v, float) and not math.isfinite(v)]
            bad += [] if finite(model, objective) else ["the weights"]
            if bad:
                alignment = any(name == "lambda" or name.startswith(("lambda_", "l_")) for name in bad)
                cure = (
                    "Set objective.lambda_cap=50, or another objective.weighting"
                    if alignment
                    else "Lower train.lr, or set train.clip=1"
                )
                kept = (
                    f"the state after epoch {state.epoch} is kept"
                    if state.epoch
                    else "no epoch was good, so nothing is kept"
                )
                raise Diverged(
                    f"{site.id} diverged in epoch {epoch}: {', '.join(bad)} left the finite numbers; {kept}. {cure}"
                )
            row["samples_per_second"] = round(len(train) / (time.perf_counter() - tick), 1)
            state.advance(row, settings.patience)
            if folder and settings.snapshots and epoch % settings.snapshots == 0:
                parcel.write(pack(epoch), folder / "snapshots" / f"{epoch:05d}" / f"{site.id}.parcel")
            if (now := time.perf_counter()) - last_saved > patience_to_save:
                state.save()
                last_saved = time.perf_counter()
                patience_to_save = max(CHECKPOINT_SECONDS, CHECKPOINT_SHARE * (last_saved - now))
            if on_epoch:
                on_epoch(row)

    state.use_best()
    return Trained(pack(state.best_epoch or state.epoch), state.rows, time.perf_counter() - started)


def at_once(work: Callable[P, Work[Result]]) -> Callable[P, Result]:
    """The same work, done without a pause."""

    @functools.wraps(work)
    def done(*args: P.args, **kwargs: P.kwargs) -> Result:
        going = work(*args, **kwargs)
        while True:
            try:
                next(going)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    return done


train_site = at_once(training)


class Step:
    """What is done with a batch: views, loss, gradient, update, and the sums of the loss's terms. On a GPU it is
    replayed as one graph."""

    def __init__(
        self,
        model: Network,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        train: Part,
        view: Callable[[Tensor], Tensor],
        settings: TrainSettings,
        views: int,
        rngs: tuple[torch.Generator, ...] = (),
    ) -> None:
        self.model, self.objective, self.optimizer, self.train, self.view = model, objective, optimizer, train, view
        self.settings, self.views = settings, views
        self.device = train.images.device
        self.progress = torch.zeros((), device=self.device)
        self.names: list[str] = []
        self.steps = 0
        self.totals = torch.zeros(0, device=self.device)
        self.captured = Captured(rngs) if self.device.type == "cuda" and settings.compile != "off" else None
        self.trainable = [[p for p in module.parameters() if p.requires_grad] for module in (model, objective)]

    def __call__(self, rows: Tensor) -> None:
        self.steps += 1
        if self.captured is None:
            self.take(rows)
        else:
            self.captured(self.take, rows)

    def take(self, rows: Tensor) -> None:
        batch = Batch(self.view(self.train.images[rows]), self.train.labels[rows].repeat(self.views), self.views)
        with autocast(self.settings, self.device):
            terms = self.objective.loss(self.model, batch, self.progress)
        self.optimizer.zero_grad(set_to_none=True)
        terms.total.backward()  # type: ignore[no-untyped-call]
        if self.settings.clip is not None:
            for parameters in self.trainable:  # the objective's own parameters are clipped by themselves
                nn.utils.clip_grad_norm_(parameters, self.settings.clip)
        self.optimizer.step()
        self.objective.after_step(self.model, terms, self.progress)
        values = torch.stack([terms.total.detach().float(), *(p.detach().float() for p in terms.parts.values())])
        if not self.names:
            self.names, self.totals = ["loss", *terms.parts], torch.zeros_like(values)
        self.totals.add_(values)

    def means(self) -> dict[str, float]:
        """The mean of every loss term over the epoch, read from the device once."""
        return dict(zip(self.names, (self.totals / self.steps).tolist(), strict=True))


def one_epoch(step: Step, order: Iterator[Tensor], progress: float) -> None:
    """The hot loop: one pass over the data. Nothing in it waits for the device."""
    step.progress.fill_(progress)
    step.totals.zero_()
    step.steps = 0
    with one_shape():
        for rows in order:
            step(rows)


def finite(*modules: nn.Module) -> bool:
    """Whether every floating number of the modules is finite: a last step can throw the weights out after a finite
    loss."""
    tensors = [t for module in modules for t in module.state_dict().values() if t.is_floating_point()]
    return bool(nn.utils.get_total_norm(tensors, norm_type=math.inf).isfinite())


def shared_counts(site: Site, kind: Counts, epsilon: float, seed: int | None) -> list[int]:
    """What a site tells about its classes: the counts, the counts with Laplace noise of scale 1/epsilon, or only which
    it holds.

    Seed None draws the noise from the operating system: a real site must, since whoever knows the seed can take the
    noise off again.
    """
    if kind == "binary":
        return [int(n > 0) for n in site.counts]
    if kind == "noisy":
        noise = legacy_numpy(secrets.token_hex(32) if seed is None else seed, site.id, "counts").laplace(
            0, 1 / epsilon, len(site.counts)
        )
        return [max(0, round(n + float(e))) for n, e in zip(site.counts, noise, strict=True)]
    return site.counts


def _check(site: Site, spec: ModelSpec, settings: TrainSettings) -> None:
    if len(site.train) == 0:
        raise BadInput(f"{site.id} has no training images")
    if settings.patience is not None and len(site.val) == 0:
        raise BadInput(
            f"train.patience needs validation data, and {site.id} has none; hold some out with --set split.val=0.1"
        )
    if spec.size != site.size or spec.channels != site.channels or spec.classes != len(site.class_names):
        raise BadInput(
            f"{spec.name} for {spec.classes} classes of {spec.size}x{spec.channels} images does not fit {site.id}:"
            f" {len(site.class_names)} classes of {site.size}x{site.channels}"
        )


def batch_size(settings: TrainSettings, preferred: int, samples: int) -> int:
    """The batch asked for, or the objective's own, halved (to 16 at the least) while a site would make fewer than four
    steps an epoch."""
    if settings.batch is not None:
        return settings.batch
    batch = preferred
    while batch > 16 and samples < 4 * batch:
        batch //= 2
    return batch


def batches(samples: int, batch: int, rng: torch.Generator, device: torch.device) -> Iterator[Tensor]:
    """Rows of one epoch, all of one length: a fresh permutation, its beginning repeated to fill the last batch (2 rows
    at the least, for BatchNorm)."""
    batch = max(2, min(batch, samples))
    steps = math.ceil(samples / batch)
    order = torch.randperm(samples, generator=rng)
    order = order[torch.arange(steps * batch) % samples].view(steps, batch).to(device)
    yield from order.unbind(0)


def autocast(settings: TrainSettings, device: torch.device) -> AbstractContextManager[Any]:
    if settings.precision == "bf16" or (settings.precision == "auto" and device.type == "cuda"):
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def make_optimizer(model: nn.Module, objective: Objective, settings: TrainSettings) -> torch.optim.Optimizer:
    """Weight decay acts on matrices and filters only: biases, BatchNorm, prototypes' scales and an objective's own
    parameters are spared."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    spared = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": g, "weight_decay": d} for g, d in ((decayed, settings.weight_decay), (spared, 0.0)) if g
    ]
    if own := list(objective.parameters()):
        groups.append({"params": own, "weight_decay": 0.0, "fixed_lr": objective.parameter_lr})
    device = next(model.parameters()).device
    if device.type == "cuda":  # a graph reads the learning rate from the device, where every epoch writes its own
        for group in groups:
            group["lr"] = torch.tensor(settings.lr, device=device)
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, fused=True)
    kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    return kind(groups, lr=settings.lr, fused=True, capturable=device.type == "cuda")


def set_learning_rate(optimizer: torch.optim.Optimizer, settings: TrainSettings, epoch: int) -> float:
    """The learning rate of the epoch that follows ``epoch`` finished ones."""
    done = epoch / settings.epochs
    factor = 1.0
    if settings.schedule == "cosine":
        factor = 0.5 * (1 + math.cos(math.pi * done))
    elif settings.schedule == "step":
        factor = settings.gamma ** sum(done >= m for m in settings.milestones)
    for group in optimizer.param_groups:
        graphs.set_learning_rate(group, group.get("fixed_lr") or settings.lr * factor)
    return settings.lr * factor


def fully_compiled(settings: TrainSettings, spec: ModelSpec, device: torch.device, views: float = math.inf) -> bool:
    """Whether the network itself is compiled, once for all sites of a process. ``auto``: for ResNets on a GPU that will
    see so many ``views`` of 32x32 pixels: compiling takes half a minute there, and saves a quarter of every step
    (BatchNorm and what is around it in fewer passes).
    """
    long = spec.name.startswith("resnet") and views * spec.size[0] * spec.size[1] / 1024 >= WORTH_COMPILING
    return device.type == "cuda" and (settings.compile == "full" or (settings.compile == "auto" and long))


@torch.no_grad()
def evaluate_part(model: Network, spec: ModelSpec, part: Part, settings: TrainSettings, device: torch.device) -> Row:
    """Mean cross-entropy and accuracy on a part of a site's own data."""
    model.eval()
    loss, right = torch.zeros((), device=device), torch.zeros((), device=device)
    for images, labels in zip(torch.split(part.images, 512), torch.split(part.labels, 512), strict=True):
        with autocast(settings, device):
            logits = model(spec.prepare(images)).float()
        loss += F.cross_entropy(logits, labels, reduction="sum")
        right += (logits.argmax(1) == labels).sum()
    return {"val_loss": float(loss) / len(part), "val_accuracy": float(right) / len(part)}
