"""MobileNetV2 (Sandler et al., 2018), with the names of torchvision's state dicts.

Widths: ``stem`` (also the depthwise width of the first block, which does not expand), ``stage1`` .. ``stage7`` for the
outputs of a stage's blocks, which are added together, ``features.N.conv.0`` for the expansion of block N, and ``last``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from flyby.models.shape import Shape

STEM_WIDTH, LAST_WIDTH, EXPANSION = 32, 1280, 6
STAGES = (
    (16, 1, 1),
    (24, 2, 2),
    (32, 3, 2),
    (64, 4, 2),
    (96, 3, 1),
    (160, 3, 2),
    (320, 1, 1),
)  # output width, blocks, first stride


def blocks() -> Iterator[tuple[int, int, int, int]]:
    """(number in ``features``, stage from 1, place in its stage, stride) of every block, in order."""
    number = 1
    for stage, (_, count, stride) in enumerate(STAGES, start=1):
        for place in range(count):
            yield number, stage, place, stride if place == 0 else 1
            number += 1


def mobilenet_widths() -> dict[str, int]:
    """Every width of the network by name, with its default."""
    widths = {"stem": STEM_WIDTH} | {f"stage{s}": width for s, (width, _, _) in enumerate(STAGES, start=1)}
    for number, stage, place, _ in blocks():
        if stage > 1:
            widths[f"features.{number}.conv.0"] = EXPANSION * STAGES[stage - 1 if place else stage - 2][0]
    return widths | {"last": LAST_WIDTH}


def conv_bn(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution, batch norm, ReLU6."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU6(inplace=True))


class InvertedResidual(nn.Module):
    """Expand 1x1 (left out where ``expanded`` is None), depthwise 3x3, project 1x1 without activation; plus x where
    ``residual``."""

    def __init__(self, inputs: int, expanded: int | None, outputs: int, stride: int, residual: bool) -> None:
        super().__init__()
        inner = inputs if expanded is None else expanded
        self.conv = nn.Sequential() if expanded is None else nn.Sequential(conv_bn(inputs, inner, 1))
        self.conv.append(conv_bn(inner, inner, 3, stride, groups=inner))
        self.conv.append(nn.Conv2d(inner, outputs, 1, bias=False))
        self.conv.append(nn.BatchNorm2d(outputs))
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return x + out if self.residual else out


class MobileNetV2(nn.Module):
    """The backbone. The CIFAR stem takes strides 1 in the first convolution and in the second stage, for pictures of
    about 32x32."""

    def __init__(self, shape: Shape, w: Mapping[str, int]) -> None:
        super().__init__()
        small = shape.stem == "cifar"
        self.features = nn.Sequential(conv_bn(shape.channels, w["stem"], 3, stride=1 if small else 2))
        inputs = w["stem"]
        for number, stage, place, stride in blocks():
            outputs = w[f"stage{stage}"]
            stride = 1 if small and stage == 2 else stride
            # By position, never by comparing widths: a pruned stage may happen to be as wide as the one before.
            self.features.append(
                InvertedResidual(inputs, w.get(f"features.{number}.conv.0"), outputs, stride, residual=place > 0)
            )
            inputs = outputs
        self.features.append(conv_bn(inputs, w["last"], 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.avgpool(self.features(x)).flatten(1)  # type: ignore[no-any-return]


def mobilenetv2(shape: Shape, w: Mapping[str, int]) -> tuple[nn.Module, int]:
    return MobileNetV2(shape, w), w["last"]
