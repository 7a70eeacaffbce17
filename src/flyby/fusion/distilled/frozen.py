"""Networks that only answer, in the form in which a GPU is quickest: BatchNorm folded into the convolutions, their
weights in bfloat16 once and for all, channels last, compiled where that is earned back.

A BatchNorm layer that no longer learns is y = a x + b for each channel, and after a convolution it is the convolution's
own affair: W' = a W, bias' = a bias + b. The sums are the same up to rounding. What needs the layers themselves, L_BN,
asks the network as it came. On a CPU nothing is changed, so that its bytes stay what they are.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_eval

from flyby.models import Network
from flyby.models.optimisers import eagerly
from flyby.rng import generator

log = logging.getLogger(__name__)
CLOSE = 1e-4  # of the largest feature: a folded network that differs by more is not the same network
Pair = tuple[str, str]  # names of a convolution and of the BatchNorm layer that alone hears it


def frozen(network: Network, device: torch.device, half: bool) -> Network:
    """A network in evaluation mode, without gradients of its own, for answers alone; ``half``: where autocast would
    take its convolutions to bfloat16 in every pass."""
    made = folded(network.eval()).to(device).requires_grad_(False)
    for module in made.modules():
        if half and isinstance(module, nn.Conv2d):
            module.to(torch.bfloat16)
    made.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return made


@torch.no_grad()
def folded(network: Network) -> Network:
    """A copy of a network in evaluation mode whose BatchNorm layers are part of the convolutions before them; a plain
    copy where that would be another network, which two images of noise tell."""
    if network.spec.backbone is not None:
        return copy.deepcopy(network)
    x = network.spec.prepare(network.spec.noise(2, generator("fold"))).to(next(network.parameters()).device)
    found, wanted = pairs(network, x)
    made = copy.deepcopy(network)
    for conv, norm in found:
        before, after = made.get_submodule(conv), made.get_submodule(norm)
        assert isinstance(before, nn.Conv2d)
        assert isinstance(after, _BatchNorm)
        made.set_submodule(conv, fuse_conv_bn_eval(before, after))
        made.set_submodule(norm, nn.Identity())
    same = torch.allclose(made.features(x), wanted, rtol=0, atol=CLOSE * float(wanted.abs().max()))
    return made if same else copy.deepcopy(network)


def pairs(network: Network, x: Tensor) -> tuple[list[Pair], Tensor]:
    """Which BatchNorm layers hear just what a convolution gave, found by watching one pass; and the features."""
    gave: dict[int, tuple[str, Tensor]] = {}  # the tensor too: while it lives, nobody else has its id
    heard: list[Pair] = []
    calls: dict[str, int] = {}

    def after(name: str, module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        calls[name] = calls.get(name, 0) + 1
        gave[id(out)] = (name, out)

    def before(name: str, module: nn.Module, given: tuple[Tensor, ...]) -> None:
        calls[name] = calls.get(name, 0) + 1
        if id(given[0]) in gave:
            heard.append((gave[id(given[0])][0], name))

    hooks = []
    for name, module in network.named_modules():
        if isinstance(module, nn.Conv2d):
            hooks.append(module.register_forward_hook(functools.partial(after, name)))
        elif isinstance(module, _BatchNorm) and module.running_mean is not None:
            hooks.append(module.register_forward_pre_hook(functools.partial(before, name)))
    try:
        features = network.features(x)
    finally:
        for hook in hooks:
            hook.remove()
    return [pair for pair in heard if all(calls[name] == 1 for name in pair)], features


def compiled(network: Network) -> bool:
    """Compile a network's backbone, in place, where this machine can; whether it did. All networks of one spec share
    what was compiled, and so do all later ones of the process."""
    if can_compile(next(network.parameters()).device):
        network.backbone.compile(dynamic=False)
        return True
    return False


@functools.cache
def can_compile(device: torch.device) -> bool:
    """Whether a machine has what it takes to compile for a device; where it has not, long work goes on as written."""
    try:
        twice: Callable[[Tensor], Tensor] = torch.compile(_twice, dynamic=False)
        twice(torch.ones(4, device=device))
    except Exception as error:  # whatever it is, there is another way
        log.warning("networks are not compiled: %s", (str(error).splitlines() or [type(error).__name__])[0])
        return False
    return True


def _twice(x: Tensor) -> Tensor:
    return x + x


def as_written(if_so: bool = True) -> AbstractContextManager[Any]:
    """In here compiled networks run as they are written: for a shape, or a mode, that is not worth a compilation."""
    return eagerly() if if_so else nullcontext()
