"""The registry of architectures, and the network they become: a backbone and a head.

An architecture is one builder and one line in :data:`ARCHITECTURES`. It declares the name and default of each of its
widths, so that a spec can be checked, and a pruned network described, without building anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from flyby.models import plain
from flyby.models.heads import HEADS, Head, uniform_fan_in
from flyby.models.mobilenet import mobilenet_widths, mobilenetv2
from flyby.models.resnet import BLOCKS_18, BLOCKS_34, resnet, resnet_widths

if TYPE_CHECKING:
    from flyby.models.spec import ModelSpec


@dataclass(frozen=True)
class Architecture:
    """A family of backbones: ``build(spec, widths)`` gives the module and its feature dimension.

    ``smallest`` is the least height and width the pools leave anything of. ``fan_out`` asks for kaiming-normal
    convolutions.
    """

    build: Callable[[ModelSpec, Mapping[str, int]], tuple[nn.Module, int]]
    widths: Mapping[str, int]
    smallest: int = 1
    fan_out: bool = False


ARCHITECTURES: dict[str, Architecture] = {
    "mlp": Architecture(plain.mlp, plain.MLP_WIDTHS),
    "cnn-small": Architecture(plain.cnn_small, plain.CNN_SMALL_WIDTHS, smallest=2),
    "cnn-fol": Architecture(plain.cnn_fol, plain.CNN_FOL_WIDTHS, smallest=18),
    "vgg-wildfire": Architecture(plain.vgg_wildfire, plain.VGG_WILDFIRE_WIDTHS, smallest=16),
    "resnet18": Architecture(resnet(BLOCKS_18), resnet_widths(BLOCKS_18), fan_out=True),
    "resnet34": Architecture(resnet(BLOCKS_34), resnet_widths(BLOCKS_34), fan_out=True),
    "mobilenetv2": Architecture(mobilenetv2, mobilenet_widths(), fan_out=True),
}


class Network(nn.Module):
    """``head(backbone(x))``: prepared images ``[B, C, H, W]`` to features ``[B, d]`` to logits. Made by
    :meth:`ModelSpec.build`."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.backbone, self.feature_dim = ARCHITECTURES[spec.name].build(spec, spec.layer_widths())
        self.projector = nn.Sequential()
        for width in spec.projector:
            if len(self.projector):
                self.projector.append(nn.ReLU())
            self.projector.append(nn.Linear(self.feature_dim, width))
            self.feature_dim = width
        self.head = HEADS[spec.head](self.feature_dim, spec.classes, spec)

    def features(self, x: Tensor) -> Tensor:
        return self.projector(self.backbone(x))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))  # type: ignore[no-any-return]

    def initialise(self, generator: torch.Generator) -> None:
        """Set every parameter and buffer, in module order, from this generator alone."""
        fan_out = ARCHITECTURES[self.spec.name].fan_out
        for module in self.modules():
            if isinstance(module, Head):
                module.initialise(generator)
            elif isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()
            elif isinstance(module, nn.Conv2d) and fan_out and module.bias is None:
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu", generator=generator)
            elif isinstance(module, nn.Conv2d | nn.Linear):
                uniform_fan_in(module, generator)
            elif module._parameters or module._buffers:
                raise NotImplementedError(f"no initialisation for the tensors of {type(module).__name__}")
