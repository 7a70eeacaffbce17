"""Networks without branches: a perceptron, a small convolutional net, LeNet, and the two plain nets of FOL (its Tables
7 and 9).

Each builder returns the backbone and its feature dimension. The stem argument of a spec means nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from flyby.models.shape import Shape

MLP_WIDTHS = {"fc1": 256, "fc2": 128}
CNN_SMALL_WIDTHS = {"conv1": 32, "conv2": 64, "conv3": 128}
LENET_WIDTHS = {"conv1": 6, "conv2": 16, "fc1": 120, "fc2": 84}
CNN_FOL_WIDTHS = {"conv1": 128, "conv2": 128, "conv3": 128}
VGG_WILDFIRE_WIDTHS = {"conv1": 64, "conv2": 128, "conv3": 256, "conv4": 512}


def mlp(shape: Shape, w: Mapping[str, int]) -> tuple[nn.Module, int]:
    """Flatten, then two hidden layers with ReLU."""
    height, width = shape.size
    layers = nn.Sequential()
    layers.add_module("flatten", nn.Flatten())
    layers.add_module("fc1", nn.Linear(shape.channels * height * width, w["fc1"]))
    # Not in place here, in lenet and cnn-fol: a backward hook on the layer before (as K-FAC factors need) forbids it.
    layers.add_module("relu1", nn.ReLU())
    layers.add_module("fc2", nn.Linear(w["fc1"], w["fc2"]))
    layers.add_module("relu2", nn.ReLU())
    return layers, w["fc2"]


def cnn_small(shape: Shape, w: Mapping[str, int]) -> tuple[nn.Module, int]:
    """Three padded 3x3 convolutions with batch norm, one max-pool, global average pool: quick on a CPU."""
    layers = nn.Sequential()
    inputs = shape.channels
    for i in (1, 2, 3):
        outputs = w[f"conv{i}"]
        layers.add_module(f"conv{i}", nn.Conv2d(inputs, outputs, 3, padding=1, bias=False))
        layers.add_module(f"bn{i}", nn.BatchNorm2d(outputs))
        layers.add_module(f"relu{i}", nn.ReLU(inplace=True))
        if i == 2:
            layers.add_module("pool", nn.MaxPool2d(2))
        inputs = outputs
    return with_average_pool(layers), inputs


def lenet(shape: Shape, w: Mapping[str, int]) -> tuple[nn.Module, int]:
    """LeNet with ReLU and max-pools, the "simple CNN" of NIID-Bench [Li et al., ICDE 2022] and of many papers since:
    two unpadded 5x5 convolutions, each pooled, and two hidden layers."""
    layers = nn.Sequential()
    inputs = shape.channels
    height, width = shape.size
    for i in (1, 2):
        layers.add_module(f"conv{i}", nn.Conv2d(inputs, w[f"conv{i}"], 5))
        layers.add_module(f"relu{i}", nn.ReLU())
        layers.add_module(f"pool{i}", nn.MaxPool2d(2))
        inputs, height, width = w[f"conv{i}"], (height - 4) // 2, (width - 4) // 2
    layers.add_module("flatten", nn.Flatten())
    inputs *= height * width
    for i in (1, 2):
        layers.add_module(f"fc{i}", nn.Linear(inputs, w[f"fc{i}"]))
        layers.add_module(f"relu{i + 2}", nn.ReLU())
        inputs = w[f"fc{i}"]
    return layers, inputs


def cnn_fol(shape: Shape, w: Mapping[str, int]) -> tuple[nn.Module, int]:
    """FOL's net for CIFAR-10 and SVHN: three unpadded 3x3 convolutions, two max-pools, flatten (2048 features at
    32x32).

    The 224x224 shapes printed in the paper's Table 7 contradict its own linear layer of 2048 inputs, which is what
    32x32 gives.
    """
    layers = nn.Sequential()
    inputs = shape.channels
    height, width = shape.size
    for i in (1, 2, 3):
        layers.add_module(f"conv{i}", nn.Conv2d(inputs, w[f"conv{i}"], 3))
        layers.add_module(f"relu{i}", nn.ReLU())
        inputs, height, width = w[f"conv{i}"], height - 2, width - 2
        if i < 3:
            layers.add_module(f"pool{i}", nn.MaxPool2d(2))
            height, width = height // 2, width // 2
    layers.add_module("flatten", nn.Flatten())
    return layers, inputs * height * width


def vgg_wildfire(shape: Shape, w: Mapping[str, int]) -> tuple[nn.Module, int]:
    """FOL's net for Wildfire (Table 9): four times (3x3 convolution, batch norm, ReLU, max-pool), global average
    pool."""
    layers = nn.Sequential()
    inputs = shape.channels
    for i in (1, 2, 3, 4):
        outputs = w[f"conv{i}"]
        layers.add_module(f"conv{i}", nn.Conv2d(inputs, outputs, 3, padding=1))
        layers.add_module(f"bn{i}", nn.BatchNorm2d(outputs))
        layers.add_module(f"relu{i}", nn.ReLU(inplace=True))
        layers.add_module(f"pool{i}", nn.MaxPool2d(2))
        inputs = outputs
    return with_average_pool(layers), inputs


def with_average_pool(layers: nn.Sequential) -> nn.Sequential:
    """The layers, then the mean over the picture: ``[B, C, H, W] -> [B, C]``."""
    layers.add_module("average", nn.AdaptiveAvgPool2d(1))
    layers.add_module("flatten", nn.Flatten())
    return layers
