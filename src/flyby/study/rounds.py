"""What many rounds would give on the same split: a baseline for studies, and from two rounds on not one-shot.

R rounds of local training and averaging over one saved split, from the same start, with the same views, schedule and
test images as one upload has:
- ``fedavg`` [McMahan et al., AISTATS 2017]: w <- sum_k (n_k / N) w_k, BatchNorm buffers too; one round of it is the
  one-shot method of that name, byte for byte.
- ``fedprox`` [Li et al., MLSys 2020]: sites minimise L + mu/2 ||w - w_global||^2; mu = 0 is fedavg.
- ``scaffold`` [Karimireddy et al., ICML 2020], option II: gradients are moved by c - c_k; after its steps a site sets
  c_k <- c_k - c + (w_global - w_k) / r, and the server c <- sum_k (n_k / N) c_k (the paper's sites are of one size).
  r is what a constant gradient would have been multiplied by in these steps, sum_t lr_t (1 - m^t) / (1 - m) with
  momentum m: without momentum the paper's number of steps times its learning rate. With one site it is plain SGD.

Learning rates fall over all rounds as over one training; momentum begins anew in each. A round sends the model to each
site and back: R x K models either way, and as many control variates for SCAFFOLD.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from flyby.data.site import site_of
from flyby.data.splits import make_split
from flyby.errors import BadInput
from flyby.fusion.base import Server
from flyby.fusion.predictor import Predictor
from flyby.fusion.weights.average import AverageSettings, FedAvg
from flyby.machine import as_a_site, hardware, pick_device, versions
from flyby.models import Network
from flyby.objectives.base import Batch, Objective, Terms
from flyby.parcels.inbox import Inbox
from flyby.runs.config import RunConfig, data_of, plan
from flyby.runs.folder import Run
from flyby.runs.judge import Judge
from flyby.settings import build, parse_assignment
from flyby.training.loop import Session, at_once
from flyby.training.recipe import Recipe
from flyby.training.settings import TrainSettings


class RoundSettings(BaseModel):
    """A baseline of many rounds, as a study names it: ``fedprox:rounds=5,mu=0.1``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["fedavg", "fedprox", "scaffold"]
    rounds: int = Field(ge=1, le=10_000, description="how often all sites train and the server averages")
    epochs: int | None = Field(
        None, ge=1, description="local epochs per round; default: the run's epochs over all rounds, at least 1"
    )
    mu: float = Field(0.01, ge=0, description="of fedprox: the pull towards the model of the round's start")

    def local(self, epochs: int) -> int:
        return self.epochs or max(1, epochs // self.rounds)

    def said(self, config: RunConfig) -> str:
        """What a table calls it."""
        epochs = self.local(build(TrainSettings, config.train, "train").epochs)
        strength = f" mu={self.mu:g}" if self.kind == "fedprox" else ""
        counted = (f"{n} {word}{'s' * (n != 1)}" for n, word in ((self.rounds, "round"), (epochs, "epoch")))
        return f"{self.kind}{strength}, {' of '.join(counted)}{' (not one-shot)' * (self.rounds > 1)}"


def round_settings(words: str) -> RoundSettings:
    """From the words of a study."""
    kind, _, rest = words.partition(":")
    return build(RoundSettings, {"kind": kind, **dict(parse_assignment(s) for s in rest.split(",") if s)}, "rounds")


class Corrected:
    """A site's loss with mu/2 ||w - start||^2 and <shift, w> added, whose gradients are mu (w - start) and shift. Both
    lie in the same memory from round to round, where a recorded step finds them."""

    def __init__(self, objective: Objective, model: Network, mu: float) -> None:
        self.objective, self.mu = objective, mu
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.start, self.shift = ([torch.zeros_like(p) for p in self.weights] for _ in range(2))

    def loss(self, model: Network, batch: Batch, progress: Tensor) -> Terms:
        terms = self.objective.loss(model, batch, progress)
        extra = torch.zeros_like(terms.total)
        for weight, start, shift in zip(self.weights, self.start, self.shift, strict=True):
            extra = extra + self.mu / 2 * (weight - start).square().sum() + (weight * shift).sum()
        return Terms(terms.total + extra, terms.parts)

    def after_step(self, model: Network, terms: Terms, progress: Tensor) -> None:
        self.objective.after_step(model, terms, progress)


class Client:
    """One site that trains in every round, by the same steps as one that trains once."""

    def __init__(self, session: Session, settings: RoundSettings) -> None:
        self.session = session
        self.corrected: Corrected | None = None
        if settings.kind != "fedavg":
            self.corrected = Corrected(session.objective, session.learner, settings.mu * (settings.kind == "fedprox"))
            session.step.objective = self.corrected  # type: ignore[assignment]
            self.own = [torch.zeros_like(p) for p in self.corrected.weights]  # c_k of SCAFFOLD

    def train(self, epochs: int, weights: dict[str, Tensor] | None, control: list[Tensor]) -> None:
        """A round: from the server's weights (None: the common start), with its control variate c."""
        work = self.session
        if weights is not None:
            work.model.load_state_dict(weights)
        for value in (value for state in work.optimizer.state.values() for value in state.values()):
            value.zero_()  # momentum, in place: where a recorded step finds it
        if self.corrected is not None:
            torch._foreach_copy_(self.corrected.start, [p.detach() for p in self.corrected.weights])
        if control and self.corrected is not None:
            torch._foreach_copy_(self.corrected.shift, torch._foreach_sub(control, self.own))
        rates = list[float]()
        for _ in range(epochs):
            row = at_once(work.epoch)()
            work.state.advance(row, None)
            rates += [row["lr"]] * work.step.steps
        if control and self.corrected is not None:
            self._learn(control, rates)

    @torch.no_grad()
    def _learn(self, control: list[Tensor], rates: list[float]) -> None:
        """Option II: c_k <- c_k - c + (w_global - w_k) / r."""
        m, mine = self.session.recipe.train.momentum, self.corrected
        assert mine is not None
        r = sum(rate * (1 - m**t) / (1 - m) for t, rate in enumerate(rates, 1))
        for own, c, start, weight in zip(self.own, control, mine.start, mine.weights, strict=True):
            own.add_(c, alpha=-1).add_(start - weight, alpha=1 / r)


def run_rounds(config: RunConfig, settings: RoundSettings, folder: Run, device: str = "auto") -> dict[str, Any]:
    """All rounds over the split of this run, and what their model is worth: a result as a study's row has it."""
    began = time.perf_counter()
    device = pick_device(device)
    bundle = data_of(config).load()
    split = make_split(bundle.train, config.split, config.seed)
    todo = plan(config, bundle).normalised(bundle.train)
    local = settings.local(todo.recipe.train.epochs)
    recipe = _recipe(todo.recipe, settings, local)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.begin(config, todo.recipe.model_dump(mode="json"), split)
    loaded = time.perf_counter()
    with as_a_site(device):
        sites = [site_of(bundle, split, name) for name in split.shares]
        sessions = [Session(site, recipe, torch.device(device), None, config.method) for site in sites]
        predictor = together([Client(session, settings) for session in sessions], settings, local)
    trained = time.perf_counter()
    seen = Judge(bundle, split, device).look(predictor, split.shares)
    size = sum(t.nbytes for t in predictor.networks[0].state_dict().values())
    sent = settings.rounds * len(sites) * size * (2 if settings.kind == "scaffold" else 1)
    times = [round(end - start, 3) for start, end in pairwise((began, loaded, trained, time.perf_counter()))]
    return {
        "accuracy": seen.accuracy,
        "per_client": seen.own,
        "split_hash": split.hash,
        "seconds": round(sum(times), 3),
        "timings": dict(zip(("load", "train", "evaluate"), times, strict=True)),
        "model": recipe.spec.name,
        "epochs": todo.recipe.train.epochs,
        "clients": len(sites),
        "uploads": settings.rounds * len(sites),
        "bytes_up": sent,
        "bytes_down": sent,
        "hardware": hardware(device),
        "versions": versions(),
    }


def _recipe(recipe: Recipe, settings: RoundSettings, local: int) -> Recipe:
    """The sites' recipe over all rounds, without what only one upload carries."""
    train = recipe.train
    if train.patience is not None or train.ema or train.dp_epsilon is not None or recipe.codec != "fp32":
        raise BadInput("rounds know no patience, ema, dp_epsilon or codec; leave these settings out, or the rounds")
    if settings.kind == "scaffold" and train.optimizer != "sgd":
        raise BadInput(f"scaffold corrects the steps of sgd; leave out train.optimizer={train.optimizer}, or scaffold")
    plain = recipe.objective_settings.model_copy(update={"calibrate": False, "send": ()})
    total = train.model_copy(update={"epochs": settings.rounds * local, "snapshots": 0})
    return recipe.model_copy(update={"objective_settings": plain, "train": total})


def together(clients: list[Client], settings: RoundSettings, local: int) -> Predictor:
    """The server's model after all rounds."""
    weights: dict[str, Tensor] | None = None
    control = [torch.zeros_like(own) for own in clients[0].own] if settings.kind == "scaffold" else []
    images = [len(client.session.site.train) for client in clients]
    for number in range(1, settings.rounds + 1):
        for client in clients:
            client.train(local, weights, control)
        sent = Inbox([client.session.pack(number * local) for client in clients])
        predictor = FedAvg(AverageSettings()).fuse(sent, Server())
        weights = dict(predictor.networks[0].state_dict())
        for place, c in enumerate(control):
            c.zero_()
            for n, client in zip(images, clients, strict=True):
                c.add_(client.own[place], alpha=n / sum(images))
    return predictor
