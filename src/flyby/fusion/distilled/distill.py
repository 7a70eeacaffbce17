"""The distillation loop that DENSE, Co-Boosting, FedDF, IntactOFL and ``compact`` share: many teachers in, one learner
out.

Each server epoch: the pool grows (or is a proxy set that stays), the ensemble's weights may move, and the learner takes
one pass over the pool towards the teacher's softened answers, T^2 KL(softmax(t/T) || softmax(s/T)). With ``augment``
every pass shows shifted and mirrored images, about which the teacher is asked again. A method overrides the step that
is its own. Everything random asks for its generator by (seed, stage, epoch), so a checkpoint in ``work``
gives the bytes of an undisturbed run. The learner of the last epoch is the answer: there is no test data here to choose
another one by.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import AfterValidator, Field
from torch import Tensor, nn

from flyby.data.dataset import Dataset
from flyby.errors import Diverged, unknown
from flyby.files import digest
from flyby.fusion.base import Fusion, FusionSettings, Server
from flyby.fusion.distilled.frozen import as_written, compiled
from flyby.fusion.distilled.synthesis import Pool, as_pictures, as_unit
from flyby.fusion.distilled.teachers import (
    MEANS,
    Resident,
    TeacherName,
    Teachers,
    normalise,
    rule_of,
    teacher_of,
    teaching_of,
)
from flyby.fusion.predictor import Predictor, Single
from flyby.models import ARCHITECTURES, ModelSpec, Network
from flyby.objectives.kd import softened_kl
from flyby.parcels.inbox import Inbox
from flyby.rng import generator, seed_of
from flyby.training import checkpoint
from flyby.training.checkpoint import Cadence, TrainingState
from flyby.training.graphs import one_shape, set_learning_rate
from flyby.training.settings import PRECISION, Compile, Precision, TrainSettings
from flyby.training.steps import autocast, batches, fully_compiled

log = logging.getLogger(__name__)

SPEAK_SECONDS = 5.0  # between progress lines
TABLE_ROWS = 10
# Where fewer images are recognised and L_BN weighs more than any cross-entropy, the report says so.
FEW, MUCH = 0.5, 10.0


def known_student(name: str | None) -> str | None:
    if name is not None and name not in ARCHITECTURES:
        raise unknown("student", name, ARCHITECTURES)
    return name


StudentName = Annotated[str | None, AfterValidator(known_student)]


class DistillSettings(FusionSettings):
    """How the learner is trained; each rule has its own defaults."""

    student: StudentName = Field(
        None, description="architecture of the answer; the clients' own (the first one's) where not named"
    )
    teacher: TeacherName = Field(
        "logits",
        description=(
            "who teaches: logits (as published), probabilities, or a rule that keeps all networks, such as"
            " experts-calibrated"
        ),
    )
    augment: bool = Field(
        False,
        description="shift and mirror images as the sites did theirs, in every pass, with the teacher asked again",
    )
    epochs: int = Field(200, ge=1, le=100_000, description="server epochs")
    passes: int = Field(1, ge=1, description="passes over the pool in each server epoch")
    batch: int = Field(256, ge=1, description="images in a step")
    optimizer: Literal["sgd", "adam"] = Field("sgd", description="of the learner")
    lr: float = Field(0.005, gt=0, description="learning rate of the learner")
    momentum: float = Field(0.9, ge=0, lt=1, description="of sgd")
    weight_decay: float = Field(0.0, ge=0, description="pull of all weights towards 0")
    schedule: Literal["constant", "cosine", "one-cycle"] = Field(
        "constant", description="one-cycle rises for a tenth of the epochs, then falls as cosine"
    )
    clip: float | None = Field(None, gt=0, description="largest gradient norm")
    temperature: float = Field(20.0, gt=0, description="that teacher and learner are compared at")
    resident: Resident = Field(
        "auto", description="teachers on the device: all at once, or one at a time (slower, far less memory)"
    )
    precision: Precision = Field("auto", description=PRECISION)
    compile: Compile = Field(
        "graph",
        description="on a GPU: replay steps as CUDA graphs (graph), compile networks too (full; auto: where it pays),"
        " or none (off)",
    )


def push(teachers: Teachers, x: Tensor, weights: Tensor, u: Tensor, size: float, temperature: float) -> Tensor:
    """x + size sign(grad_x <u, softmax(t/T)>): the images moved to where the teacher answers otherwise, along a random
    direction u [N, C]. ``size`` is in units of the normalised image, so in those of x it is size * std."""
    _, _, gradient = teachers.pull(
        x, lambda _, said: (u * (teachers.answer(weights, said) / temperature).softmax(1)).sum()
    )
    return x + size * teachers.specs[0].statistics(x.device)[1].view(1, -1, 1, 1) * gradient.sign()


class Learner(nn.Module):
    """What is trained: ``scores(x, said)`` for images in 0..1, and what clients say of them [K, N, D], their logits
    first, for those who build on them."""

    def scores(self, x: Tensor, said: Tensor) -> Tensor:
        raise NotImplementedError

    def quicken(self, how: Compile, views: float, batch: int) -> None:
        """Compile what is trained on so many ``views``, in batches of one size, where it pays."""


class Student(Learner):
    """One network of its own."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network, self.batch = network, 0
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def quicken(self, how: Compile, views: float, batch: int) -> None:
        device = next(self.parameters()).device
        if fully_compiled(TrainSettings(compile=how), self.network.spec, device, views) and compiled(self.network):
            self.batch = batch

    def scores(self, x: Tensor, said: Tensor) -> Tensor:
        # Only the step that trains is compiled: a compiled pass would find gradients of the weights in synthesis too.
        with as_written(self.batch > 0 and not (self.training and len(x) == self.batch)):
            out: Tensor = self.network(normalise(x, self.network.spec))
        return out.float()

    def answer(self) -> Network:
        """The network itself; a copy forgets what was compiled."""
        return copy.deepcopy(self.network) if self.batch else self.network


def student_spec(parcels: Inbox, name: str | None) -> ModelSpec:
    """The first client's spec, or another architecture for the same images, classes and normalisation, with a linear
    head."""
    first = parcels.manifests[0].spec.replace(partial=False)
    if name is None:
        return first
    return ModelSpec(
        name=name, classes=first.classes, channels=first.channels, size=first.size, mean=first.mean, std=first.std
    )


class Distillation(Fusion):
    """The loop. ``grow``, ``reweigh``, ``inputs`` and ``loss`` are the steps a method may change, ``learner`` and
    ``predictor`` its ends."""

    heterogeneous = True
    draws = True
    settings_type: ClassVar[type[FusionSettings]] = DistillSettings
    settings: DistillSettings
    lesson: Lesson | None = None

    def __init__(self, settings: FusionSettings | None = None) -> None:
        super().__init__(settings)
        word = self.settings.teacher
        rule = None if word in MEANS else rule_of(word)
        self.needs = frozenset({"weights"}) | (rule.needs if rule else frozenset())
        self.wants = rule.wants if rule else frozenset()
        self.softmax = rule is None or rule.softmax

    def teacher(self, parcels: Inbox, server: Server) -> Predictor:
        """With the weights it ended with, which the report of its work holds."""
        weights = next((section["weights"] for section in server.report if "weights" in section), None)
        return teacher_of(self.settings.teacher, parcels, server, weights)

    def learner(self, parcels: Inbox, seed: int) -> Learner:
        return Student(student_spec(parcels, self.settings.student).build(generator(seed, "server", "student")))

    def predictor(self, parcels: Inbox, learner: Learner) -> Predictor:
        assert isinstance(learner, Student)
        return Single([learner.network.spec], parcels.class_names, [learner.answer()])

    def pool(self, teachers: Teachers, proxy: Dataset | None) -> Pool:
        return Pool(teachers.specs[0], len(teachers), teachers.device)

    def shown(self, held: int) -> int:
        """How many images the learner sees in all its epochs, from a pool that holds some at first."""
        s = self.settings
        made = getattr(s, "images", 0) if self.synthetic else 0
        return s.passes * (s.epochs * held + made * s.epochs * (s.epochs + 1) // 2)

    def grow(self, pool: Pool, teachers: Teachers, learner: Learner, seed: int, epoch: int) -> dict[str, float]:
        """More images for the pool, before the epoch that follows ``epoch`` finished ones; what to note about them."""
        return {}

    def reweigh(self, pool: Pool, teachers: Teachers, seed: int, epoch: int) -> None:
        """Move the ensemble's weights."""

    def inputs(
        self, images: Tensor, said: Tensor, weights: Tensor, teachers: Teachers, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """What the learner sees of some images of the pool, and what clients say of it [K, n, D]; ``said`` is what they
        said of the images themselves."""
        x = as_unit(images)
        if teachers.still or not self.settings.augment:
            return x, said
        x = teachers.view(x, rng)
        return x, teachers.say(x)

    def loss(self, learner: Learner, x: Tensor, said: Tensor, told: Tensor, labels: Tensor) -> Tensor:
        """``told`` [n, C] are the teacher's log-scores."""
        temperature = self.settings.temperature
        return temperature**2 * softened_kl(learner.scores(x, said), told, temperature).mean()

    def combine(self, parcels: Inbox, server: Server) -> Predictor:
        s, seed = self.settings, server.seed
        teaching, most = teaching_of(s.teacher, parcels, server), max(s.batch, getattr(s, "images", 0))
        teachers = Teachers(parcels, server.device, s.resident, most, s.precision, teaching, s.compile)
        pool = self.pool(teachers, server.proxy)
        learner = self.learner(parcels, seed).to(server.device)
        views = self.shown(len(pool)) * (1 + len(teachers) / 3)  # an answer costs a third of a step of training
        teachers.quicken(views, {s.batch, getattr(s, "images", s.batch)})
        learner.quicken(s.compile, views, s.batch)
        optimizer = self._optimizer(learner)
        identity = digest(
            [
                self.name,
                s.model_dump(mode="json", exclude={"compile"}),  # of the machine, not of the work
                seed,
                [m.digest for m in parcels.manifests],
                None if server.proxy is None else server.proxy.digest,
            ]
        )
        state = TrainingState(
            server.work / f"{self.name}.ckpt" if server.work else None, identity, learner, optimizer, pool
        )
        state.restore()
        clock, self.lesson = Clock(self.name, state.epoch, s.epochs), None
        with state:  # whatever ends the loop early, the state after the last whole epoch is saved
            while state.epoch < s.epochs:
                epoch = state.epoch
                made = self.grow(pool, teachers, learner.eval(), seed, epoch)
                self.reweigh(pool, teachers, seed, epoch)
                loss = self._learn(learner.train(), optimizer, pool, teachers, seed, epoch)
                if not math.isfinite(loss) or not all(bool(p.isfinite().all()) for p in learner.parameters()):
                    raise Diverged(
                        f"{self.name} diverged in server epoch {epoch + 1}; lower fusion.lr, or set fusion.clip=1"
                    )
                state.advance({"epoch": epoch + 1, "images": len(pool), **made, "distillation_loss": loss}, None)
                clock.tick(state, loss)
        clock.end(state)
        self.lesson = None
        server.report += self._describe(teachers, pool, state.rows)
        return self.predictor(parcels, learner.eval().cpu())

    def _optimizer(self, learner: Learner) -> torch.optim.Optimizer:
        s, device = self.settings, next(learner.parameters()).device
        on_gpu = device.type == "cuda"
        rate = torch.tensor(s.lr, device=device) if on_gpu else s.lr
        if s.optimizer == "adam":
            return torch.optim.Adam(
                learner.parameters(), lr=rate, weight_decay=s.weight_decay, fused=on_gpu or None, capturable=on_gpu
            )
        return torch.optim.SGD(
            learner.parameters(), lr=rate, momentum=s.momentum, weight_decay=s.weight_decay, fused=on_gpu or None
        )

    def _learn(
        self, learner: Learner, optimizer: torch.optim.Optimizer, pool: Pool, teachers: Teachers, seed: int, epoch: int
    ) -> float:
        """The learner's passes over the pool in one epoch; the mean loss."""
        s, device = self.settings, teachers.device
        for group in optimizer.param_groups:
            set_learning_rate(group, s.lr * rate_factor(s.schedule, epoch, s.epochs))
        if self.lesson is None or self.lesson.learner is not learner:
            self.lesson = Lesson(self, learner, optimizer, pool.weights, teachers)
        order = generator(seed, "server", "order", epoch)
        rows = (rows for _ in range(s.passes) for rows in batches(len(pool), s.batch, order, device, least=1))
        return self.lesson.over(pool, rows, seed_of(seed, "server", "inputs", epoch))

    def _describe(self, teachers: Teachers, pool: Pool, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The report's sections: the epochs in a short table, and the images if they were made here."""
        sections: list[dict[str, Any]] = []
        columns = list(rows[-1])
        every = max(1, -(-len(rows) // TABLE_ROWS))
        shown = [row for row in rows if row["epoch"] % every == 0 or row is rows[-1]]
        text = (
            f"{len(teachers)} teachers,"
            f" {'all on the device at once' if teachers.together else 'on the device one at a time'}; their weights and"
            f" activations take about {teachers.peak / 2**20:.0f} MiB there. The teacher is {self.settings.teacher};"
            " the learner of the last epoch is the answer."
        )
        learned = {"weights": pool.weights.tolist()} if teachers.teaching.weighted else {}
        if self.synthetic:
            without = [i for i, normed in enumerate(teachers.normed) if not normed]
            if without:
                who = (
                    "no client has"
                    if len(without) == len(teachers)
                    else f"{len(without)} of {len(teachers)} clients have no"
                )
                text += (
                    f" L_BN leaves them out: {who} BatchNorm layers."
                    if len(without) < len(teachers)
                    else f" L_BN is skipped: {who} BatchNorm layers."
                )
            sections.append(
                {
                    "title": "Synthetic images",
                    "text": about_images(len(pool), rows[-1], getattr(self.settings, "bn", 0.0)),
                    "images": as_pictures(pool.images[-64:]),
                }
            )
        cells = [[row[c] if isinstance(row[c], int) else round(row[c], 4) for c in columns] for row in shown]
        sections.append(
            {"title": f"Server work of {self.name}", "text": text, "table": {"columns": columns, "rows": cells}}
            | learned
        )
        return sections

    synthetic: bool = False  # whether the pool's images are made here


def about_images(count: int, row: dict[str, Any], bn: float) -> str:
    """What the report says of the images: whether the ensemble sees in them what they were made to show, and what to do
    where L_BN is why it does not."""
    text = (
        f"The last of {count} images made from the clients' models alone. The ensemble takes {row['recognised']:.0%} of"
        " the last epoch's for the class they were made to show."
    )
    if row["recognised"] < FEW and (weighed := bn * row.get("bn_distance", 0.0)) > MUCH:
        text += (
            f" That is few: L_BN weighs {weighed:.0f} and drowns the class term; a smaller fusion.bn, or"
            " fusion.bn_form=relative, lets the classes speak."
        )
    return text


def rate_factor(schedule: str, epoch: int, epochs: int) -> float:
    """What the learning rate is multiplied by in the epoch that follows ``epoch`` finished ones."""
    if schedule == "constant":
        return 1.0
    rise = max(1, epochs // 10) if schedule == "one-cycle" else 0
    if epoch < rise:
        return (epoch + 1) / (rise + 1)
    return 0.5 * (1 + math.cos(math.pi * (epoch - rise) / (epochs - rise)))


class Lesson:
    """The learner's step on some images of the pool; on a GPU one recorded step serves all epochs."""

    def __init__(
        self,
        rule: Distillation,
        learner: Learner,
        optimizer: torch.optim.Optimizer,
        weights: Tensor,
        teachers: Teachers,
    ) -> None:
        self.rule, self.learner, self.optimizer, self.weights, self.teachers = (
            rule,
            learner,
            optimizer,
            weights,
            teachers,
        )
        self.rng = torch.Generator(device=teachers.device)
        self.total = torch.zeros((), device=teachers.device)
        self.captured = teachers.recorder(self.rng)

    def over(self, pool: Pool, order: Iterator[Tensor], seed: int) -> float:
        """One epoch; the mean loss."""
        self.rng.manual_seed(seed)
        self.total.zero_()
        steps = 0
        with one_shape():
            for rows in order:
                batch = pool.images[rows], pool.said[rows], pool.labels[rows]
                self._step(*batch) if self.captured is None else self.captured(self._step, *batch)
                steps += 1
        return float(self.total) / steps

    def _step(self, images: Tensor, said: Tensor, labels: Tensor) -> None:
        s = self.rule.settings
        x, said = self.rule.inputs(images, said.transpose(0, 1), self.weights, self.teachers, self.rng)
        told = self.teachers.answer(self.weights, said)
        with autocast(self.teachers.precision, self.teachers.device):
            loss = self.rule.loss(self.learner, x, said, told, labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        if s.clip is not None:
            nn.utils.clip_grad_norm_(self.learner.parameters(), s.clip)
        self.optimizer.step()
        self.total.add_(loss.detach())


class Clock:
    """Progress lines and checkpoints, both only as often as long work asks for."""

    def __init__(self, name: str, first: int, epochs: int) -> None:
        self.name, self.first, self.epochs = name, first, epochs
        self.started = self.spoken = time.perf_counter()
        self.cadence = Cadence()

    def tick(self, state: TrainingState, loss: float) -> None:
        now = time.perf_counter()
        self.cadence.keep(state.save)
        if now - self.spoken > SPEAK_SECONDS and state.epoch < self.epochs:
            left = (now - self.started) / (state.epoch - self.first) * (self.epochs - state.epoch)
            log.info(
                "%s: epoch %d of %d, loss %.4f, about %.0f s left", self.name, state.epoch, self.epochs, loss, left
            )
            self.spoken = now

    def end(self, state: TrainingState) -> None:
        """Save the last epoch of long work: what follows may be interrupted too, and it is not done twice."""
        if time.perf_counter() - self.started > checkpoint.SECONDS:
            state.save()
