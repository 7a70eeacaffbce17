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
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from flyby import __version__
from flyby.data.site import Site
from flyby.data.views import augment
from flyby.errors import BadInput, Diverged
from flyby.files import digest
from flyby.models import ModelSpec
from flyby.models.features import looked_at
from flyby.models.optimisers import eagerly
from flyby.parcels import parcel
from flyby.rng import generator, legacy_numpy, seed_of
from flyby.training.average import Average
from flyby.training.checkpoint import Cadence, TrainingState
from flyby.training.optim import make_optimizer, set_learning_rate
from flyby.training.privacy import PrivateSums, PrivateTraining
from flyby.training.recipe import Recipe
from flyby.training.settings import Counts, Phase, TrainSettings, batch_size, phase_of
from flyby.training.steps import Step, batches, evaluate_part, finite, fully_compiled, one_epoch, precision_of

P = ParamSpec("P")
Outcome = TypeVar("Outcome")
Pausing = Generator[int, None, Outcome]
Row = dict[str, Any]


@dataclass(frozen=True)
class Trained:
    """A finished site: what it will send, and what happened while it trained."""

    parcel: parcel.Parcel
    rows: list[Row]
    seconds: float


def training(
    site: Site,
    recipe: Recipe,
    *,
    device: torch.device | str = "cpu",
    folder: Path | None = None,
    on_epoch: Callable[[Row], None] | None = None,
    on_batch: Callable[[int], None] | None = None,
    method: str = "",
) -> Pausing[Trained]:
    """Train one site by a recipe and wrap the result as a Parcel, which says its ``method`` (or else its objective).

    The initial weights depend on the seed alone: all sites start from one point (with ``init: own`` each from another).
    With ``folder`` the state is checkpointed there and a later call goes on from it. ``on_batch`` hears how many images
    each step takes.

    It pauses where the steps of an epoch are on their way to the device, and says how many samples they take: another
    site's can be sent after them. ``train_site`` is the same without pauses.
    """
    started = time.perf_counter()
    work = Session(site, recipe, torch.device(device), folder, method)
    work.on_batch = on_batch
    state, cadence = work.state, Cadence()
    with state:  # whatever ends the loop early, the state after the last whole epoch is saved
        while state.epoch < recipe.train.epochs and not state.stopped:
            row = yield from work.epoch()
            state.advance(row, recipe.train.patience)
            work.snapshot()
            cadence.keep(state.save)
            if on_epoch:
                on_epoch(row)
    state.use_best()
    return Trained(work.pack(state.best_epoch or state.epoch), state.rows, time.perf_counter() - started)


def at_once(work: Callable[P, Pausing[Outcome]]) -> Callable[P, Outcome]:
    """The same work, done without a pause."""

    @functools.wraps(work)
    def done(*args: P.args, **kwargs: P.kwargs) -> Outcome:
        going = work(*args, **kwargs)
        while True:
            try:
                next(going)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    return done


train_site = at_once(training)


class Session:
    """One site's training: its network, loss and optimiser on the device, and where it stands."""

    on_batch: Callable[[int], None] | None = None

    def __init__(self, site: Site, recipe: Recipe, device: torch.device, folder: Path | None, method: str) -> None:
        check_fit(site, recipe)
        settings, views, seed = recipe.train, recipe.views, recipe.seed
        self.objective = recipe.make_objective()
        self.spec = spec = self.objective.fitted(recipe.spec, site, seed)
        check_phases(spec, settings)
        self.site, self.recipe, self.device, self.folder = site, recipe, device, folder
        self.method = method or recipe.objective
        start = ("own", site.id) if settings.init == "own" else ("shared",)
        self.model = spec.build(generator(seed, *start, "init")).to(device)
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.batch = batch_size(settings, self.objective.preferred_batch(self.objective.settings), len(site.train))
        if fully_compiled(settings, spec, device, len(site.train) * views.views * settings.epochs, self.batch):
            self.model.backbone.compile(dynamic=False)
        self.objective.to(device)
        self.objective.prepare(self.model, site, seed)
        self.train, self.val, self.learner = site.train, site.val, self.model
        if views.still and settings.epochs and not self.objective.pictures:
            self.learner, (self.train, self.val) = looked_at(self.model, (site.train, site.val), site.id)
        self.optimizer = make_optimizer(self.model, self.objective, settings)
        self.train, self.val = self.train.to(device), self.val.to(device)
        chosen = [part.model_dump(mode="json") for part in (spec, self.objective.settings, settings, views)]
        identity = digest([recipe.objective, *chosen, seed, site.origin, site.class_names])
        path = folder / f"{site.id}.ckpt" if folder else None
        self.average = Average(self.model, settings.ema) if settings.ema else None
        self.state = TrainingState(path, identity, self.model, self.optimizer, self.objective, self.average)
        self.state.restore()
        self.private, self.private_sums = None, None
        secret = None if site.real else seed  # whoever knows the seed can take the noise off again
        if settings.dp_epsilon is not None and not self.objective.trains:
            self.private_sums = PrivateSums(settings, self.objective.settings.send, secret)
        elif settings.dp_epsilon is not None:
            self.private = PrivateTraining(
                settings, views, settings.epochs, len(self.train), self.batch, site.id, secret, recipe.epsilon
            )
        mean, std = self.learner.statistics(device)
        self.rng = torch.Generator(device=device)
        self.view = functools.partial(augment, settings=views, mean=mean, std=std, rng=self.rng)
        if settings.dp_epsilon is None:
            settings = settings.model_copy(update={"precision": precision_of(settings.precision, spec, device)})
        self.step = Step(
            self.learner, self.objective, self.optimizer, self.train, self.view, settings, views.views, self.rng
        )
        self.step.average, self.phase = self.average, Phase(spec.size, views.views)

    def _enter(self, phase: Phase) -> None:
        """Go on with images of another size, or with other views of them."""
        if phase != self.phase:
            self.phase = phase
            view = functools.partial(self.view, settings=self.recipe.views.model_copy(update={"views": phase.views}))
            self.step.enter(view, phase.views, phase.size if phase.size != self.spec.size else None)

    def sent(self) -> AbstractContextManager[None]:
        """Within the block the network is as the site would send it: the mean of its weights, where one is kept."""
        return self.average.in_place() if self.average is not None else nullcontext()

    def epoch(self) -> Pausing[Row]:
        """One epoch, and its row of the history; raises :class:`Diverged` where a number left the finite ones."""
        settings, seed, epoch = self.recipe.train, self.recipe.seed, self.state.epoch + 1
        tick, progress = time.perf_counter(), epoch / settings.epochs
        lr = set_learning_rate(self.optimizer, settings, self.state.epoch, self.batch)
        self._enter(phase_of(settings, self.spec.size, self.recipe.views.views, self.state.epoch))
        self.rng.manual_seed(seed_of(seed, self.site.id, "views", epoch))
        self.learner.train()
        if self.private:
            means = self.private.epoch(
                self.learner, self.objective, self.optimizer, self.train, epoch, self.step.progress.fill_(progress)
            )
        else:
            order = batches(len(self.train), self.batch, generator(seed, self.site.id, "order", epoch), self.device)
            one_epoch(self.step, order if self.on_batch is None else told(order, self.on_batch), progress)
            yield len(self.train)
            means = self.step.means()
        row: Row = {"site": self.site.id, "epoch": epoch, **means, "lr": lr}
        row |= {name: value.tolist() for name, value in self.objective.epoch_state(self.model).items()}
        if len(self.val):
            with eagerly(), self.sent():
                row |= evaluate_part(self.learner, self.val, self.step.settings.precision, self.device)
        self._check(row)
        return row | {"samples_per_second": round(len(self.train) / (time.perf_counter() - tick), 1)}

    def _check(self, row: Row) -> None:
        bad = [name for name, v in row.items() if isinstance(v, float) and not math.isfinite(v)]
        bad += [] if finite(self.model, self.objective) else ["the weights"]
        if bad:
            kept = (
                f"the state after epoch {self.state.epoch} is kept"
                if self.state.epoch
                else "no epoch was good, so nothing is kept"
            )
            raise Diverged(
                f"{self.site.id} diverged in epoch {row['epoch']}: {', '.join(bad)} left the finite numbers; {kept}."
                f" {self.objective.cure(bad)}"
            )

    def snapshot(self) -> None:
        """Keep the network of every n-th epoch, where that is asked for."""
        epoch, every = self.state.epoch, self.recipe.train.snapshots
        if self.folder and every and epoch % every == 0:
            parcel.write(self.pack(epoch), self.folder / "snapshots" / f"{epoch:05d}" / f"{self.site.id}.parcel")

    def pack(self, epoch: int) -> parcel.Parcel:
        """The network as it stands, as this site would send it."""
        with self.sent():
            return self._packed(epoch)

    def _packed(self, epoch: int) -> parcel.Parcel:
        site, recipe, settings = self.site, self.recipe, self.objective.settings.model_dump(mode="json")
        # A compiled backbone serves training; other batch shapes are not worth a compilation.
        with eagerly():
            extras, meta = (
                (self.private_sums.extras(self.model.eval(), site), dict[str, Any]())
                if self.private_sums
                else self.objective.extras(self.model.eval(), site, recipe.seed)
            )
        provenance = {
            "objective": {"name": recipe.objective, **settings},
            "seed": recipe.seed,
            "train": {**recipe.train.model_dump(mode="json"), "batch": self.batch},
            "views": recipe.views.model_dump(mode="json"),
            "versions": {"flyby": __version__, "torch": torch.__version__.split("+")[0]},
        }
        if self.private:
            provenance["privacy"] = self.private.facts(self.state.epoch)
        counts = shared_counts(site, recipe.counts, recipe.epsilon, None if site.real else recipe.seed)
        if self.private_sums:
            counts = self.private_sums.counts(extras)
            provenance["privacy"] = self.private_sums.facts(extras, len(site.train))
        return parcel.make(
            sender=site.id,
            method=self.method,
            spec=self.spec,
            class_names=site.class_names,
            samples=len(site.train),
            codec=recipe.codec,
            weights={name: t.detach().cpu() for name, t in self.model.state_dict().items()},
            extras={name: t.detach().cpu() for name, t in extras.items()},
            counts=counts,
            counts_kind=recipe.counts,
            meta={"epochs": self.state.epoch, "best_epoch": epoch, **meta},
            provenance=provenance,
        )


def told(order: Iterator[Tensor], on_batch: Callable[[int], None]) -> Iterator[Tensor]:
    """The same batches, and somebody is told of each."""
    for rows in order:
        on_batch(len(rows))
        yield rows


def check_phases(spec: ModelSpec, settings: TrainSettings) -> None:
    """Refuse small images for a network that takes one size only."""
    for size in {phase_of(settings, spec.size, 1, epoch).size for epoch in range(settings.epochs)} - {spec.size}:
        try:
            if spec.backbone is not None:
                raise ValueError("it is frozen")
            spec.skeleton().eval()(torch.empty(1, spec.channels, *size, device="meta"))
        except (RuntimeError, ValueError):
            raise BadInput(
                f"{spec.name} takes images of one size, and train.resolution asks for {size[0]}x{size[1]} in between;"
                " leave it out, or choose a network with a pool at its end such as resnet18"
            ) from None


def shared_counts(site: Site, kind: Counts, epsilon: float, seed: int | None) -> list[int]:
    """What a site tells about its classes: the counts, the counts with Laplace noise of scale 1/epsilon, or only which
    it holds.

    Seed None draws the noise from the operating system: a real site must, since whoever knows the seed can take the
    noise off again.
    """
    if kind == "binary":
        return [int(n > 0) for n in site.counts]
    if kind == "noisy":
        key = secrets.token_hex(32) if seed is None else seed
        noise = legacy_numpy(key, site.id, "counts").laplace(0, 1 / epsilon, len(site.counts))
        return [max(0, round(n + float(e))) for n, e in zip(site.counts, noise, strict=True)]
    return site.counts


def check_fit(site: Site, recipe: Recipe) -> None:
    """Refuse, before any training, a recipe that this site's data cannot follow."""
    spec = recipe.spec
    if len(site.train) == 0:
        raise BadInput(f"{site.id} has no training images")
    if recipe.train.patience is not None and len(site.val) == 0:
        raise BadInput(
            f"train.patience needs validation data, and {site.id} has none; hold some out with --set split.val=0.1"
        )
    if spec.classes == 1 and not recipe.make_objective().one_class:
        raise BadInput(
            f"{site.id} has one class, {site.class_names[0]}, and {recipe.objective} learns to tell classes apart; give"
            " the classes of all sites with --classes LIST, or use --method ridge or bearings"
        )
    takes, has = (spec.size, spec.channels, spec.pixels), (site.size, site.channels, site.pixels)
    if takes != has or spec.classes != len(site.class_names):
        raise BadInput(
            f"{spec.name} for {spec.classes} classes of {spec.size}x{spec.channels} {spec.pixels} images does not fit"
            f" {site.id}: {len(site.class_names)} classes of {site.size}x{site.channels} {site.pixels}"
        )
