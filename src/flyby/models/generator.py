"""The generator of data-free distillation: noise z to images in 0..1, for any picture size and number of channels.

z -> linear -> 2w x H/4 x W/4 -> BN -> up -> conv3 2w -> BN -> LeakyReLU .2 -> up -> conv3 w -> BN -> LeakyReLU .2 ->
conv3 C -> sigmoid (w = 64). Where a side is not a multiple of four it is rounded up at each halving, and the steps up
go to just the size wanted.
"""

from __future__ import annotations

import math
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flyby.models.heads import uniform_fan_in
from flyby.models.memory import allocate


class Generator(nn.Module):
    """``images [N, C, H, W] in 0..1 = generator(z [N, latent])``. BatchNorm always uses the batch: it lives for one
    batch only."""

    def __init__(self, size: tuple[int, int], channels: int, latent: int = 256, width: int = 64) -> None:
        super().__init__()
        self.sizes = [size]
        for _ in range(2):
            self.sizes.insert(0, (-(-self.sizes[0][0] // 2), -(-self.sizes[0][1] // 2)))
        height, across = self.sizes[0]
        self.linear = nn.Linear(latent, 2 * width * height * across)
        self.bn0 = nn.BatchNorm2d(2 * width)
        self.conv1 = nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(2 * width)
        self.conv2 = nn.Conv2d(2 * width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, channels, 3, padding=1)

    def initialise(self, generator: torch.Generator) -> None:
        """Set every parameter, in module order, from this generator alone."""
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()
            elif isinstance(module, nn.Conv2d | nn.Linear):
                uniform_fan_in(module, generator)

    @classmethod
    def build(cls, size: tuple[int, int], channels: int, latent: int, width: int, generator: torch.Generator) -> Self:
        """A new one with every number drawn from the generator; torch's global state is neither read nor changed."""
        with torch.device("meta"):
            made = cls(size, channels, latent, width)
        allocate(made, generator.device).initialise(generator)
        return made

    def multiply_adds(self) -> int:
        """Per image."""
        layers: list[nn.Linear | nn.Conv2d] = [self.linear, self.conv1, self.conv2, self.conv3]
        places = ((1, 1), *self.sizes[1:], self.sizes[2])
        return sum(layer.weight.numel() * math.prod(at) for layer, at in zip(layers, places, strict=True))

    def forward(self, z: Tensor) -> Tensor:
        x = self.bn0(self.linear(z).unflatten(1, (-1, *self.sizes[0])))
        x = F.leaky_relu(self.bn1(self.conv1(F.interpolate(x, size=self.sizes[1]))), 0.2)
        x = F.leaky_relu(self.bn2(self.conv2(F.interpolate(x, size=self.sizes[2]))), 0.2)
        return torch.sigmoid(self.conv3(x).float())  # eight bits of bfloat16 are too few for a pixel
