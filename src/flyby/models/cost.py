"""What a network would cost, from its spec alone: no tensor is allocated and nothing is run.

A spec may come from a stranger, and 400 bytes of it can describe a network that no machine holds. So :class:`Limits` is
asked first: by the spec's own numbers, then by what :func:`cost_of` finds when shapes, and nothing else, go through the
network on the meta device. That works for every architecture, those of other packages too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from flyby.errors import BadInput
from flyby.models.backbones import Named
from flyby.models.spec import ModelSpec
from flyby.models.tune import frozen_numbers

ROOM = 576 << 20  # bytes that a batch may take inside a network that answers: 512 images of 32x32 in a ResNet
GPU_ROOM = 6 << 30
FLOAT = 4


class Cost(NamedTuple):
    """``parameters``: all numbers of the state, learnable or not. ``activations``: bytes of float32 that all layers
    give out for one image, and the image itself, which is what training holds. ``live``: the most of them that are
    there at one time when an image is only answered. ``pixels``: numbers in one image. ``multiply_adds``: in its
    convolutions and matrix products."""

    parameters: int
    activations: int
    live: int
    pixels: int
    multiply_adds: int


class Limits(BaseModel):
    """The most that a stranger's network may cost; ``max_memory`` is about ``Cost.live``. Of that memory a ResNet-18 at
    224 pixels takes a 48th, and a sixth with the stem that is meant for small images."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    max_parameters: Annotated[int, Field(gt=0)] = 250_000_000
    max_memory: Annotated[int, Field(gt=0)] = 320 << 20
    max_side: Annotated[int, Field(gt=0)] = 1024
    max_classes: Annotated[int, Field(gt=0)] = 10_000

    def check(self, spec: ModelSpec, label: str = "the model") -> Cost:
        """What the network costs; BadInput, before anything is built, if that is more than these limits allow."""
        image = FLOAT * spec.channels * math.prod(spec.size)
        matrices = [a * b for a, b in pairwise((*spec.projector, spec.classes))]
        # Arithmetic alone: what is absurd already here is not even drawn up.
        self._within(label, "max_side", max(spec.size), "pixels a side")
        self._within(label, "max_classes", spec.classes, "classes")
        self._within(label, "max_memory", image, "bytes per image")
        self._within(label, "max_parameters", sum(matrices), "parameters")
        cost = cost_of(spec)
        self._within(label, "max_parameters", cost.parameters, "parameters")
        self._within(label, "max_memory", cost.live, "bytes per image")
        return cost

    def _within(self, label: str, name: str, value: int, what: str) -> None:
        if value > (most := getattr(self, name)):
            raise BadInput(
                f"{label}: its network takes {value:,} {what}, more than the {most:,} allowed; raise"
                f" --{name.replace('_', '-')} if you trust its sender"
            )


@functools.lru_cache(maxsize=256)
def cost_of(spec: ModelSpec) -> Cost:
    """What a network of this spec costs for one image."""
    try:
        # Before anything is counted: a backbone that is drawn up under way would be taken for activations.
        below = frozen_numbers(Named(spec.name, spec.backbone)) if spec.backbone is not None else 0
        network, image = spec.skeleton().eval(), _empty(1, spec.channels, *spec.size)
        with torch.no_grad(), _Counted(image) as counted:
            network(image)
    except BadInput:  # its backbone is not on this machine
        raise
    except Exception as error:  # an architecture of another package may do anything at all
        reason = (str(error).splitlines() or [""])[0][:200]
        raise BadInput(f"what {spec.name} costs cannot be told from its spec ({reason}); use another model") from error
    parameters = below + sum(math.prod(shape) for shape, _ in spec.shapes().values())
    return Cost(parameters, counted.total, counted.most, spec.channels * math.prod(spec.size), counted.products)


def shape_through(module: nn.Module, spec: ModelSpec) -> tuple[int, ...]:
    """The shape of what a module makes of one image that is prepared as the spec says."""
    image = _empty(1, spec.channels, *spec.size)
    with torch.no_grad(), _Counted(image):
        return tuple(module(image).shape[1:])


def at_once(spec: ModelSpec, most: int, device: torch.device | str = "cpu") -> int:
    """How many images, of ``most``, a network answers in one batch so that what it holds of them fits in ``ROOM``; a
    GPU has more room, and waits for its next batch longer than it works on a small one."""
    room = ROOM if torch.device(device).type == "cpu" else GPU_ROOM
    try:
        return max(1, min(most, room // cost_of(spec).live))
    except BadInput:  # nobody knows; a stranger's network of this kind was refused before
        return most


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Pictures lie as networks have them, channels last."""
    order = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    return torch.empty(shape, dtype=dtype, device="meta", memory_format=order)


def _both(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _slid(x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any) -> list[int]:
    """Height and width that are left where a window slides over a picture."""
    each = zip(x.shape[2:], *map(_both, (kernel, stride, padding, dilation)), strict=True)
    return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in each]


def _same(x: Tensor, *_: Any, inplace: bool = False, **__: Any) -> Tensor:
    return x if inplace else _empty(*x.shape)


def _pooled(x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, **_: Any) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:2], *_slid(x, kernel, stride, padding, dilation))
    return _empty(*shape), _empty(*shape, dtype=torch.int64)  # a CPU keeps the places of the largest, wanted or not


def _padded(x: Tensor, border: tuple[int, ...]) -> Tensor:
    left, right, above, below = border
    return _empty(*x.shape[:2], x.shape[2] + above + below, x.shape[3] + left + right)


# The shapes of what networks are made of. Torch has rules of its own for the meta device, and loads three seconds of
# modules at the first: they are asked only for what does not stand here.
_SHAPES: Mapping[Any, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    torch.conv2d: lambda x, w, b, s, p, d, groups: _empty(x.shape[0], len(w), *_slid(x, w.shape[2:], s, p, d)),
    F.linear: lambda x, w, b=None: _empty(*x.shape[:-1], len(w)),
    F.max_pool2d: _pooled,
    F.adaptive_avg_pool2d: lambda x, size: _empty(*x.shape[:2], *_both(size)),
    F.batch_norm: _same,
    F.relu: _same,
    F.relu6: _same,
    F.pad: _padded,
    F.interpolate: lambda x, size, **_: _empty(*x.shape[:2], *_both(size)),
    torch.add: _same,
    F.hardtanh: _same,
    F.normalize: _same,
    Tensor.flatten: lambda x, start: x.flatten(start) if x.is_contiguous() else _empty(len(x), x[0].numel()),
    Tensor.matmul: lambda x, w: _empty(*x.shape[:-1], w.shape[-1]),
    Tensor.mul: lambda x, y: _empty(*(x if x.ndim else y).shape),
    Tensor.add: _same,
    Tensor.add_: lambda x, y: x,
}
_PRODUCTS = (torch.conv2d, F.linear, Tensor.matmul)


class _Counted(TorchFunctionMode):
    """Has shapes go through a network. Counts the memory that its operations ask for (``total``), the most that is held
    at one time (``most``), and multiply-adds. Tensors without numbers come and go just as real ones would."""

    def __init__(self, image: Tensor) -> None:
        super().__init__()
        self.total, self.most, self.products = 0, 0, 0
        self.held: list[tuple[StorageWeakRef, int]] = []
        self._take(image)

    def _take(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.held = [one for one in self.held if not one[0].expired()]  # type: ignore[no-untyped-call]
        self.held.append((StorageWeakRef(storage), storage.nbytes()))  # type: ignore[no-untyped-call]
        self.total += storage.nbytes()
        self.most = max(self.most, sum(size for _, size in self.held))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        words = kwargs or {}
        out: Any
        try:
            out = _SHAPES[func](*args, **words)
        except (KeyError, TypeError, ValueError):  # not an operation, or not a way of calling it, that is known here
            out = func(*args, **words)
        given = {one.untyped_storage()._cdata for one in (*args, *words.values()) if isinstance(one, Tensor)}
        for one in out if isinstance(out, tuple) else (out,):
            if isinstance(one, Tensor) and one.untyped_storage()._cdata not in given:  # no view, nothing in place
                self._take(one)
        if func in _PRODUCTS:
            matrix = args[1]
            self.products += out.numel() * (len(matrix) if func is Tensor.matmul else math.prod(matrix.shape[1:]))
        return out[0] if func is F.max_pool2d else out
