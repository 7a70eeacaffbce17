"""Who teaches: the clients' frozen networks, and the rule by which they become one teacher.

``logits``, as DENSE and its kin were published: t(x) = sum_k w_k f_k(x), with f_k client k's logits. ``probabilities``:
t(x) = log sum_k w_k softmax(f_k(x)), which is far stronger where clients lack classes: a client that never saw one
gives it a large negative logit, and in a mean of logits that is a veto. Any server rule that keeps all networks
(``experts-calibrated``, ``iffi``, ``ensemble-median`` ...) teaches with the logarithm of its chances; its settings
follow a colon, ``ensemble:mean=logits;weights=size``.

On a GPU the networks answer in their frozen form (``frozen``), and with L_BN as they came.

Memory. With W the bytes of a client's weights, A those of its activations for one image, n images in a batch and K
clients: ``resident: all`` K (W + n A), on a GPU K W / 2 more for the frozen forms; ``resident: one`` W + n A on the
device and K W on the host, at the price of a second forward pass. Beside it stay the pool, N (H W channels + 4 K C)
bytes and once more for the checkpoint's copy, and the student, 4 W + n A.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import AfterValidator
from torch import Tensor, nn

from flyby.errors import BadInput, unknown
from flyby.fusion.alignment import aligned
from flyby.fusion.base import FUSIONS, Fusion, Server
from flyby.fusion.distilled.batchnorm import Apart, distance, norms, with_distance, without_distance
from flyby.fusion.distilled.frozen import as_written, compiled, frozen
from flyby.fusion.distilled.views import crop_and_flip, site_views
from flyby.fusion.predictor import Ensemble, Predictor, mean_of_those
from flyby.models import ModelSpec, Network
from flyby.models.cost import cost_of
from flyby.models.heads import HEADS
from flyby.models.memory import allocate
from flyby.models.shifts import WAYS
from flyby.parcels.inbox import Inbox
from flyby.settings import build, parse_assignment
from flyby.training.graphs import Captured
from flyby.training.settings import Compile, Precision, TrainSettings
from flyby.training.steps import autocast, fully_compiled, halved, precision_of

Resident = Literal["auto", "all", "one"]
Objective = Callable[[Tensor, Tensor], Tensor]  # (images [N, C, H, W] in 0..1, what clients say [K, N, D]) -> a loss
MEANS = ("logits", "probabilities")  # teachers that are weighted means, whose weights a rule may learn
# Bytes that ``resident: auto`` lets all teachers take together; fixed, so that it decides alike everywhere.
ROOM = {"cpu": 2 << 30, "cuda": 32 << 30}
TINY = 1e-12


def known_teacher(word: str) -> str:
    if word not in MEANS:
        rule_of(word)
    return word


TeacherName = Annotated[str, AfterValidator(known_teacher)]


def rule_of(word: str) -> Fusion:
    """The server rule that ``NAME`` or ``NAME:key=value;key=value`` stands for."""
    name, _, words = word.partition(":")
    if name not in FUSIONS:
        raise unknown("teacher", name, [*MEANS, *FUSIONS])
    kind = FUSIONS[name]
    if kind.draws:
        raise BadInput(f"{name} is itself distilled and cannot teach; choose ensemble or experts-calibrated")
    values = dict(parse_assignment(text) for text in words.split(";") if text)
    return kind(build(kind.settings_type, values, "teacher"))


def teacher_of(word: str, parcels: Inbox, server: Server, weights: list[float] | None = None) -> Predictor:
    """The teacher as a predictor of its own, to be judged or kept; ``weights`` are those that a mean learned."""
    if word in MEANS:
        parcels = aligned(parcels, ("weights",), whole=True)
        specs = [m.spec for m in parcels.manifests]
        networks, held = parcels.networks(), parcels.held
        return Ensemble(specs, parcels.class_names, networks, mean=word, weights=weights or (), held=held)
    made = rule_of(word).fuse(parcels, Server(server.proxy, server.seed, server.device))
    if len(made.specs) != len(parcels):
        raise BadInput(
            f"{word} makes one network of all, so there is no ensemble to learn from; choose a teacher that keeps every"
            " network, such as ensemble or experts-calibrated"
        )
    return made


def exactly(x: Tensor) -> AbstractContextManager[Any]:
    """Never in bfloat16: what is learned are small differences between such sums."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def mix(weights: Tensor, logits: Tensor, held: Tensor | None = None) -> Tensor:
    """The ensemble's logits sum_k w_k f_k(x), for logits [K, N, C] and weights [K], or [N, K] where each image has its
    own; where some do not know all classes (``held`` [K, C]), for each class the mean of those who do."""
    with exactly(logits):
        if held is not None:
            return mean_of_those(weights, logits.float(), held)
        return torch.einsum("k,knc->nc" if weights.ndim == 1 else "nk,knc->nc", weights, logits)


class Teaching:
    """How one teacher follows from what the clients say: here the mean of logits. What a client says [N, D] begins with
    its logits, whatever else a rule asks it for."""

    weighted = True

    def ways(self, spec: ModelSpec) -> int:
        """How often a network of this spec looks at an image."""
        return 1

    def __init__(self, held: Tensor | None = None) -> None:
        self.held = held

    def say(self, k: int, network: Network, x: Tensor) -> Tensor:
        return network(x).float()  # type: ignore[no-any-return]

    def answer(self, weights: Tensor, said: Tensor) -> Tensor:
        """The teacher's log-scores [N, C] for said [K, N, D]; only their softmax means anything."""
        return mix(weights, said, self.held)


class Probabilities(Teaching):
    """log sum_k w_k softmax(f_k) / sum_k w_k, by log-sum-exp: an image that every client is sure not to show a class
    still has a gradient towards it, and a weight of 0 one too. Without the division every weight would want to grow."""

    def answer(self, weights: Tensor, said: Tensor) -> Tensor:
        with exactly(said):
            shares = (weights / weights.sum() + TINY).log()
            return (said.log_softmax(2) + shares[:, None, None]).logsumexp(0)


class ByRule(Teaching):
    """A server rule's own answer, from the same networks: only its tables are kept, not its copy of them. Networks that
    know a shift look in all its ways where the rule does. Voices of different lengths are filled up with zeros."""

    weighted = False

    def __init__(self, predictor: Predictor, device: torch.device | str) -> None:
        self.shows = predictor.shows
        members: Any = predictor.networks if predictor.shelf is None else predictor.shelf
        self.shapes: list[torch.Size] = []
        with torch.no_grad():
            for k, one in enumerate(members):
                seen = torch.zeros(1, *[WAYS] * (self.ways(one.spec) > 1), one.feature_dim)
                self.shapes.append(predictor.voice(k, one, seen).shape[1:])
        self.longest = max(shape.numel() for shape in self.shapes)
        predictor.networks, predictor.shelf = nn.ModuleList(), None
        self.predictor, self.classes = predictor.to(device), len(predictor.class_names)

    def ways(self, spec: ModelSpec) -> int:
        return WAYS if self.shows and HEADS[spec.head].shift else 1

    def say(self, k: int, network: Network, x: Tensor) -> Tensor:
        seen = network.shown(x) if self.shows else network.features(x)
        logits: Tensor = network.head(seen if seen.ndim == 2 else seen[:, 0]).float()
        with exactly(x):
            voice = self.predictor.voice(k, network, seen.float()).flatten(1)
            return torch.cat((logits, F.pad(voice, (0, self.longest - voice.shape[1]))), 1)

    def answer(self, weights: Tensor, said: Tensor) -> Tensor:
        with exactly(said):
            each = zip(said, self.shapes, strict=True)
            voices = [one[:, self.classes : self.classes + shape.numel()].unflatten(1, shape) for one, shape in each]
            scores = self.predictor.combine(voices, said)
            return self.predictor.chances(scores).clamp_min(TINY).log()


def held_by(parcels: Inbox, device: torch.device | str) -> Tensor | None:
    """Which classes each client's network knows; None where all know all."""
    held = parcels.held.to(device)
    return None if bool(held.all()) else held


def teaching_of(word: str, parcels: Inbox, server: Server) -> Teaching:
    if word in MEANS:
        held = held_by(parcels, server.device)
        return Teaching(held) if word == "logits" else Probabilities(held)
    return ByRule(teacher_of(word, parcels, server), server.device)


def normalise(x: Tensor, spec: ModelSpec) -> Tensor:
    """Images in 0..1 as a network of this spec wants them; on whole 255ths the same as ``spec.prepare``."""
    mean, std = spec.statistics(x.device)
    return (x - mean.view(1, -1, 1, 1)) / std.view(1, -1, 1, 1)


class Teachers:
    """The clients' frozen networks, all of them on the device at once or one after the other over the same batch, and
    the ``teaching`` by which they are one teacher."""

    def __init__(
        self,
        parcels: Inbox,
        device: torch.device | str,
        resident: Resident = "auto",
        batch: int = 256,
        precision: Precision = "auto",
        teaching: Teaching | None = None,
        compile: Compile = "auto",
    ) -> None:
        self.device, self.batch = torch.device(device), batch
        self.how, self.alike = compile, frozenset[int]()
        self.teaching = teaching or Teaching()
        self.pad, self.mirror = site_views(parcels)
        self.specs = [m.spec for m in parcels.manifests]
        self.classes = self.specs[0].classes
        largest = max(self.specs, key=lambda spec: cost_of(spec).multiply_adds)
        self.asked, self.precision = precision, precision_of(precision, largest, self.device)
        each = dict[ModelSpec, tuple[int, int]]()  # bytes of weights, and of activations per image
        for spec in self.specs:
            weights, activations = memory_of(spec)
            each[spec] = weights, activations * self.teaching.ways(spec)
        needed = sum(weights + batch * activations for weights, activations in (each[spec] for spec in self.specs))
        needed += sum(each[spec][0] for spec in self.specs) // 2 if self.device.type == "cuda" else 0
        self.together = resident == "all" or (resident == "auto" and needed <= ROOM.get(self.device.type, 2 << 30))
        home = self.device if self.together else torch.device("cpu")
        self._networks: list[Network] = []
        self._frozen: list[Network] = []
        for item in parcels:
            network = item.network().eval().requires_grad_(False)
            if self.device.type == "cuda" and self.together:
                self._frozen.append(frozen(network, self.device, halved(precision, self.device)))
            network.to(home)
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self._networks.append(network)
        self.guests = (
            {spec: allocate(spec.skeleton(), self.device).eval().requires_grad_(False) for spec in set(self.specs)}
            if home != self.device
            else {}
        )
        self.normed = [bool(norms(network)) for network in self._networks]
        if self.together:
            self.peak = needed
        else:
            on_host = 0 if self.guests else sum(each[spec][0] for spec in self.specs)
            self.peak = on_host + max(weights + batch * activations for weights, activations in each.values())

    def __len__(self) -> int:
        return len(self._networks)

    @property
    def still(self) -> bool:
        """Whether every view is the image itself."""
        return not (self.pad or self.mirror)

    def networks(self) -> Iterator[Network]:
        """Each network on the device, in client order; what is streamed is overwritten by the next one."""
        for network in self._networks:
            if guest := self.guests.get(network.spec):
                guest.load_state_dict(network.state_dict())
            yield guest or network

    def answering(self) -> Iterator[Network]:
        """The same for answers alone, in their frozen form where there is one."""
        return iter(self._frozen) if self._frozen else self.networks()

    def quicken(self, views: float, sizes: Iterable[int]) -> None:
        """Compile those that are to see so many ``views`` that it pays; only batches of these ``sizes`` are then
        answered by compiled networks."""
        for network in self._frozen:
            settings = TrainSettings(compile=self.how)
            if fully_compiled(settings, network.spec, self.device, views) and compiled(network):
                self.alike = frozenset(sizes)

    def recorder(self, *rngs: torch.Generator) -> Captured | None:
        """What replays a step in which these networks answer, where it can be recorded."""
        return Captured(rngs) if self.device.type == "cuda" and self.together and self.how != "off" else None

    def _unlike(self, count: int) -> AbstractContextManager[Any]:
        return as_written(bool(self.alike) and count not in self.alike)

    def view(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """Images in 0..1 shifted and mirrored as the sites' own were."""
        return crop_and_flip(x, self.pad, self.mirror, rng)

    def say(self, x: Tensor) -> Tensor:
        """What every client says of the images, [K, N, D], without gradient; networks are the outer loop, so that each
        is fetched once."""
        with torch.no_grad(), autocast(self.precision, self.device):
            return torch.stack(
                [
                    torch.cat([self._one(k, network, part) for part in torch.split(x, self.batch)])
                    for k, network in enumerate(self.answering())
                ]
            )

    def _one(self, k: int, network: Network, x: Tensor) -> Tensor:
        with self._unlike(len(x)):
            return self.teaching.say(k, network, normalise(x, network.spec))

    def answer(self, weights: Tensor, said: Tensor) -> Tensor:
        """The teacher's log-scores [N, C]."""
        return self.teaching.answer(weights, said)

    def pull(
        self, x: Tensor, objective: Objective, bn: float | None = None, apart: Apart = distance
    ) -> tuple[Tensor, Tensor, Tensor]:
        """L = objective(x, said) + bn L_BN with its gradient at the images: (L, L_BN, dL/dx); without ``bn`` no L_BN is
        found at all.

        One network at a time, the chain rule is cut at what clients say: that is found first without gradient, then
        each network pulls its part of dL back to the images by itself.
        """
        members = self.answering if bn is None else self.networks
        x, (see, bn) = x.detach().requires_grad_(), (without_distance, 0.0) if bn is None else (with_distance, bn)
        says = [partial(self.teaching.say, k) for k in range(len(self))]
        if self.together:
            with autocast(self.precision, self.device):
                with self._unlike(len(x)):
                    outs, distances = zip(
                        *(see(n, normalise(x, n.spec), apart, say) for n, say in zip(members(), says, strict=True)),
                        strict=True,
                    )
                total = torch.stack(distances).sum()
                loss = objective(x, torch.stack(outs)) + bn * total
            (gradient,) = torch.autograd.grad(loss, x)
            return loss.detach(), total.detach(), gradient
        said = self.say(x).requires_grad_()
        with autocast(self.precision, self.device):
            loss = objective(x, said)
        direct, pulls = torch.autograd.grad(loss, (x, said), allow_unused=True)
        gradient = torch.zeros_like(x) if direct is None else direct
        loss, total = loss.detach(), torch.zeros((), device=x.device)
        for network, say, wanted in zip(self.networks(), says, pulls, strict=True):
            with autocast(self.precision, self.device):
                out, off = see(network, normalise(x, network.spec), apart, say)
            gradient += torch.autograd.grad((out * wanted).sum() + bn * off, x)[0]
            total += off.detach()
        return loss + bn * total, total, gradient


def memory_of(spec: ModelSpec) -> tuple[int, int]:
    """(bytes of the weights, bytes of all layers' outputs for one image) in float32, found without computing
    anything."""
    network = spec.skeleton().eval()
    numbers = 0

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal numbers
        numbers += output.numel()

    for module in network.modules():
        if next(module.children(), None) is None:
            module.register_forward_hook(count)
    network(torch.empty((1, spec.channels, *spec.size), device="meta"))
    return sum(math.prod(shape) * 4 for shape, _ in spec.shapes().values()), 4 * numbers
