"""ResNet-18 and ResNet-34 (He et al., 2016), with the names of torchvision's state dicts.

Widths: ``stem`` is shared by the first convolution and the blocks of ``layer1``, ``layer2`` .. ``layer4`` by the blocks
of that stage, because what is added together must be equally wide; ``layerS.B.conv1`` is the inner width of one block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.nn import functional as F

from flyby.models.shape import Shape

STAGE_WIDTHS = {"layer1": 64, "layer2": 128, "layer3": 256, "layer4": 512}
BLOCKS_18 = (2, 2, 2, 2)
BLOCKS_34 = (3, 4, 6, 3)


def resnet_widths(blocks: tuple[int, ...]) -> dict[str, int]:
    """Every width of the network by name, with its default."""
    widths: dict[str, int] = {}
    for (stage, default), count in zip(STAGE_WIDTHS.items(), blocks, strict=True):
        widths[stage_key(stage)] = default
        widths |= {f"{stage}.{b}.conv1": default for b in range(count)}
    return widths


def stage_key(stage: str) -> str:
    """The name of a stage's output width; the first stage adds to the stem's output, so it shares the stem's."""
    return "stem" if stage == "layer1" else stage


class Shortcut(nn.Conv2d):
    """The 1x1 convolution of stride s on a shortcut. On a CPU a narrow one takes every s-th pixel first and then stride
    1, the same mathematics: with AVX2 alone, oneDNN corrupts the heap in the backward pass of the strided form."""

    NARROW = 8  # fewer input channels than this; wider ones keep the strided form, whose sums round in another order

    def forward(self, input: Tensor) -> Tensor:
        if input.device.type != "cpu" or input.shape[1] >= self.NARROW:
            return super().forward(input)
        every = input[:, :, :: self.stride[0], :: self.stride[1]]
        return F.conv2d(every, self.weight, self.bias, (1, 1), self.padding, self.dilation, self.groups)


class BasicBlock(nn.Module):
    """``relu(x' + bn2(conv2(relu(bn1(conv1(x))))))``, where x' is x, or its 1x1 projection at the start of a stage."""

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int, project: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, inner, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(inner, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Sequential | None = None
        if project:
            self.downsample = nn.Sequential(Shortcut(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        kept = x if self.downsample is None else self.downsample(x)
        out: Tensor = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += kept
        return self.relu(out)  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """The backbone: stem, four stages, global average pool. The CIFAR stem is one 3x3 convolution of stride 1, without
    a max-pool."""

    def __init__(self, shape: Shape, w: Mapping[str, int], blocks: tuple[int, ...]) -> None:
        super().__init__()
        if shape.stem == "imagenet":
            self.conv1 = nn.Conv2d(shape.channels, w["stem"], 7, 2, padding=3, bias=False)
            self.maxpool: nn.Module = nn.MaxPool2d(3, 2, padding=1)
        else:
            self.conv1 = nn.Conv2d(shape.channels, w["stem"], 3, padding=1, bias=False)
            self.maxpool = nn.Identity()
        self.bn1 = nn.BatchNorm2d(w["stem"])
        self.relu = nn.ReLU(inplace=True)
        inputs = w["stem"]
        for stage, count in zip(STAGE_WIDTHS, blocks, strict=True):
            outputs = w[stage_key(stage)]
            layer = nn.Sequential()
            for b in range(count):
                # By position, never by comparing widths: a pruned stage may happen to be as wide as the one before.
                first = b == 0 and stage != "layer1"
                layer.append(
                    BasicBlock(inputs, w[f"{stage}.{b}.conv1"], outputs, stride=2 if first else 1, project=first)
                )
                inputs = outputs
            self.add_module(stage, layer)
        self.avgpool = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in STAGE_WIDTHS:
            x = getattr(self, stage)(x)
        return self.avgpool(x).flatten(1)  # type: ignore[no-any-return]


def resnet(blocks: tuple[int, ...]) -> Callable[[Shape, Mapping[str, int]], tuple[nn.Module, int]]:
    """The builder of a ResNet with this many blocks a stage."""
    return lambda shape, w: (ResNet(shape, w, blocks), w["layer4"])
