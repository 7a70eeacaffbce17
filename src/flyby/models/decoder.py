"""A small conditional VAE for images of any size: the encoder stays at its site, the decoder can travel.

Encoder: strided convolutions until the picture is at most 8 pixels a side, then, with the label, a linear layer to (mu,
log variance). Decoder: (z, label) through a linear layer to a small grid, doubled and convolved until it covers the
picture, cut to its size. There is no BatchNorm in either, so a decoder answers one z the same whatever else is in the
batch.
"""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from flyby.errors import BadInput
from flyby.models.memory import allocate
from flyby.models.spec import ModelSpec
from flyby.settings import complaint

SMALL = 8


class DecoderSpec(BaseModel):
    """What a decoder is: the classes and images it is for, the length of z and the number of filters."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    classes: int = Field(ge=2, le=100_000)
    channels: int = Field(ge=1, le=64)
    size: tuple[int, int]
    latent: int = Field(16, ge=1, le=4096)
    width: int = Field(32, ge=1, le=4096)

    @classmethod
    def beside(cls, spec: ModelSpec, latent: Any, width: Any) -> Self:
        """The decoder of a site whose classifier is ``spec``; latent and width may come from a stranger."""
        try:
            return cls(classes=spec.classes, channels=spec.channels, size=spec.size, latent=latent, width=width)
        except ValidationError as error:
            place, reason, _, value = complaint(error, value=True)
            raise BadInput(f"no decoder has the {place} {value!r}: {reason.lower()}") from None

    @property
    def doublings(self) -> int:
        """How often the decoder's grid is doubled (and the encoder's picture halved): until 8 pixels a side or fewer,
        once at least."""
        return max(1, (-(-max(self.size) // SMALL) - 1).bit_length())

    @property
    def grid(self) -> tuple[int, int]:
        """Height and width of the smallest grid."""
        step = 2**self.doublings
        return -(-self.size[0] // step), -(-self.size[1] // step)


class Encoder(nn.Module):
    """q(z | x, y): images in 0..1 ``[B, C, H, W]`` and labels ``[B]`` to the mean and log variance of z, each ``[B,
    latent]``."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.spec = spec
        self.convs = nn.Sequential()
        for inputs in (spec.channels, *[spec.width] * (spec.doublings - 1)):
            self.convs.extend((nn.Conv2d(inputs, spec.width, 3, stride=2, padding=1), nn.ReLU()))
        height, width = spec.grid
        self.hidden = nn.Linear(spec.width * height * width + spec.classes, 4 * spec.width)
        self.out = nn.Linear(4 * spec.width, 2 * spec.latent)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat((self.convs(images).flatten(1), F.one_hot(labels, self.spec.classes)), dim=1)
        mean, log_variance = self.out(F.relu(self.hidden(x))).float().chunk(2, dim=1)
        return mean, log_variance.clamp(-20, 20)


class Decoder(nn.Module):
    """p(x | z, y): ``logits`` of the pixels ``[B, C, H, W]``; called, it gives the pixels in 0..1."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.spec = spec
        height, width = spec.grid
        self.hidden = nn.Linear(spec.latent + spec.classes, 4 * spec.width)
        self.start = nn.Linear(4 * spec.width, spec.width * height * width)
        self.convs = nn.ModuleList(nn.Conv2d(spec.width, spec.width, 3, padding=1) for _ in range(spec.doublings))
        self.out = nn.Conv2d(spec.width, spec.channels, 3, padding=1)

    def logits(self, z: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.hidden(torch.cat((z, F.one_hot(labels, self.spec.classes)), dim=1)))
        x = F.relu(self.start(x)).view(len(z), self.spec.width, *self.spec.grid)
        for conv in self.convs:
            x = F.relu(conv(F.interpolate(x, scale_factor=2.0)))
        pixels: Tensor = self.out(x)
        return pixels[:, :, : self.spec.size[0], : self.spec.size[1]].float()

    def forward(self, z: Tensor, labels: Tensor) -> Tensor:
        return self.logits(z, labels).sigmoid()


def initialise(module: nn.Module, generator: torch.Generator) -> None:
    """Every weight and bias of an encoder or decoder, in module order, from this generator alone.

    Scaled for ReLUs: torch's own smaller start lets z and the label fade on their way through the layers, and the VAE
    learns to ignore them.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]


def build(kind: type[Encoder] | type[Decoder], spec: DecoderSpec, generator: torch.Generator) -> Any:
    """An encoder or decoder with fresh weights; torch's global generator is neither read nor changed."""
    with torch.device("meta"):
        module = kind(spec)
    module = allocate(module, "cpu")
    initialise(module, generator)
    return module
