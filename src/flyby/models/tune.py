"""What of a backbone is trained, and so travels: nothing, its last stage, all of it, or low-rank matrices beside it.

``head``: nothing. ``last``: the last stage; what the rest makes of images is computed once. ``all``: every tensor,
starting from the backbone's. ``lora`` [Hu et al., ICLR 2022]: beside the weight ``W`` of every linear layer and every
convolution without groups stands a product of rank r, ``W x + U (D x)``; of a convolution, ``D`` has its window and
``U`` is 1x1. ``D`` is drawn from the hash of the backbone, so it is the same everywhere, is not trained and does not
travel; only ``U`` is, which begins as 0 [as in FFA-LoRA: Sun et al., ICLR 2024]. The mean of several sites' ``U`` is
therefore exactly the mean of their ``U D``, which means of two trained factors are not. The rows of ``D`` have a length
of about 1: a step of ``U`` moves ``W`` by that part of a step of ``W`` itself that lies in them.

What is tuned stays in eval mode. BatchNorm goes by the statistics of the backbone's own training, which few images of
a site would only blur (and in EfficientNet-Lite it is worked into the convolutions), and nothing is dropped out.
"""

from __future__ import annotations

import copy
import math
import threading
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flyby.errors import BadInput
from flyby.models.backbones import Frozen, Named, Own, in_pieces, network_of
from flyby.models.lite import EfficientNetLite, Same
from flyby.models.mobilenet import MobileNetV2
from flyby.models.resnet import STAGE_WIDTHS, ResNet, Shortcut
from flyby.rng import generator

Grey = tuple[float, float] | None
Filters = nn.Conv2d | nn.Linear
DENSE = (nn.Linear, nn.Conv2d, Same, Shortcut)  # and no others that are made from them: those may do more


def standing_on(named: Named, grey: Grey) -> Frozen | Tuned:
    """A backbone's place in a network, as its spec has it tuned."""
    return Frozen(named, grey) if named.backbone.tune == "head" else Tuned(Below(named, grey), _tail(named))


class Below(Frozen):
    """What stays frozen of a backbone of which something is tuned, before that."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.named.backbone.keeps else self.fitted(x)

    def network(self, device: torch.device) -> nn.Module:
        return cut(network_of(self.named, device), self.named.name)[0]


class Tuned(nn.Module):
    """``tail(frozen(x))``: a backbone of which the tail is trained, always in eval mode."""

    def __init__(self, frozen: nn.Module, tail: nn.Module) -> None:
        super().__init__()
        self.frozen, self.tail = frozen, tail

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.tail.eval()
        for module in self.tail.modules():
            if isinstance(module, Filters):  # to which it means nothing, but to hooks for per-sample gradients
                module.training = mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        # Per-sample gradients want a batch to come as one.
        return self._seen(x) if self.training else in_pieces(self._seen, x)

    def _seen(self, x: Tensor) -> Tensor:
        return self.tail(self.frozen(x))  # type: ignore[no-any-return]

    @torch.no_grad()
    def start(self) -> None:
        """Give every tensor the backbone's own number, so that the network answers as on the frozen one."""
        if isinstance(self.tail, Adapted):
            for layer in self.tail.up.children():
                nn.init.zeros_(layer.weight)  # type: ignore[arg-type]
            return
        assert isinstance(self.frozen, Below)
        named, tensors = self.frozen.named, self.tail.state_dict()
        network = network_of(named, next(iter(tensors.values())).device)
        source = (network if named.backbone.tune == "all" else cut(network, named.name)[1]).state_dict()
        for name, tensor in tensors.items():
            tensor.copy_(source[name])


def _tail(named: Named) -> nn.Module:
    """The module that is trained, without numbers."""
    if named.backbone.tune == "lora":
        return Adapted(named)
    network = network_of(named, "meta")
    tail = network if named.backbone.tune == "all" else cut(network, named.name)[1]
    return copy.deepcopy(tail).requires_grad_()


def frozen_numbers(named: Named) -> int:
    """How many numbers a network on this backbone uses that are not of its own state."""
    network, tune = network_of(named, "meta"), named.backbone.tune
    if tune == "all":
        return 0
    used = cut(network, named.name)[0] if tune == "last" else network
    places = shell_of(named, torch.device("meta"))[1] if tune == "lora" else {}
    tensors = [*used.state_dict().values(), *(place.down for place in places.values())]
    return sum(t.numel() for t in tensors)


# -- the last stage


def cut(network: nn.Module, name: str) -> tuple[nn.Sequential, nn.Sequential]:
    """A network in two, before its last stage: modules that share its tensors."""
    body, after = (network.backbone, network.projector) if isinstance(network, Own) else (network, nn.Sequential())
    pieces = chain(body)
    places = [i for i, (_, piece) in enumerate(pieces) if any(isinstance(m, Filters) for m in piece.modules())]
    if not places:
        raise BadInput(
            f"the backbone {name} cannot be cut before its last stage, since it is no chain of modules; choose --tune"
            " lora, all or head"
        )
    halves = nn.Sequential(), nn.Sequential()
    for place, (key, piece) in enumerate(pieces):
        halves[place >= places[-1]].add_module(key, piece)
    if len(after):
        halves[1].add_module("projector", after)
    return tuple(half.eval() for half in halves)  # type: ignore[return-value]


def chain(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """A network as modules one after another, by name; none where it is not known to be one."""
    if isinstance(network, EfficientNetLite):
        return network.pieces()
    if isinstance(network, ResNet):
        order = ("conv1", "bn1", "relu", "maxpool", *STAGE_WIDTHS, "avgpool")
        return [*((key, network.get_submodule(key)) for key in order), ("flatten", nn.Flatten())]
    if isinstance(network, MobileNetV2):
        features = [("first", network.features[:-2]), ("last", network.features[-2:])]
        return [*features, ("avgpool", network.avgpool), ("flatten", nn.Flatten())]
    if type(network) is not nn.Sequential:
        return []
    parts: list[tuple[str, nn.Module]] = []
    for key, module in network.named_children():
        inside = chain(module) if type(module) is nn.Sequential else []
        parts += [(f"{key}-{below}", piece) for below, piece in inside] or [(key, module)]
    return parts


# -- low rank


class Beside(nn.Module):
    """A frozen layer and, while a network looks through it, that network's ``up`` beside it: ``W x + U (D x)``."""

    down: Tensor
    up: nn.Module | None

    def __init__(self, layer: Filters, down: Tensor) -> None:
        super().__init__()
        self.layer, self.down = layer, down
        self.register_module("up", None)

    def forward(self, x: Tensor) -> Tensor:
        assert self.up is not None
        y: Tensor = self.layer(x)
        layer = self.layer
        if isinstance(layer, nn.Linear):
            return torch.add(y, self.up(F.linear(x, self.down)))
        around = layer.padding
        if isinstance(layer, Same):
            x, around = layer.bordered(x)
        stride = layer.stride
        if layer.kernel_size == (1, 1) and around == (0, 0):  # no strided 1x1, as in ``Shortcut``
            x, stride = x[:, :, :: stride[0], :: stride[1]], (1, 1)
        return torch.add(y, self.up(F.conv2d(x, self.down, None, stride, around, layer.dilation, 1)))


class Adapted(nn.Module):
    """A whole frozen backbone with trained matrices beside its dense layers; only those are its own."""

    def __init__(self, named: Named) -> None:
        super().__init__()
        self.named, self.up = named, nn.Module()
        layers = dense(network_of(named, "meta"))
        if not layers:
            raise BadInput(
                f"the backbone {named.name} has no linear layer and no convolution for lora to stand beside; choose"
                " --tune all or head"
            )
        rank, widest = named.backbone.rank, max(_most(layer) for layer in layers.values())
        if not 1 <= rank <= widest:
            raise BadInput(
                f"model.rank = {rank} will not do for lora on {named.name}: give 1 to {widest}, the most that any of"
                " its layers can use"
            )
        for name, layer in layers.items():
            low, outputs = min(rank, _most(layer)), layer.weight.shape[0]
            linear = isinstance(layer, nn.Linear)
            up = nn.Linear(low, outputs, bias=False) if linear else nn.Conv2d(low, outputs, 1, bias=False)
            self.up.add_module(_flat(name), up)

    def forward(self, x: Tensor) -> Tensor:
        shell, places = shell_of(self.named, x.device)
        try:
            for name, place in places.items():
                place.up = self.up.get_submodule(name)
            return shell(x)  # type: ignore[no-any-return]
        finally:
            for place in places.values():
                place.up = None


def dense(network: nn.Module) -> dict[str, Filters]:
    """The layers that multiply all channels by one matrix, by name."""
    found: dict[str, Filters] = {}
    for name, module in network.named_modules():
        if type(module) not in DENSE or not name:
            continue
        assert isinstance(module, Filters)
        if isinstance(module, nn.Linear) or (module.groups == 1 and module.padding_mode == "zeros"):
            found[name] = module
    return found


def _most(layer: Filters) -> int:
    """The highest rank that a layer's matrix can have."""
    return min(len(layer.weight), layer.weight[0].numel())


_SHELLS = threading.local()  # a shell serves one network at a time, and several threads may train


def shell_of(named: Named, device: torch.device) -> tuple[nn.Module, dict[str, Beside]]:
    """A backbone on a device with a place beside each dense layer, and those places: modules of its own, tensors of
    the shared one."""
    held: dict[Any, tuple[nn.Module, dict[str, Beside]]] = _SHELLS.__dict__.setdefault("held", {})
    backbone = named.backbone
    if (key := (backbone.sha256, backbone.rank, str(device))) not in held:
        network = network_of(named, device)
        tensors = [*network.parameters(), *network.buffers()]
        shell = copy.deepcopy(network, {id(tensor): tensor for tensor in tensors})
        places = {}
        for name, layer in dense(shell).items():
            outer, _, own = name.rpartition(".")
            places[_flat(name)] = place = Beside(layer, _drawn(named, name, layer))
            setattr(shell.get_submodule(outer), own, place)
        held[key] = shell.eval(), places
    return held[key]


def _flat(name: str) -> str:
    return name.replace(".", "-")


def _drawn(named: Named, name: str, layer: Filters) -> Tensor:
    """D of one layer, ``[rank, inputs]`` and its window: uniform with a variance of 1 / all inputs, the same on every
    machine."""
    rank, inputs = min(named.backbone.rank, _most(layer)), layer.weight[0].numel()
    shape = (rank, *layer.weight.shape[1:])
    if layer.weight.is_meta:
        return torch.empty(shape, device="meta")
    bound = math.sqrt(3 / inputs)
    numbers = torch.rand(shape, generator=generator("lora", named.backbone.sha256, name, rank))
    return numbers.mul_(2 * bound).sub_(bound).to(layer.weight.device)
