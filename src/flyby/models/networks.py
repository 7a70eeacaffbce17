"""The architectures, by name.

An architecture is one builder and one line in :data:`ARCHITECTURES`. It declares the name and default of each of its
widths, so that a spec can be checked, and a pruned network described, without building anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from flyby.models.mobilenet import mobilenet_widths, mobilenetv2
from flyby.models.plain import (
    CNN_FOL_WIDTHS,
    CNN_SMALL_WIDTHS,
    LENET_WIDTHS,
    MLP_WIDTHS,
    VGG_WILDFIRE_WIDTHS,
    cnn_fol,
    cnn_small,
    lenet,
    mlp,
    vgg_wildfire,
)
from flyby.models.resnet import BLOCKS_18, BLOCKS_34, resnet, resnet_widths
from flyby.models.shape import Shape
from flyby.registry import Registry


@dataclass(frozen=True)
class Architecture:
    """A family of backbones: ``build(shape, widths)`` gives the module and its feature dimension.

    ``smallest`` is the least height and width the pools leave anything of. ``fan_out`` asks for kaiming-normal
    convolutions. ``worth_compiling``: whether a long training earns back what compiling it costs.
    """

    build: Callable[[Shape, Mapping[str, int]], tuple[nn.Module, int]]
    widths: Mapping[str, int]
    smallest: int = 1
    fan_out: bool = False
    worth_compiling: bool = False
    about: str = ""  # one sentence, as `flyby methods` shows it


def _resnet(blocks: tuple[int, ...], about: str) -> Architecture:
    return Architecture(resnet(blocks), resnet_widths(blocks), fan_out=True, worth_compiling=True, about=about)


ARCHITECTURES: Registry[Architecture] = Registry(
    "model",
    {
        "mlp": Architecture(mlp, MLP_WIDTHS, about="two hidden layers on the pixels"),
        "cnn-small": Architecture(
            cnn_small, CNN_SMALL_WIDTHS, smallest=2, about="three convolutions; the default for images under 24 pixels"
        ),
        "lenet": Architecture(
            lenet, LENET_WIDTHS, smallest=16, about="two convolutions and two hidden layers, without batch norm"
        ),
        "cnn-fol": Architecture(
            cnn_fol,
            CNN_FOL_WIDTHS,
            smallest=18,
            about="FOL's three convolutions of 128 filters, for images of 32 pixels",
        ),
        "vgg-wildfire": Architecture(
            vgg_wildfire,
            VGG_WILDFIRE_WIDTHS,
            smallest=16,
            about="FOL's four blocks of convolutions, for satellite images",
        ),
        "resnet18": _resnet(BLOCKS_18, "ResNet-18; the default for images of 24 pixels and more"),
        "resnet34": _resnet(BLOCKS_34, "ResNet-34, twice as deep"),
        "mobilenetv2": Architecture(
            mobilenetv2, mobilenet_widths(), fan_out=True, about="MobileNetV2, small and quick on boards"
        ),
    },
    group="flyby.models",
)
