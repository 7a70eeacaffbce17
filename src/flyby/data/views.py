"""Batched augmentation on the device: every sample draws its own crop, flip and colours, in a handful of kernels.

Geometry is one bilinear resampling; colour jitter, greyscale and normalisation are one affine map of the channels per
sample. Two deviations from the usual image-library pipeline, both so that a batch costs a few kernels instead of
hundreds: colours are clamped once at the end rather than after each step, and hue turns in the YIQ plane instead of
HSV.

Tiles (float32 numbers in units of their own) are normalised first, so that a border is their mean and not a zero that
may lie far off. Contrast and brightness are then those of normalised numbers, for all channels alike; nothing is
clamped.
"""

from __future__ import annotations

import functools
import math
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import ConfigDict, Field, field_validator
from torch import Tensor

from flyby.settings import Grown


@functools.cache
def _yiq(device: torch.device) -> tuple[Tensor, Tensor]:
    """RGB to YIQ and back; row 0 is the luma that greyscale, contrast and saturation use. Kept per device: no copy per
    step."""
    to = torch.tensor(
        ((0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112)), dtype=torch.float64
    )
    return to.float().to(device), torch.linalg.inv(to).float().to(device)


Portion = Annotated[float, Field(gt=0, le=1)]
Aspect = Annotated[float, Field(gt=0, le=100)]
Strength = Annotated[float, Field(ge=0, le=1)]
Hue = Annotated[float, Field(ge=0, le=0.5)]


class ViewSettings(Grown):
    """What is done to an image before the network sees it. All draws are per sample; normalisation is the
    ModelSpec's."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    later = frozenset({"vertical", "turns", "noise"})

    crop: Literal["none", "pad", "resized"] = Field(
        "none", description="pad: shifts over a padded border; resized: parts of random size, stretched to the whole"
    )
    pad: int = Field(4, ge=0, description="pixels of black border for crop: pad")
    scale: tuple[Portion, Portion] = Field(
        (0.2, 1.0), description="smallest and largest share of the image's area, for crop: resized"
    )
    ratio: tuple[Aspect, Aspect] = Field(
        (3 / 4, 4 / 3), description="smallest and largest width over height, for crop: resized"
    )
    flip: float = Field(0.0, ge=0, le=1, description="probability of a left-right flip")
    jitter: tuple[Strength, Strength, Strength, Hue] = Field(
        (0.0, 0.0, 0.0, 0.0), description="brightness, contrast, saturation, hue"
    )
    jitter_p: float = Field(0.8, ge=0, le=1, description="chance that colours are changed at all")
    grey: float = Field(0.0, ge=0, le=1, description="probability of greyscale")
    vertical: float = Field(0.0, ge=0, le=1, description="probability of an up-down flip, for images that have no up")
    turns: bool = Field(
        False, description="a quarter turn or several, all alike; half a turn where images are not square"
    )
    noise: float = Field(
        0.0, ge=0, le=10, description="standard deviation of Gaussian noise, in units of the normalised image"
    )
    views: int = Field(1, ge=1, le=8, description="augmented copies of each image in a batch")

    @field_validator("scale", "ratio")
    @classmethod
    def _in_order(cls, pair: tuple[float, float]) -> tuple[float, float]:
        if pair[0] > pair[1]:
            raise ValueError("give the smaller number first")
        return pair

    @property
    def still(self) -> bool:
        """Whether every view shows the image as it is, so that what is computed from it need not be computed again."""
        changes = (self.flip, self.vertical, self.grey, self.noise, *self.jitter)
        return self.crop == "none" and not any(changes) and not self.turns

    def stilled(self) -> ViewSettings:
        """As many views, all of them the image as it is."""
        return ViewSettings(views=self.views)


PLAIN = ViewSettings()
STANDARD = ViewSettings(crop="pad", flip=0.5)
SALT = ViewSettings(crop="resized", flip=0.5, jitter=(0.4, 0.4, 0.4, 0.1), grey=0.2, views=2)


def augment(images: Tensor, settings: ViewSettings, mean: Tensor, std: Tensor, rng: torch.Generator) -> Tensor:
    """uint8 or float32 ``[B, H, W, C]`` to normalised float ``[views * B, C, H, W]`` in channels-last memory; view v of
    sample i is row v*B + i."""
    if settings.views > 1:
        images = images.repeat(settings.views, 1, 1, 1)
    x, tiles = images.permute(0, 3, 1, 2), images.dtype != torch.uint8
    mean, std = mean.view(1, -1, 1, 1), std.view(1, -1, 1, 1)
    x = (x - mean).div_(std) if tiles else x.float().div_(255)
    if settings.crop != "none" or settings.flip > 0:
        x = _resample(x, settings, rng)
    if any(settings.jitter) or settings.grey > 0:
        x = _relight(x, settings, rng) if tiles else _recolour(x, settings, rng)
    x = x if tiles else x.sub_(mean).div_(std)
    if settings.turns or settings.vertical > 0:
        x = _turn(x, settings, rng)
    if settings.noise > 0:
        x = x + torch.empty_like(x).normal_(0, settings.noise, generator=rng)
    return x.contiguous(memory_format=torch.channels_last)


def _uniform(n: int, low: float, high: float, rng: torch.Generator, x: Tensor) -> Tensor:
    return torch.empty(n, device=x.device).uniform_(low, high, generator=rng)


def _resample(x: Tensor, settings: ViewSettings, rng: torch.Generator) -> Tensor:
    """Crop and flip as one bilinear look-up. Coordinates are pixel centres scaled to [-1, 1], as ``grid_sample`` wants
    them."""
    n, _, height, width = x.shape
    top, left = torch.zeros(n, device=x.device), torch.zeros(n, device=x.device)
    tall, wide = torch.full((n,), float(height), device=x.device), torch.full((n,), float(width), device=x.device)
    if settings.crop == "pad":
        span = 2 * settings.pad + 1
        top = torch.floor(_uniform(n, 0, span, rng, x)).clamp_(max=span - 1) - settings.pad
        left = torch.floor(_uniform(n, 0, span, rng, x)).clamp_(max=span - 1) - settings.pad
    elif settings.crop == "resized":
        # Area and aspect as usual; where the box is larger than the image it is cut to the image instead of drawn
        # again.
        area = height * width * _uniform(n, *settings.scale, rng, x)
        ratio = torch.exp(_uniform(n, math.log(settings.ratio[0]), math.log(settings.ratio[1]), rng, x))
        tall = (area / ratio).sqrt().clamp(1, height)
        wide = (area * ratio).sqrt().clamp(1, width)
        top = _uniform(n, 0, 1, rng, x) * (height - tall)
        left = _uniform(n, 0, 1, rng, x) * (width - wide)
    rows = top[:, None] + (torch.arange(height, device=x.device) + 0.5) * (tall / height)[:, None]
    columns = left[:, None] + (torch.arange(width, device=x.device) + 0.5) * (wide / width)[:, None]
    if settings.flip > 0:
        flipped = _uniform(n, 0, 1, rng, x) < settings.flip
        columns = torch.where(flipped[:, None], columns.flip(1), columns)
    grid = torch.stack(
        (
            (columns * (2 / width) - 1)[:, None, :].expand(-1, height, -1),
            (rows * (2 / height) - 1)[:, :, None].expand(-1, -1, width),
        ),
        dim=-1,
    )
    return F.grid_sample(
        x, grid, mode="bilinear", padding_mode="zeros" if settings.crop == "pad" else "border", align_corners=False
    )


def _turn(x: Tensor, settings: ViewSettings, rng: torch.Generator) -> Tensor:
    """Quarter turns and up-down flips, exact: a quarter turn is the image mirrored at its diagonal, then flipped."""
    n, square = len(x), x.shape[2] == x.shape[3]
    up = torch.zeros(n, dtype=torch.bool, device=x.device)
    if settings.turns:
        quarters = torch.floor(_uniform(n, 0, 4, rng, x)).clamp_(max=3)
        quarters = quarters if square else 2 * torch.floor(quarters / 2)
        if square:
            x = torch.where((quarters % 2 == 1).view(-1, 1, 1, 1), x.transpose(2, 3), x)
        up = (quarters == 1) | (quarters == 2)
        x = torch.where((quarters >= 2).view(-1, 1, 1, 1), x.flip(3), x)
    if settings.vertical > 0:
        up = up ^ (_uniform(n, 0, 1, rng, x) < settings.vertical)
    return torch.where(up.view(-1, 1, 1, 1), x.flip(2), x)


def _relight(x: Tensor, settings: ViewSettings, rng: torch.Generator) -> Tensor:
    """Contrast about the tile's own mean of each channel, and brightness as a shift, both in normalised units."""
    n = len(x)
    on = _uniform(n, 0, 1, rng, x) < settings.jitter_p
    shift = torch.where(on, _uniform(n, -settings.jitter[0], settings.jitter[0], rng, x), 0.0)
    contrast = torch.where(on, _uniform(n, 1 - settings.jitter[1], 1 + settings.jitter[1], rng, x), 1.0)
    middle = x.mean(dim=(2, 3), keepdim=True)
    return (x - middle) * contrast.view(-1, 1, 1, 1) + middle + shift.view(-1, 1, 1, 1)


def _recolour(x: Tensor, settings: ViewSettings, rng: torch.Generator) -> Tensor:
    """Brightness, contrast, saturation, hue and greyscale composed into x' = M x + t, one (M, t) per sample."""
    n, channels = x.shape[:2]
    brightness, contrast, saturation, hue = settings.jitter
    on = _uniform(n, 0, 1, rng, x) < settings.jitter_p
    b = torch.where(on, _uniform(n, 1 - brightness, 1 + brightness, rng, x), 1.0)
    c = torch.where(on, _uniform(n, 1 - contrast, 1 + contrast, rng, x), 1.0)
    if channels != 3:  # no colour to change: brightness and contrast only
        offset = (1 - c) * b * x.mean(dim=(1, 2, 3))
        return x.mul_((b * c).view(-1, 1, 1, 1)).add_(offset.view(-1, 1, 1, 1)).clamp_(0, 1)
    s = torch.where(on, _uniform(n, 1 - saturation, 1 + saturation, rng, x), 1.0)
    turn = torch.where(on, _uniform(n, -hue, hue, rng, x), 0.0) * (2 * math.pi)
    s = torch.where(_uniform(n, 0, 1, rng, x) < settings.grey, 0.0, s)  # greyscale is saturation 0
    to_yiq, from_yiq = _yiq(x.device)
    one, zero = torch.ones_like(s), torch.zeros_like(s)
    cos, sin = s * turn.cos(), s * turn.sin()
    chroma = torch.stack((one, zero, zero, zero, cos, -sin, zero, sin, cos), dim=1).view(n, 3, 3)
    colour = from_yiq @ chroma @ to_yiq
    luma = (x.mean(dim=(2, 3)) * to_yiq[0]).sum(1)
    mixed = torch.einsum("nij,njhw->nihw", colour * (b * c).view(-1, 1, 1), x)
    return (mixed + ((1 - c) * b * luma).view(-1, 1, 1, 1)).clamp_(0, 1)
