"""Images without data, the half that all data-free rules share: teachers, the BatchNorm loss, the synthesis loop, the
pool.

One synthesis: a fresh generator and n noise vectors z with random targets y; a few Adam steps on both against ``L =
objective(x, teachers' logits) + bn * L_BN``; the images of the step with the least L are kept. L_BN(x) is over ALL
BatchNorm layers l of ALL clients k. As published it is sum_k sum_l ||mu_l(x) - mu_kl|| + ||var_l(x) - var_kl||, which
grows with the network and drowns the classes: in a trained ResNet-18 it is thousands of times their cross-entropy. So
by default it is mean_k mean_l mean_c |mu_lc(x) - mu_klc| / sigma_klc + |ln(var_lc(x) / sigma_klc^2)|, which is of order
1 in any network.

Memory. With W the bytes of a client's weights, A those of its activations for one image, n images in a batch and K
clients: ``resident: all`` K (W + n A); ``resident: one`` W + n A on the device and K W on the host, at the price of a
second forward pass. Beside it stay the pool, N (H W channels + 4 K C) bytes and once more for the checkpoint's copy,
and the student, 4 W + n A.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from flyby.fusion.base import FusionSettings
from flyby.fusion.distilled.batchnorm import Apart, distance, norms, relative, with_distance, without_distance
from flyby.models import ModelSpec, Network
from flyby.models.generator import Generator
from flyby.parcels.inbox import Inbox
from flyby.rng import generator
from flyby.training.graphs import Captured, one_shape
from flyby.training.steps import autocast

Resident = Literal["auto", "all", "one"]
Precision = Literal["auto", "fp32", "bf16"]
Objective = Callable[[Tensor, Tensor], Tensor]  # (images [N, C, H, W] in 0..1, clients' logits [K, N, C]) -> a loss
# Bytes that ``resident: auto`` lets all teachers take together; fixed, so that it decides alike everywhere.
ROOM = {"cpu": 2 << 30, "cuda": 32 << 30}


class SynthesisSettings(FusionSettings):
    """How one batch of images is made. The three weights are those of L = ce CE + bn L_BN + adv L_adv."""

    images: int = Field(256, ge=2, description="images made in each server epoch")
    latent: int = Field(256, ge=1, description="length of the noise vector z")
    generator_width: int = Field(
        64, ge=1, description="channels of the generator's last hidden layer; the others have twice as many"
    )
    steps: int = Field(30, ge=1, description="Adam steps on generator and z")
    generator_lr: float = Field(1e-3, gt=0)
    betas: tuple[float, float] = (0.5, 0.999)
    ce: float = Field(1.0, ge=0)
    bn: float = Field(1.0, ge=0)
    bn_form: Literal["relative", "sum", "mean"] = Field(
        "relative",
        description=(
            "L_BN in units of each channel's own spread; or as published, summed over the clients or divided by their"
            " number"
        ),
    )
    adv: float = Field(1.0, ge=0)
    adv_temperature: float = Field(1.0, gt=0)


def normalise(x: Tensor, spec: ModelSpec) -> Tensor:
    """Images in 0..1 as a network of this spec wants them; on whole 255ths the same as ``spec.prepare``."""
    mean, std = spec.statistics(x.device)
    return (x - mean.view(1, -1, 1, 1)) / std.view(1, -1, 1, 1)


def mix(weights: Tensor, logits: Tensor) -> Tensor:
    """The ensemble's logits sum_k w_k f_k(x), for logits [K, N, C] and weights [K], or [N, K] where each image has its
    own."""
    kind = logits.device.type
    # Never in bfloat16: what is learned are small differences between these sums.
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
        return torch.einsum("k,knc->nc" if weights.ndim == 1 else "nk,knc->nc", weights, logits)


class Teachers:
    """The clients' frozen networks, all of them on the device at once or one after the other over the same batch."""

    def __init__(
        self,
        parcels: Inbox,
        device: torch.device | str,
        resident: Resident = "auto",
        batch: int = 256,
        precision: Precision = "auto",
    ) -> None:
        self.device, self.precision, self.batch = torch.device(device), precision, batch
        self.specs = [m.spec for m in parcels.manifests]
        each = {spec: memory_of(spec) for spec in self.specs}
        needed = sum(weights + batch * activations for weights, activations in (each[spec] for spec in self.specs))
        self.together = resident == "all" or (resident == "auto" and needed <= ROOM.get(self.device.type, 2 << 30))
        home = self.device if self.together else torch.device("cpu")
        self._networks: list[Network] = []
        for item in parcels:
            network = item.network(home).eval().requires_grad_(False)
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self._networks.append(network)
        self.guests = (
            {
                spec: spec.skeleton().to_empty(device=self.device).eval().requires_grad_(False)
                for spec in set(self.specs)
            }
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

    def networks(self) -> Iterator[Network]:
        """Each network on the device, in client order; what is streamed is overwritten by the next one."""
        for network in self._networks:
            if guest := self.guests.get(network.spec):
                guest.load_state_dict(network.state_dict())
            yield guest or network

    def logits(self, x: Tensor) -> Tensor:
        """f_k(x) of every client, [K, N, C], without gradient; networks are the outer loop, so that each is fetched
        once."""
        with torch.no_grad(), autocast(self.precision, self.device):
            return torch.stack(
                [
                    torch.cat([network(normalise(part, network.spec)).float() for part in torch.split(x, self.batch)])
                    for network in self.networks()
                ]
            )

    def pull(
        self, x: Tensor, objective: Objective, bn: float | None = None, apart: Apart = distance
    ) -> tuple[Tensor, Tensor, Tensor]:
        """L = objective(x, logits) + bn L_BN with its gradient at the images: (L, L_BN, dL/dx); without ``bn`` no L_BN
        is found at all.

        One network at a time, the chain rule is cut at the logits: they are found first without gradient, then each
        network pulls dL/df_k back to the images by itself.
        """
        x, (see, bn) = x.detach().requires_grad_(), (without_distance, 0.0) if bn is None else (with_distance, bn)
        if self.together:
            with autocast(self.precision, self.device):
                outs, distances = zip(
                    *(see(net, normalise(x, net.spec), apart) for net in self.networks()), strict=True
                )
                total = torch.stack(distances).sum()
                loss = objective(x, torch.stack(outs)) + bn * total
            (gradient,) = torch.autograd.grad(loss, x)
            return loss.detach(), total.detach(), gradient
        logits = self.logits(x).requires_grad_()
        with autocast(self.precision, self.device):
            loss = objective(x, logits)
        direct, pulls = torch.autograd.grad(loss, (x, logits), allow_unused=True)
        gradient = torch.zeros_like(x) if direct is None else direct
        loss, total = loss.detach(), torch.zeros((), device=x.device)
        for network, wanted in zip(self.networks(), pulls, strict=True):
            with autocast(self.precision, self.device):
                out, off = see(network, normalise(x, network.spec), apart)
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


class Synthesis:
    """Where batches of images are made: a generator, its noise and its optimiser. Every batch begins anew but in the
    same memory, so that on a GPU one recorded step serves them all. ``objective`` takes (x, logits, targets)."""

    def __init__(
        self,
        teachers: Teachers,
        classes: int,
        objective: Callable[[Tensor, Tensor, Tensor], Tensor],
        settings: SynthesisSettings,
    ) -> None:
        self.teachers, self.classes, self.objective, self.settings = teachers, classes, objective, settings
        self.share = 1.0 if settings.bn_form == "sum" else 1 / len(teachers)  # of a client's distance in L_BN
        spec, device = teachers.specs[0], teachers.device
        self.maker = self._fresh(generator("place")).to(device)
        self.z = torch.empty(settings.images, settings.latent, device=device, requires_grad=True)
        self.targets = torch.empty(settings.images, dtype=torch.int64, device=device)
        self.best = torch.empty((settings.images, spec.channels, *spec.size), device=device)
        self.least, self.distance = torch.zeros((), device=device), torch.zeros((), device=device)
        on_gpu = device.type == "cuda"
        self.optimizer = torch.optim.Adam(
            [*self.maker.parameters(), self.z], lr=settings.generator_lr, betas=settings.betas, capturable=on_gpu
        )
        self.captured = Captured() if on_gpu and teachers.together else None

    def _fresh(self, rng: torch.Generator) -> Generator:
        spec = self.teachers.specs[0]
        return Generator.build(spec.size, spec.channels, self.settings.latent, self.settings.generator_width, rng)

    def make(self, *key: object) -> tuple[Tensor, Tensor, dict[str, float]]:
        """One batch of images (uint8 [n, H, W, C]) with its targets, and what it reached."""
        rng = generator(*key, "synthesis")
        self.maker.load_state_dict(self._fresh(rng).state_dict())
        self.z.data.copy_(torch.randn(self.z.shape, generator=rng))
        self.targets.copy_(torch.randint(self.classes, self.targets.shape, generator=rng))
        self.best.zero_()
        self.least.fill_(torch.inf)
        for memory in self.optimizer.state.values():
            for tensor in memory.values():
                tensor.zero_()
        with one_shape():
            for _ in range(self.settings.steps):
                self._step() if self.captured is None else self.captured(self._step)
        images = self.best.mul(255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()
        reached = {"synthesis_loss": float(self.least)}
        return (
            images,
            self.targets.clone(),
            reached | ({"bn_distance": self.share * float(self.distance)} if self.settings.bn else {}),
        )

    def _step(self) -> None:
        bn, apart = self.share * self.settings.bn or None, relative if self.settings.bn_form == "relative" else distance
        x = self.maker(self.z)
        loss, off, gradient = self.teachers.pull(
            x, lambda x, logits: self.objective(x, logits, self.targets), bn, apart
        )
        better = loss < self.least  # decided on the device: nothing waits for it
        for kept, new in ((self.best, x.detach()), (self.distance, off), (self.least, loss)):
            kept.copy_(torch.where(better, new, kept))
        self.optimizer.zero_grad(set_to_none=True)
        x.backward(gradient)
        self.optimizer.step()


class Pool(nn.Module):
    """Images (uint8 [N, H, W, C]) with their targets and every client's logits on them [N, K, C]; ``weights`` [K] are
    the ensemble's.

    A module, so that a checkpoint carries it; ``kept`` False leaves the images out, for data that can be read again.
    """

    def __init__(self, spec: ModelSpec, clients: int, device: torch.device | str, kept: bool = True) -> None:
        super().__init__()
        self.register_buffer(
            "images", torch.zeros((0, *spec.size, spec.channels), dtype=torch.uint8, device=device), persistent=kept
        )
        self.register_buffer("labels", torch.zeros(0, dtype=torch.int64, device=device), persistent=kept)
        self.register_buffer("logits", torch.zeros((0, clients, spec.classes), device=device), persistent=kept)
        self.register_buffer("weights", torch.full((clients,), 1 / clients, device=device))

    images: Tensor
    labels: Tensor
    logits: Tensor
    weights: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def add(self, images: Tensor, labels: Tensor, logits: Tensor) -> None:
        """More images; ``logits`` as teachers give them, [K, n, C]."""
        self.images, self.labels = torch.cat((self.images, images)), torch.cat((self.labels, labels))
        self.logits = torch.cat((self.logits, logits.transpose(0, 1)))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        for name in state_dict:  # a pool takes whatever number of images it is given
            setattr(self, name, torch.empty_like(state_dict[name]))
        return super().load_state_dict(state_dict, strict, assign)


def as_unit(images: Tensor) -> Tensor:
    """uint8 [N, H, W, C] to 0..1 [N, C, H, W]."""
    return images.float().div(255).permute(0, 3, 1, 2)


def as_pictures(images: Tensor, columns: int = 16, most: int = 64) -> dict[str, Any]:
    """The first images (uint8 [N, H, W, C]) as the ``images`` of a section of the report: so many in a row."""
    part = images[:most].cpu().contiguous()
    return {
        "shape": list(part.shape),
        "columns": columns,
        "pixels": base64.b64encode(part.numpy().tobytes()).decode(),
    }
