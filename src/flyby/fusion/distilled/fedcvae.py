"""FedCVAE's server [Heinbaugh, Luz-Ricca and Shao, ICLR 2023]: the clients' decoders paint a training set.

``fedcvae`` (the paper's ENS): client k's decoder paints n_k / N of the images, labels from its own class frequencies, z
from a truncated normal; a fresh classifier is trained on them, with a little noise. ``fedcvae-kd``: all decoders are
first distilled into one, min_D sum_k (n_k / N) E_{z, y ~ client k} ||D(z, y) - D_k(z, y)||^2, and that one paints all
images, labels uniform over the classes that somebody holds. The classifier learns the labels that were asked for, or
(ours) with ``teacher`` what an ensemble of the clients' classifiers says of the images: KL at T = 1. Every epoch names
its own draws, so an interrupted fusion goes on from its last saved epoch to the same result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import AfterValidator, Field
from torch import Tensor, nn

from flyby.errors import BadInput, Diverged
from flyby.files import digest
from flyby.fusion.base import Fusion, FusionSettings, Server
from flyby.fusion.distilled.distill import Clock, StudentName, student_spec
from flyby.fusion.distilled.synthesis import as_pictures
from flyby.fusion.distilled.teachers import MEANS, Teachers, known_teacher, normalise, rule_of, teacher_of, teaching_of
from flyby.fusion.predictor import Predictor, Single
from flyby.models.decoder import Decoder, DecoderSpec, build
from flyby.objectives.kd import softened_kl
from flyby.parcels.inbox import Inbox
from flyby.rng import generator
from flyby.statistics.decoder import decoder_of
from flyby.training.checkpoint import TrainingState
from flyby.training.steps import batches

SHOWN = 8  # images per class in the report


@dataclass(frozen=True)
class Painter:
    """A client's decoder, its share n_k / N of all samples and its label frequencies [C]."""

    decoder: Decoder
    share: float
    frequencies: Tensor


@dataclass(frozen=True)
class Drawn:
    """Latents [n, latent], labels [n] and what a decoder made of them: pixels in 0..1 [n, C, H, W]."""

    z: Tensor
    labels: Tensor
    pixels: Tensor


def labels_or_teacher(word: str) -> str:
    return word if word == "labels" else known_teacher(word)


class FedCvaeSettings(FusionSettings):
    teacher: Annotated[str, AfterValidator(labels_or_teacher)] = Field(
        "labels",
        description="what the classifier learns: the labels asked for (as published), or a teacher's answers",
    )
    images: int = Field(3000, ge=2, description="synthetic images to train on")
    truncation: float = Field(2.0, gt=0, description="no entry of z is farther than this from 0")
    epochs: int = Field(15, ge=1, description="of the classifier")
    batch: int = Field(64, ge=2, description="images in a step")
    lr: float = Field(1e-3, gt=0, description="learning rate of the classifier")
    noise: float = Field(
        0.2, ge=0, description="spread of the noise that each pixel (in 0..1) gets, anew in every epoch"
    )
    student: StudentName = Field(None, description="architecture of the classifier; the first client's where not named")


class FedCvae(Fusion):
    name = "fedcvae"
    paper = "FedCVAE: Heinbaugh et al., ICLR 2023"
    about = "a classifier trained on images that the clients' decoders paint"
    needs = frozenset({"class_counts", "decoder"})
    heterogeneous = True
    draws = True
    settings_type: ClassVar[type[FusionSettings]] = FedCvaeSettings
    settings: FedCvaeSettings

    def __init__(self, settings: FusionSettings | None = None) -> None:
        super().__init__(settings)
        if self.settings.teacher not in ("labels", *MEANS):
            rule = rule_of(self.settings.teacher)
            self.needs, self.wants = self.needs | rule.needs, rule.wants

    def teacher(self, parcels: Inbox, server: Server) -> Predictor | None:
        word = self.settings.teacher
        return None if word == "labels" else teacher_of(word, parcels, server)

    def told(self, parcels: Inbox, server: Server, pixels: Tensor) -> Tensor | None:
        """The teacher's log-scores for the images as they were painted, without the noise."""
        if self.settings.teacher == "labels":
            return None
        teaching = teaching_of(self.settings.teacher, parcels, server)
        teachers = Teachers(parcels, server.device, teaching=teaching)
        shares = torch.full((len(parcels),), 1 / len(parcels), device=pixels.device)
        return teachers.answer(shares, teachers.say(pixels))

    def combine(self, parcels: Inbox, server: Server) -> Predictor:
        seed, device = server.seed, torch.device(server.device)
        spec = student_spec(parcels, self.settings.student).replace(head="linear", logit_scale=False)
        painters = painters_of(parcels, self.name, device)
        identity = digest(
            [self.name, [m.digest for m in parcels.manifests], self.settings.model_dump(mode="json"), seed]
        )
        stages = Stages(self.name, server.work, identity)
        told = len(server.report)
        painted = self.paint(painters, server, stages)
        network = spec.build(generator(seed, "server", "student")).to(device).train()
        pixels, labels, rng = painted.pixels, painted.labels, generator(seed)
        answers = self.told(parcels, server, pixels)

        def order(epoch: int) -> Iterable[Tensor]:
            nonlocal rng
            rng = generator(seed, "server", "noise", epoch, device=device)
            return batches(len(labels), self.settings.batch, generator(seed, "server", "order", epoch), device)

        def loss_of(rows: Tensor) -> Tensor:
            # A decoder gives means: without noise a classifier learns to rely on a smoothness that photographs do not
            # have.
            x = pixels[rows] + self.settings.noise * torch.randn(pixels[rows].shape, generator=rng, device=device)
            scores = network(normalise(x, spec))
            if answers is not None:
                return softened_kl(scores, answers[rows], 1.0).mean()
            return F.cross_entropy(scores, labels[rows])

        history = stages.train("classifier", network, self.settings.epochs, self.settings.lr, order, loss_of)
        text = (
            f"{len(labels)} images painted by {len(painters)} clients' decoders, here up to {SHOWN} of each class, one"
            " class per row."
        )
        server.report.insert(
            told,
            {
                "title": "Synthetic images",
                "text": text,
                "images": as_pictures(by_class(painted), columns=SHOWN, most=SHOWN * 20),
            },
        )
        server.report.append(fallen("Classifier trained on synthetic images", "cross-entropy", history))
        return Single([spec], parcels.class_names, [network.eval().cpu()])

    def paint(self, painters: Sequence[Painter], server: Server, stages: Stages) -> Drawn:
        """The training set, client by client in proportion to their sizes."""
        return draw(painters, self.settings.images, self.settings.truncation, (server.seed, "server", "paint"))


class FedCvaeKdSettings(FedCvaeSettings):
    distil_epochs: int = Field(30, ge=1, description="each over as many fresh (z, y) as there will be images")
    distil_lr: float = Field(1e-3, gt=0, description="learning rate of the distilled decoder")


class FedCvaeKd(FedCvae):
    name = "fedcvae-kd"
    about = "the clients' decoders distilled into one, which paints the classifier's training set"
    settings_type: ClassVar[type[FusionSettings]] = FedCvaeKdSettings
    settings: FedCvaeKdSettings

    def paint(self, painters: Sequence[Painter], server: Server, stages: Stages) -> Drawn:
        seed, spec = server.seed, one_latent(painters)
        device = painters[0].frequencies.device
        student = build(Decoder, spec, generator(seed, "server", "decoder")).to(device)
        asked: Drawn

        def order(epoch: int) -> Iterable[Tensor]:
            nonlocal asked
            asked = draw(painters, self.settings.images, self.settings.truncation, (seed, "server", "distil", epoch))
            return batches(
                len(asked.labels), self.settings.batch, generator(seed, "server", "distil-order", epoch), device
            )

        def loss_of(rows: Tensor) -> Tensor:
            return F.mse_loss(student(asked.z[rows], asked.labels[rows]), asked.pixels[rows])

        history = stages.train("decoder", student, self.settings.distil_epochs, self.settings.distil_lr, order, loss_of)
        server.report.append(fallen("Decoders distilled into one", "mean squared error per pixel", history))
        held = (torch.stack([p.frequencies for p in painters]).sum(0) > 0).double()
        return draw(
            [Painter(student, 1.0, held / held.sum())],
            self.settings.images,
            self.settings.truncation,
            (seed, "server", "paint"),
        )


def painters_of(parcels: Inbox, rule: str, device: torch.device | str) -> list[Painter]:
    """The clients that said what they hold. One whose (noisy) counts are all 0 cannot be asked for anything and is left
    out."""
    counts = parcels.counts.to(device)
    total = sum(n for n, row in zip(parcels.samples, counts, strict=True) if row.sum() > 0)
    if total == 0:
        raise BadInput(f"no client says which classes it holds, so {rule} cannot draw labels; use --fusion ensemble")
    painters = []
    for item, row in zip(parcels, counts, strict=True):
        decoder = decoder_of(item).to(device)
        if row.sum() > 0:
            painters.append(Painter(decoder, item.manifest.samples / total, row / row.sum()))
    return painters


def one_latent(painters: Sequence[Painter]) -> DecoderSpec:
    """The distilled decoder: the widest client's. All must read the same z."""
    specs = [p.decoder.spec for p in painters]
    if len({spec.latent for spec in specs}) > 1:
        raise BadInput(
            "fedcvae-kd asks all decoders at the same z, but their latents differ in length; use --fusion fedcvae"
        )
    return max(specs, key=lambda spec: spec.width)


@torch.no_grad()
def draw(painters: Sequence[Painter], images: int, truncation: float, key: tuple[object, ...]) -> Drawn:
    """``images`` images of several decoders, as many of each as its share, with labels from its frequencies. Decoders
    whose z differ in length leave no common ``z``."""
    latents, labels, pixels = [], [], []
    for k, (painter, n) in enumerate(zip(painters, apportion([p.share for p in painters], images), strict=True)):
        if n == 0:
            continue
        rng, device = generator(*key, k), painter.frequencies.device  # drawn on the host: the same on every device
        z = truncated_normal((n, painter.decoder.spec.latent), truncation, rng).to(device)
        y = torch.multinomial(painter.frequencies.float().cpu(), n, replacement=True, generator=rng).to(device)
        latents.append(z)
        labels.append(y)
        pixels += [painter.decoder(z[i : i + 512], y[i : i + 512]) for i in range(0, n, 512)]
    same = len({z.shape[1] for z in latents}) == 1
    return Drawn(torch.cat(latents) if same else torch.empty(0), torch.cat(labels), torch.cat(pixels))


def apportion(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers in proportion to ``shares`` that add up to ``total``: the largest remainders are rounded up."""
    exact = [share * total for share in shares]
    whole = [int(value) for value in exact]
    for k in sorted(range(len(exact)), key=lambda k: (whole[k] - exact[k], k))[: total - sum(whole)]:
        whole[k] += 1
    return whole


def truncated_normal(shape: tuple[int, ...], limit: float, rng: torch.Generator) -> Tensor:
    """N(0, 1) given |z| <= limit, by the inverse of its distribution function (no rejection: the number of draws is
    known)."""
    low = torch.special.ndtr(torch.tensor(-limit, dtype=torch.float64))
    u = torch.rand(shape, generator=rng, dtype=torch.float64) * (1 - 2 * low) + low
    z: Tensor = torch.special.ndtri(u)
    return z.clamp(-limit, limit).float()


def as_images(pixels: Tensor) -> Tensor:
    """0..1 [n, C, H, W] as uint8 [n, H, W, C], what every network of flyby takes."""
    return pixels.permute(0, 2, 3, 1).mul(255).round().clamp(0, 255).to(torch.uint8)


def by_class(painted: Drawn) -> Tensor:
    """The first images of every class, as rows of ``SHOWN``; white where there are fewer."""
    images, labels = as_images(painted.pixels).cpu(), painted.labels.cpu()
    rows = []
    for c in sorted(set(labels.tolist())):
        row = torch.full((SHOWN, *images.shape[1:]), 255, dtype=torch.uint8)
        found = images[labels == c][:SHOWN]
        row[: len(found)] = found
        rows.append(row)
    return torch.cat(rows)


def fallen(title: str, what: str, history: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A section of the report: a loss in the first, middle and last epochs."""
    shown = sorted({0, len(history) // 2, len(history) - 1})
    return {
        "title": title,
        "table": {
            "columns": ["epoch", what],
            "rows": [[history[i]["epoch"], round(history[i]["loss"], 5)] for i in shown],
        },
    }


class Stages:
    """Trainings one after the other, each with a checkpoint in ``work`` that only this very fusion goes on from."""

    def __init__(self, rule: str, work: Path | None, identity: str) -> None:
        self.rule, self.work, self.identity = rule, work, identity

    def train(
        self,
        stage: str,
        model: nn.Module,
        epochs: int,
        lr: float,
        order: Callable[[int], Iterable[Tensor]],
        loss_of: Callable[[Tensor], Tensor],
    ) -> list[dict[str, Any]]:
        """Adam with a cosine over the epochs; returns one row an epoch with its mean loss. ``order`` gives an epoch's
        batches of rows."""
        path = self.work / f"{self.rule}-{stage}-{self.identity}.ckpt" if self.work else None
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        state = TrainingState(path, self.identity, model, optimizer, nn.Module())
        state.restore()
        clock = Clock(f"{self.rule} ({stage})", state.epoch, epochs)
        with state:  # whatever ends the loop early, the state after the last whole epoch is saved
            while state.epoch < epochs:
                for group in optimizer.param_groups:
                    group["lr"] = lr * (1 + math.cos(math.pi * state.epoch / epochs)) / 2
                losses = []
                for rows in order(state.epoch):
                    loss = loss_of(rows)
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    losses.append(loss.detach())
                mean = float(torch.stack(losses).mean())
                if not math.isfinite(mean):
                    raise Diverged(
                        f"{self.rule} diverged in epoch {state.epoch + 1} of its {stage}; lower its learning rate"
                    )
                state.advance({"epoch": state.epoch + 1, "loss": mean}, None)
                clock.tick(state, mean)
        state.save()
        return state.rows
