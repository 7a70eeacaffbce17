"""Images without data, the half that all data-free rules share: the synthesis loop and the pool.

One synthesis: a fresh generator and n noise vectors z with random targets y; a few Adam steps on both against ``L =
objective(x, what clients say) + bn * L_BN``, on shifted and mirrored copies of the images where ``augment`` says so;
the images of the step with the least L are kept. L_BN(x) is over ALL
BatchNorm layers l of ALL clients k. As published it is sum_k sum_l ||mu_l(x) - mu_kl|| + ||var_l(x) - var_kl||, which
grows with the network and drowns the classes: in a trained ResNet-18 it is thousands of times their cross-entropy. So
by default it is mean_k mean_l mean_c |mu_lc(x) - mu_klc| / sigma_klc + |ln(var_lc(x) / sigma_klc^2)|, which is of order
1 in any network.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from flyby.fusion.base import FusionSettings
from flyby.fusion.distilled.batchnorm import distance, relative
from flyby.fusion.distilled.teachers import Teachers
from flyby.models import ModelSpec
from flyby.models.generator import Generator
from flyby.rng import generator, seed_of
from flyby.training.graphs import one_shape
from flyby.training.steps import autocast, halved, precision_for


class SynthesisSettings(FusionSettings):
    """How one batch of images is made. The three weights are those of L = ce CE + bn L_BN + adv L_adv."""

    images: int = Field(256, ge=2, description="images made in each server epoch")
    latent: int = Field(256, ge=1, description="length of the noise vector z")
    generator_width: int = Field(
        64, ge=1, description="channels of the generator's last hidden layer; the others have twice as many"
    )
    steps: int = Field(30, ge=1, description="Adam steps on generator and z")
    generator_lr: float = Field(1e-3, gt=0, description="learning rate of generator and z")
    generator_clip: float | None = Field(10.0, gt=0, description="largest gradient norm of generator and z together")
    betas: tuple[float, float] = Field((0.5, 0.999), description="Adam's two decay rates")
    ce: float = Field(1.0, ge=0, description="weight of the labels' cross-entropy")
    bn: float = Field(1.0, ge=0, description="weight of L_BN: statistics as in the clients' BatchNorm layers")
    bn_form: Literal["relative", "sum", "mean"] = Field(
        "relative",
        description=(
            "L_BN in units of each channel's own spread; or as published, summed over the clients or divided by their"
            " number"
        ),
    )
    adv: float = Field(1.0, ge=0, description="weight of L_adv: images on which the learner differs from its teacher")
    adv_temperature: float = Field(1.0, gt=0, description="temperature at which the two are compared for L_adv")


class Synthesis:
    """Where batches of images are made: a generator, its noise and its optimiser. Every batch begins anew but in the
    same memory, so that on a GPU one recorded step serves them all. ``objective`` takes (x, what clients say of x,
    targets); with ``augment`` x is a view of what the generator made."""

    def __init__(
        self,
        teachers: Teachers,
        classes: int,
        objective: Callable[[Tensor, Tensor, Tensor], Tensor],
        settings: SynthesisSettings,
        augment: bool = False,
    ) -> None:
        self.teachers, self.classes, self.objective, self.settings = teachers, classes, objective, settings
        self.augment, self.rng = augment, torch.Generator(device=teachers.device)
        self.share = 1.0 if settings.bn_form == "sum" else 1 / len(teachers)  # of a client's distance in L_BN
        spec, device = teachers.specs[0], teachers.device
        self.maker = self._fresh(generator("place")).to(device)
        self.precision = precision_for(teachers.asked, self.maker.multiply_adds(), device)
        self.z = torch.empty(settings.images, settings.latent, device=device, requires_grad=True)
        self.targets = torch.empty(settings.images, dtype=torch.int64, device=device)
        self.best = torch.empty((settings.images, spec.channels, *spec.size), device=device)
        self.least, self.distance = torch.zeros((), device=device), torch.zeros((), device=device)
        on_gpu = device.type == "cuda"
        if on_gpu or halved(self.precision, device):
            self.maker.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = torch.optim.Adam(
            [*self.maker.parameters(), self.z], lr=settings.generator_lr, betas=settings.betas, capturable=on_gpu
        )
        self.captured = teachers.recorder(self.rng)

    def _fresh(self, rng: torch.Generator) -> Generator:
        spec = self.teachers.specs[0]
        return Generator.build(spec.size, spec.channels, self.settings.latent, self.settings.generator_width, rng)

    def make(self, *key: object) -> tuple[Tensor, Tensor, dict[str, float]]:
        """One batch of images (uint8 [n, H, W, C]) with its targets, and what it reached."""
        rng = generator(*key, "synthesis")
        self.maker.load_state_dict(self._fresh(rng).state_dict())
        self.z.data.copy_(torch.randn(self.z.shape, generator=rng))
        self.targets.copy_(torch.randint(self.classes, self.targets.shape, generator=rng))
        self.rng.manual_seed(seed_of(*key, "synthesis views"))
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
        with autocast(self.precision, self.teachers.device):
            x = self.maker(self.z)
        seen = self.teachers.view(x, self.rng) if self.augment else x
        loss, off, gradient = self.teachers.pull(seen, lambda x, said: self.objective(x, said, self.targets), bn, apart)
        better = loss < self.least  # decided on the device: nothing waits for it
        for kept, new in ((self.best, x.detach()), (self.distance, off), (self.least, loss)):
            kept.copy_(torch.where(better, new, kept))
        self.optimizer.zero_grad(set_to_none=True)
        seen.backward(gradient)
        if self.settings.generator_clip is not None:
            nn.utils.clip_grad_norm_([*self.maker.parameters(), self.z], self.settings.generator_clip)
        self.optimizer.step()


class Pool(nn.Module):
    """Images (uint8 [N, H, W, C]) with their targets and what every client said of them [N, K, D]; ``weights`` [K] are
    the ensemble's.

    A module, so that a checkpoint carries it; ``kept`` False leaves the images out, for data that can be read again.
    """

    def __init__(self, spec: ModelSpec, clients: int, device: torch.device | str, kept: bool = True) -> None:
        super().__init__()
        self.register_buffer(
            "images", torch.zeros((0, *spec.size, spec.channels), dtype=torch.uint8, device=device), persistent=kept
        )
        self.register_buffer("labels", torch.zeros(0, dtype=torch.int64, device=device), persistent=kept)
        self.register_buffer("said", torch.zeros((0, clients, spec.classes), device=device), persistent=kept)
        self.register_buffer("weights", torch.full((clients,), 1 / clients, device=device))

    images: Tensor
    labels: Tensor
    said: Tensor
    weights: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def add(self, images: Tensor, labels: Tensor, said: Tensor) -> None:
        """More images; ``said`` as teachers give it, [K, n, D]."""
        self.images, self.labels = torch.cat((self.images, images)), torch.cat((self.labels, labels))
        before = self.said if len(self.said) else self.said.new_zeros((0, *said.transpose(0, 1).shape[1:]))
        self.said = torch.cat((before, said.transpose(0, 1)))

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
