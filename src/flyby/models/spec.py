"""The noun ``ModelSpec``: an architecture's name and its arguments, enough to rebuild the network (code never travels);
and the ``Network`` it describes, a backbone and a head."""

from __future__ import annotations

import functools
import math
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from torch import Tensor, nn

from flyby import rng
from flyby.errors import BadInput, unknown
from flyby.models.backbones import Backbone, Named, check_name, is_name
from flyby.models.heads import HEADS, Head, uniform_fan_in
from flyby.models.memory import allocate, constant
from flyby.models.networks import ARCHITECTURES
from flyby.models.shifts import WAYS, shifted
from flyby.models.tune import Tuned, standing_on
from flyby.settings import Grown, complaint

MAX_WIDTH = 65_536
MAX_ENTRIES = 4096
DEFAULT_MEAN, DEFAULT_STD = 0.5, 0.25

# JSON has no tuples; a list is the one stand-in a strict spec takes.
FromList = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
Side = Annotated[int, Field(ge=1, le=4096)]
Word = Annotated[
    str, Field(max_length=64)
]  # a foreign name may be megabytes long, and looking for its nearest kin would take seconds
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


class ModelSpec(Grown):
    """What a network is: architecture, classes, input, head and widths; strict, frozen, hashable, the same after a trip
    through JSON.

    ``width`` multiplies every width of the architecture; ``widths`` then replaces single ones by name (see
    :meth:`layer_widths`), so that a pruned network is a spec too. ``stem`` matters to the resnets and mobilenetv2 only.
    ``mean`` and ``std`` are per channel. Of ``pixels`` that are uint8 they are in 0..1 units, and constants on purpose,
    0.5 and 0.25 where empty: sites share no statistics. Tiles of float32 are in units of their own, and so are their
    ``mean`` and ``std``, 0 and 1 where empty. ``logit_scale`` puts a learnable factor on a prototype head's logits;
    ``projector`` puts linear layers of these widths, with ReLUs between, after the backbone. With a ``backbone``
    the name is that of the backbone, its own normalisation holds where no other is given, and images of any ``size``
    are resized for it; only what stands after it and what is tuned of it is part of the state. A ``partial``
    network does not know all of its classes: its head says which. Whatever is wrong is a :class:`BadInput` of one
    sentence.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    later = frozenset({"pixels", "backbone", "partial"})

    name: Word
    classes: int = Field(ge=1, le=100_000)
    channels: int = Field(default=3, ge=1, le=64)
    size: Annotated[tuple[Side, Side], FromList]
    head: Word = "linear"
    width: float = Field(default=1.0, gt=0, le=64)
    stem: Literal["cifar", "imagenet"] = "cifar"
    widths: dict[Word, Annotated[int, Field(ge=1, le=MAX_WIDTH)]] = Field(default_factory=dict)
    logit_scale: bool = False
    projector: Annotated[tuple[Annotated[int, Field(ge=1, le=MAX_WIDTH)], ...], FromList, Field(max_length=4)] = ()
    # Bounded, so that a foreign spec cannot turn images into infinities.
    mean: Annotated[tuple[Annotated[float, Field(ge=-1e9, le=1e9)], ...], FromList] = ()
    std: Annotated[tuple[Annotated[float, Field(ge=1e-6, le=1e9)], ...], FromList] = ()
    pixels: Literal["uint8", "float32"] = "uint8"
    backbone: Backbone | None = None
    partial: bool = False

    @model_validator(mode="wrap")
    @classmethod
    def _one_sentence(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        parts = {"entries": data, **data} if isinstance(data, Mapping) else {}
        for name, value in parts.items():
            # Pydantic would collect a complaint about every one of them: 1 GB of 20 MB.
            if isinstance(value, Mapping | list | tuple) and len(value) > MAX_ENTRIES:
                raise BadInput(f"the model spec has {len(value)} {str(name)[:40]}; no network has over {MAX_ENTRIES}")
        try:
            return handler(data)._checked()
        except ValidationError as error:
            first = complaint(error, value=True)
            path = first.place or "content"
            if first.kind == "extra_forbidden":
                raise unknown("model spec key", path[:64], cls.model_fields) from None
            where = path if len(path) <= 40 else f"{path[:20]}...{path[-17:]}"  # a foreign key may be long
            if first.kind == "missing":
                raise BadInput(f"the model spec has no {path!r}; give it one") from None
            raise BadInput(f"the model spec's {where} is {reprlib.repr(first.value)}: {first.reason}") from None

    def _checked(self) -> Self:
        head = HEADS[self.head]
        if self.backbone is not None:
            self._check_backbone(self.backbone)
        else:
            self._check_architecture()
        for key, values in (("mean", self.mean), ("std", self.std)):
            if values and len(values) != self.channels:
                raise BadInput(
                    f"the model spec's {key} has {len(values)} numbers for {self.channels} channels; give one for each,"
                    " or none"
                )
        if self.logit_scale and not head.takes_scale:
            raise BadInput(
                f"logit_scale has no meaning for the {self.head} head; choose head 'prototype' or leave it out"
            )
        if head.shift:
            self._check_shift(head.shift)
        return self

    def _check_shift(self, shift: str) -> None:
        """Refuse a shift that these images cannot be shown in; the cure is always another one, or none."""
        cure = "set objective.shift to another one, or to none"
        if self.backbone is not None:
            raise BadInput(f"a frozen backbone learns no shift, and this head tells {shift}; {cure}")
        if shift == "turns" and self.size[0] != self.size[1]:
            raise BadInput(f"quarter turns need square images, and these are {self.size[0]}x{self.size[1]}; {cure}")
        if shift == "patches" and min(self.size) < 2:
            raise BadInput(f"images of {self.size[0]}x{self.size[1]} have no halves to swap; {cure}")
        if shift == "colour" and self.channels < 2:
            raise BadInput(f"images of one channel have no colours to shift; {cure}")

    def _check_backbone(self, backbone: Backbone) -> None:
        check_name(self.name)
        if self.widths or self.width != 1:
            raise BadInput(f"the widths of the backbone {self.name} are its own; leave width and widths out")
        if self.channels not in (1, backbone.channels):
            raise BadInput(
                f"the backbone {self.name} takes images of {backbone.channels} channels and these have {self.channels};"
                " choose a backbone for them, or train without one"
            )
        if not len(backbone.mean) == len(backbone.std) == backbone.channels:
            raise BadInput(
                f"the backbone of the model spec has not one mean and std for each of its {backbone.channels} channels"
            )
        if (backbone.tune == "lora") != (backbone.rank > 0):
            raise BadInput("the model spec's backbone has a rank exactly where it is tuned by lora; give model.rank=4")

    def _check_architecture(self) -> None:
        if self.name not in ARCHITECTURES and is_name(self.name):
            raise BadInput(f"{self.name} is a backbone, not an architecture to train; name it with --backbone")
        architecture = ARCHITECTURES[self.name]
        for key in self.widths:
            if key not in architecture.widths:
                raise unknown(f"width of {self.name}", key, architecture.widths)
        widest, value = max(self.layer_widths().items(), key=lambda item: item[1])
        if value > MAX_WIDTH:
            raise BadInput(
                f"width {self.width:g} makes {widest!r} of {self.name} {value} wide; lower it so that none is over"
                f" {MAX_WIDTH}"
            )
        if min(self.size) < architecture.smallest:
            least = architecture.smallest
            raise BadInput(
                f"{self.name} cannot take images of {self.size[0]}x{self.size[1]}; the smallest that works is"
                f" {least}x{least}, so resize them or choose another model such as cnn-small"
            )

    def __hash__(self) -> int:
        return hash(tuple(tuple(sorted(v.items())) if isinstance(v, dict) else v for v in self.__dict__.values()))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The spec in a JSON-like mapping, whose tuples may be lists; nothing else is coerced."""
        return cls.model_validate(dict(data) if isinstance(data, Mapping) else data)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked like a new one (pydantic's ``model_copy`` does not check)."""
        return type(self)(**{**dict(self), **changes})

    @property
    def head_alone(self) -> bool:
        """Whether nothing but a head learns: the backbone below it is frozen, and no layer lies between."""
        return self.backbone is not None and self.backbone.tune == "head" and not self.projector

    def unclassed(self) -> Self:
        """The same whatever its classes are: what sites must have in common whose classes differ."""
        return self.replace(classes=1, partial=False)

    def layer_widths(self) -> dict[str, int]:
        """Every width that can be chosen on its own, by name, as this spec has it."""
        defaults = {} if self.backbone is not None else ARCHITECTURES[self.name].widths
        return {key: self.widths.get(key, max(1, round(default * self.width))) for key, default in defaults.items()}

    def skeleton(self) -> Network:
        """The network on the meta device: all names and shapes, no memory, no numbers."""
        with torch.device("meta"):
            return Network(self)

    def build(self, generator: torch.Generator | None = None, device: torch.device | str = "cpu") -> Network:
        """The network with every tensor drawn from the generator (None: a fixed one), where the generator lives, then
        moved to ``device``.

        So one generator gives the same bytes on every device, and torch's global state is neither read nor changed.
        """
        generator = rng.generator("flyby", "default model") if generator is None else generator
        network = allocate(self.skeleton(), generator.device)
        network.initialise(generator)
        return network.to(device)

    def shapes(self) -> Shapes:
        """Shape and dtype of each entry of the state dict."""
        return dict(_outline(self)[0])

    def parameter_count(self) -> int:
        """How many learnable numbers the network has."""
        return _outline(self)[1]

    def feature_dim(self) -> int:
        """How many numbers the head is given for an image."""
        return _outline(self)[2]

    def statistics(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel (of bytes, in 0..1 units), as float32 ``[C]`` on a device;
        shared, so not to be changed."""
        usual = (DEFAULT_MEAN, DEFAULT_STD) if self.pixels == "uint8" else (0.0, 1.0)
        mean, std = (usual[0],) * self.channels, (usual[1],) * self.channels
        if self.backbone is not None:
            mean, std = self.backbone.statistics(self.channels)
        mean, std = self.mean or mean, self.std or std
        return constant(mean, torch.device(device)), constant(std, torch.device(device))

    def prepare(self, images: Tensor) -> Tensor:
        """Images ``[N, H, W, C]`` of this spec's ``pixels`` as networks want them: ``(x/255 - mean)/std`` of uint8,
        ``(x - mean)/std`` of float32; float32 ``[N, C, H, W]``, channels-last memory."""
        if images.dtype != getattr(torch, self.pixels) or images.ndim != 4:
            raise BadInput(f"images must be {self.pixels} [N, H, W, C]; got {images.dtype} {list(images.shape)}")
        height, width, channels = images.shape[1:]
        if (height, width, channels) != (*self.size, self.channels):
            raise BadInput(
                f"images are {height}x{width} with {channels} channels where the model {self.name} takes "
                f"{self.size[0]}x{self.size[1]} with {self.channels}; convert them or make the spec for them"
            )
        mean, std = self.statistics(images.device)
        # Normalised as [N, H, W, C] and only then permuted, so that even one channel keeps channels-last strides.
        images = images.contiguous()
        scaled = images.float().div_(255).sub_(mean) if self.pixels == "uint8" else images - mean
        return scaled.div_(std).permute(0, 3, 1, 2)

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Images ``[count, H, W, C]`` of nothing, as :meth:`prepare` takes them: every byte alike, or every number
        within two standard deviations of its channel."""
        shape = (count, *self.size, self.channels)
        if self.pixels == "uint8":
            return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        mean, std = self.statistics()
        return mean + std * (4 * torch.rand(shape, generator=generator) - 2)


class Network(nn.Module):
    """``head(backbone(x))``: prepared images ``[B, C, H, W]`` to features ``[B, d]`` to logits. Made by
    :meth:`ModelSpec.build`."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.backbone: nn.Module
        if spec.backbone is not None:
            (mean,), (std,) = spec.backbone.statistics(1)
            grey = None if spec.mean or spec.std else (mean, std)
            self.backbone, self.feature_dim = standing_on(Named(spec.name, spec.backbone), grey), spec.backbone.dim
        else:
            self.backbone, self.feature_dim = ARCHITECTURES[spec.name].build(spec, spec.layer_widths())
        self.projector = nn.Sequential()
        for width in spec.projector:
            if len(self.projector):
                self.projector.append(nn.ReLU())
            self.projector.append(nn.Linear(self.feature_dim, width))
            self.feature_dim = width
        self.head = HEADS[spec.head](self.feature_dim, spec.classes, spec.logit_scale)
        if spec.partial:
            self.head.lack(spec.classes)
        self.identity = ""  # the digest of the parcel whose weights these are, until they are trained on

    def train(self, mode: bool = True) -> Self:
        if mode:
            self.identity = ""
        return super().train(mode)

    def prepare(self, images: Tensor) -> Tensor:
        """A site's images as this network takes them."""
        return self.spec.prepare(images)

    def statistics(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """What its images are normalised by."""
        return self.spec.statistics(device)

    def features(self, x: Tensor) -> Tensor:
        return self.projector(self.backbone(x))  # type: ignore[no-any-return]

    def shown(self, x: Tensor) -> Tensor:
        """The features of every way of the shift that its head knows, ``[B, R, d]``; plain ``[B, d]`` where it knows
        none."""
        shift = self.head.shift
        if not shift:
            return self.features(x)
        return torch.stack([self.features(shifted(x, shift, way)) for way in range(WAYS)], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))  # type: ignore[no-any-return]

    def initialise(self, generator: torch.Generator) -> None:
        """Set every parameter and buffer, in module order, from this generator alone; what is tuned of a backbone
        starts as it is there."""
        fan_out = self.spec.backbone is None and ARCHITECTURES[self.spec.name].fan_out
        known: set[nn.Module] = set()
        if isinstance(self.backbone, Tuned):
            self.backbone.start()
            known = set(self.backbone.modules())
        if self.spec.partial:
            self.head.absent.zero_()
        for module in self.modules():
            if module in known:
                continue
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


@functools.lru_cache(maxsize=256)
def _outline(spec: ModelSpec) -> tuple[Shapes, int, int]:
    network = spec.skeleton()
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in network.state_dict().items()}
    return shapes, sum(math.prod(p.shape) for p in network.parameters()), network.feature_dim
