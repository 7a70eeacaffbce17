"""The loops that ``flyby bench`` compares. Each lives in a process of its own and stands still until it is its turn, so
that all can be measured in one run, turn about, without one's threads, caches or worker processes in the way of
another's.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict

from flyby.data.site import Part, Site
from flyby.data.views import PLAIN, ViewSettings
from flyby.engines import forkserver
from flyby.errors import FlybyError
from flyby.machine import keep_memory
from flyby.models import ModelSpec
from flyby.objectives import OBJECTIVES, Objective
from flyby.rng import generator
from flyby.training.graphs import Captured
from flyby.training.loop import train_site
from flyby.training.recipe import Recipe
from flyby.training.settings import Precision, TrainSettings
from flyby.training.steps import autocast, fully_compiled, precision_of

Way = Literal["limit", "flyby", "script"]
PATIENCE = 5.0  # seconds that loops have for leaving, in each of three ways
log = logging.getLogger(__name__)
WORK = {"plain": "supervised", "salt": "salt", "aurora": "aurora"}  # what is trained, and flyby's objective for it


class Case(BaseModel):
    """One loop to measure: what it trains and which ``way``. ``steps`` make an epoch; the script's are
    ``script_steps``, so that filling its queue weighs little."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    work: str
    way: Way
    model: str
    size: int
    batch: int
    device: str
    channels: int = 3
    classes: int = 10
    precision: Precision = "auto"
    compile: Literal["auto", "off", "graph", "full"] = "auto"
    workers: int = 2
    threads: int = 1
    steps: int = 20
    script_steps: int = 20

    @property
    def views(self) -> ViewSettings:
        return self.objective.views((self.size, self.size), True)

    @property
    def objective(self) -> type[Objective]:
        return OBJECTIVES[WORK[self.work]]

    def spec(self) -> ModelSpec:
        spec = ModelSpec(name=self.model, classes=self.classes, channels=self.channels, size=(self.size, self.size))
        return self.objective.adapt_spec(spec, self.objective.settings_type())

    def settings(self) -> TrainSettings:
        own = self.objective.defaults(self.objective.settings_type())
        here = {"epochs": 100_000, "batch": self.batch, "precision": self.precision, "compile": self.compile}
        return TrainSettings(**{**own, **here})

    def recipe(self) -> Recipe:
        return Recipe(
            spec=self.spec(),
            objective=self.objective.name,
            objective_settings=self.objective.settings_type(),
            train=self.settings(),
            views=self.views,
            seed=0,
        )

    def part(self, samples: int) -> Part:
        """Made-up images: no loop's speed depends on what is in them."""
        rng = generator("bench")
        images = torch.randint(0, 256, (samples, self.size, self.size, self.channels), dtype=torch.uint8, generator=rng)
        return Part(images, torch.randint(0, self.classes, (samples,), generator=rng))


class Turn(NamedTuple):
    """What was done in a turn. A sample is an image, however many views were made of it."""

    steps: int
    samples: int
    seconds: float
    loss: float


class Enough(Exception):
    """Ends a training loop from within."""


Report = Callable[[int, float], None]  # steps done and their mean loss, once an epoch


def limit(case: Case, report: Report) -> None:
    """The bare step: forward, backward and update of the same network on one fixed batch that is on the device
    already."""
    device, settings = torch.device(case.device), case.settings()
    torch.backends.cudnn.benchmark = True
    model = case.spec().build(generator("bench", "model")).to(device)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if fully_compiled(settings, case.spec(), device):
        model.backbone.compile(dynamic=False)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay, fused=True
    )
    precision = precision_of(settings.precision, case.spec(), device)
    part = case.part(case.batch).to(device)
    x = case.spec().prepare(part.images).repeat(case.views.views, 1, 1, 1).contiguous(memory_format=torch.channels_last)
    labels = part.labels.repeat(case.views.views)
    last = torch.zeros((), device=device)

    def step(x: torch.Tensor, labels: torch.Tensor) -> None:
        with autocast(precision, device):
            loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        last.copy_(loss.detach())

    captured = Captured() if device.type == "cuda" and settings.compile != "off" else None
    model.train()
    while True:
        for _ in range(case.steps):
            captured(step, x, labels) if captured else step(x, labels)
        report(case.steps, float(last))  # reading the loss waits for the device


def flyby(case: Case, report: Report) -> None:
    """``train_site`` as it is: everything between two epochs counts, from the order of the batches to the row of the
    history."""
    part = case.part(case.batch * case.steps)
    empty = Part(part.images[:0], part.labels[:0])
    site = Site("bench", part, empty, empty, tuple(str(c) for c in range(case.classes)))
    train_site(site, case.recipe(), device=case.device, on_epoch=lambda row: report(case.steps, row["loss"]))


def script(case: Case, report: Report) -> None:
    """The ordinary script: see ``flyby.bench.script``."""
    from flyby.bench.script import Images, Script, contrastive_view, crop_and_mirror

    part = case.part(case.batch * case.script_steps)
    transform = contrastive_view if case.views.views > 1 else None if case.views == PLAIN else crop_and_mirror
    data = Images(part.images.numpy(), part.labels.numpy(), transform, case.views.views)
    model = case.spec().build(generator("bench", "model"))
    ordinary = Script(model, data, case.batch, case.device, case.workers)
    while True:
        report(case.script_steps, ordinary.epoch())


LOOPS: dict[Way, Callable[[Case, Report], None]] = {"limit": limit, "flyby": flyby, "script": script}


class Baton:
    """A loop's side of the pipe. Called after every epoch, it returns at once while the loop's turn lasts, and waits
    for the next when it is over."""

    def __init__(self, pipe: Connection, batch: int) -> None:
        self.pipe, self.batch = pipe, batch
        self.budget: float | None = None  # None: still warming up
        self.losses: list[float] = []
        self.started, self.steps = 0.0, 0

    def __call__(self, steps: int, loss: float) -> None:
        seconds = time.perf_counter() - self.started
        self.steps += steps
        self.losses.append(loss)
        if self.budget is not None and seconds < self.budget:
            return
        turn = Turn(self.steps, self.steps * self.batch, seconds, sum(self.losses) / len(self.losses))
        try:
            self.pipe.send("ready" if self.budget is None else turn)
            self.budget = self.pipe.recv()
        except (EOFError, OSError):  # the bench is over, or gone
            raise Enough from None
        self.steps, self.losses, self.started = 0, [], time.perf_counter()


def serve(raw: str, pipe: Connection) -> None:
    """A loop's whole life in its process: an epoch to warm up, then, for every number of seconds asked, epochs until
    they have passed."""
    case = Case.model_validate_json(raw)
    torch.set_num_threads(case.threads)
    if case.device == "cpu" and case.way != "script":  # as a site does
        keep_memory()
    try:
        LOOPS[case.way](case, Baton(pipe, case.batch))
    except Enough:
        return
    except Exception as error:
        with suppress(OSError):
            pipe.send(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}")


class Loop:
    """The parent's side of one loop: ``run`` gives it a turn."""

    def __init__(self, case: Case) -> None:
        context: Any = forkserver.context_for(case.device)
        self.case = case
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=serve, args=(case.model_dump_json(), theirs), name=f"{case.work}-{case.way}"
        )
        with forkserver.without_interrupts():
            self.process.start()
        theirs.close()

    def _hear(self) -> Any:
        try:
            said = self.pipe.recv()
        except EOFError:
            said = "its process died"
        if isinstance(said, str) and said != "ready":
            raise FlybyError(f"the {self.case.way} loop of {self.case.work} failed: {said}")
        return said

    def ready(self) -> None:
        self._hear()

    def run(self, seconds: float) -> Turn:
        self.pipe.send(seconds)
        return Turn(*self._hear())

    def gone(self, seconds: float) -> bool:
        self.process.join(seconds)
        return self.process.exitcode is not None


@contextmanager
def loops(cases: list[Case]) -> Iterator[list[Loop]]:
    """All loops started and warmed up, one after another; ended with the block."""
    if any(case.device == "cpu" for case in cases):
        forkserver.start()
    made: list[Loop] = []
    try:
        for case in cases:
            log.info("bench: starting %s, %s", case.work, case.way)
            made.append(Loop(case))
            made[-1].ready()
        yield made
    finally:
        end(made)


def end(made: Sequence[Loop]) -> None:
    """A loop sees the end of its pipe after its epoch and leaves, its DataLoader's workers with it; one that does not
    is asked, then killed."""
    for loop in made:
        loop.pipe.close()
    for word in ("is_alive", "terminate", "kill"):
        left = [loop for loop in made if not loop.gone(0)]
        for loop in left:
            getattr(loop.process, word)()
        deadline = time.monotonic() + PATIENCE
        for loop in left:
            loop.gone(max(0.0, deadline - time.monotonic()))


def default_workers() -> int:
    return min(16, os.cpu_count() or 1)
