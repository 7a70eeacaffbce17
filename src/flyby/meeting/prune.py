"""Alignment-aware structured pruning, FOL's eq. 5 [Huang and Shu, ICML 2025], on a stack of neighbours of one
architecture.

min over weights phi and gates alpha in [0, 1] of

    mean CE(f(x; phi, alpha), y) + lambda_p sum_(l,l') sum_i ||alpha_l'i W_l'i - W^own_li||^2
        + gamma_shared sum_l ||alpha_l . W_l||_2,1 + gamma_unshared sum_u ||alpha_u . W_u||_2,1

with one gate a filter of every convolution and linear layer but the last. The gate multiplies the filter, its bias and
its BatchNorm channel (BatchNorm alone would undo a mere scaling), so a filter whose gate is shut gives exactly 0. By
default each sum over filters is their mean, so that the strengths do not scale with the model's size; ``reduction:
sum`` is the literal reading. The last layer has no gate and no lasso, but it is aligned where it is shared. Then a
channel goes when alpha ||W|| of every filter that produces it is under 1e-2 of its layer's median; filters that are
added together (residual blocks), or follow each other depthwise, go together or not at all.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from flyby.data.site import Site
from flyby.errors import BadInput
from flyby.meeting.layers import shared_layers
from flyby.meeting.measure import latency_ms
from flyby.meeting.settings import OrientSettings
from flyby.meeting.stack import Stack, Tensors
from flyby.meeting.tuning import Penalty, Problem
from flyby.models import ModelSpec, Network

Filters = nn.Conv2d | nn.Linear


def prunable(spec: ModelSpec) -> bool:
    """Whether channels may go: the widths of a backbone are its own, and class directions would lose their meaning."""
    return spec.head == "linear" and spec.backbone is None


def dependency_graph(network: Network) -> Any:
    """torch-pruning's dependency graph of a network: what must be cut where, when one filter goes."""
    try:
        import torch_pruning
    except ImportError:
        raise BadInput(
            "pruning needs torch-pruning, which is not installed; install it with pip install 'flyby[prune]'"
        ) from None
    spec = network.spec
    example = torch.zeros(1, spec.channels, *spec.size, device=next(network.parameters()).device)
    with torch.enable_grad():  # it follows the graph that autograd makes
        return torch_pruning.DependencyGraph().build_dependency(network, example_inputs=example, verbose=False)


@lru_cache(maxsize=64)
def channel_groups(spec: ModelSpec) -> tuple[tuple[str, ...], ...]:
    """Layers whose output channels stand or fall together, one tuple a group; the last layer, and what only it reads,
    is in none."""
    network = spec.build().eval()
    graph = dependency_graph(network)
    names = {module: name for name, module in network.named_modules()}
    groups = []
    for group in graph.get_all_groups(ignored_layers=[network.head], root_module_types=[nn.Conv2d, nn.Linear]):
        outs = [
            names[d.target.module]
            for d, _ in group
            if isinstance(d.target.module, Filters) and graph.is_out_channel_pruning_fn(d.handler)
        ]
        groups.append(tuple(dict.fromkeys(outs)))
    return tuple(groups)


@lru_cache(maxsize=64)
def gated_layers(spec: ModelSpec) -> dict[str, str | None]:
    """Every layer that has gates, with the BatchNorm that follows it (None: none does)."""
    if spec.head != "linear":
        raise BadInput(
            f"a network with a {spec.head} head cannot be pruned; its class directions would lose their meaning"
        )
    modules = [(n, m) for n, m in spec.skeleton().named_modules() if isinstance(m, Filters | nn.BatchNorm2d)]
    gated: dict[str, str | None] = {}
    for (name, layer), (after, norm) in pairwise(modules):  # the last one is the head
        if isinstance(layer, Filters):
            follows = isinstance(norm, nn.BatchNorm2d) and norm.num_features == layer.weight.shape[0]
            gated[name] = after if follows else None
    return gated


def scaled(spec: ModelSpec, parameters: Tensors, factors: Tensors) -> Tensors:
    """Stacked parameters with each filter, its bias and its BatchNorm channel multiplied by its factor:
    ``factors[layer]`` is ``[M, filters]``."""
    out = dict(parameters)
    for name, norm in gated_layers(spec).items():
        factor = factors[name]
        keys = [f"{name}.weight", f"{name}.bias"] + ([f"{norm}.weight", f"{norm}.bias"] if norm else [])
        for key in (k for k in keys if k in out):
            out[key] = out[key] * factor.view(*factor.shape, *[1] * (out[key].ndim - 2))
    return out


class Gated(Problem):
    """Eq. 5. ``own`` is the state dict of the node's own network, towards which shared layers are pulled."""

    def __init__(
        self,
        spec: ModelSpec,
        models: int,
        own: ModelSpec,
        own_state: Mapping[str, Tensor],
        settings: OrientSettings,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.spec, self.settings, self.learns_weights = spec, settings, settings.joint
        skeleton = spec.skeleton()
        sizes = {name: _width(skeleton, name) for name in gated_layers(spec)}
        self.extra = {name: torch.ones(models, size, device=device, requires_grad=True) for name, size in sizes.items()}
        self.targets = {
            theirs: own_state[f"{mine}.weight"].detach().to(device)
            for mine, theirs in shared_layers(own, spec)
            if isinstance(skeleton.get_submodule(theirs), Filters)
        }

    def effective(self, parameters: Tensors) -> Tensors:
        return scaled(self.spec, parameters, self.extra)

    def penalty(self, parameters: Tensors) -> Penalty:
        s = self.settings
        shared = [name for name in self.extra if name in self.targets]
        unshared = [name for name in self.extra if name not in self.targets]
        total = s.lambda_p * self._reduced([self._distances(name, parameters) for name in self.targets], parameters)
        total = total + s.gamma_shared * self._reduced(
            [self.strengths(name, parameters) for name in shared], parameters
        )
        return total + s.gamma_unshared * self._reduced(
            [self.strengths(name, parameters) for name in unshared], parameters
        )

    def _distances(self, name: str, parameters: Tensors) -> Tensor:
        """``[M, filters]``: ||alpha_i W_i - W^own_i||, squared unless the poster's form is asked for."""
        weight, target = parameters[f"{name}.weight"].flatten(2), self.targets[name].flatten(1)
        gap = (weight * self.extra[name].unsqueeze(2) if name in self.extra else weight) - target
        distances: Tensor = gap.square().sum(2) if self.settings.squared else torch.linalg.vector_norm(gap, dim=2)
        return distances

    def strengths(self, name: str, parameters: Tensors) -> Tensor:
        """``[M, filters]``: ||alpha_i W_i|| = alpha_i ||W_i||, the groups of the lasso and what a filter is judged
        by."""
        norms: Tensor = torch.linalg.vector_norm(parameters[f"{name}.weight"].flatten(2), dim=2)
        return self.extra[name] * norms

    def _reduced(self, filters: list[Tensor], parameters: Tensors) -> Tensor:
        if not filters:
            some = next(iter(parameters.values()))
            return some.new_zeros(len(some))
        everything = torch.cat(filters, dim=1)
        return everything.sum(1) if self.settings.reduction == "sum" else everything.mean(1)

    def project(self) -> None:
        for gate in self.extra.values():
            gate.clamp_(0, 1)

    def take(self, rows: Tensor) -> Gated:
        some = object.__new__(Gated)
        some.__dict__ = {
            **self.__dict__,
            "extra": {n: g.detach()[rows].requires_grad_() for n, g in self.extra.items()},
        }
        return some


class Masked(Problem):
    """Cross-entropy with some channels silenced for good: what training the physically smaller network would do, with
    the stack still whole."""

    def __init__(self, spec: ModelSpec, masks: Tensors) -> None:
        super().__init__()
        self.spec, self.masks = spec, masks

    def effective(self, parameters: Tensors) -> Tensors:
        return scaled(self.spec, parameters, self.masks)

    def take(self, rows: Tensor) -> Masked:
        return Masked(self.spec, {n: m[rows] for n, m in self.masks.items()})


@torch.no_grad()
def folded(stack: Stack, factors: Tensors) -> Stack:
    """The stack with gates (or masks) multiplied into its parameters: the same function without them."""
    parameters = {
        n: t.detach().clone().requires_grad_() for n, t in scaled(stack.spec, stack.parameters, factors).items()
    }
    return Stack(stack.spec, parameters, stack.buffers, stack.backend)


@torch.no_grad()
def keep_masks(stack: Stack, threshold: float) -> Tensors:
    """``[M, filters]`` of 1 (stays) and 0 (goes) for every gated layer of a folded stack. Never all of a layer goes:
    the strongest channel stays."""
    masks: Tensors = {
        name: torch.ones(stack.parameters[f"{name}.weight"].shape[:2], device=stack.device)
        for name in gated_layers(stack.spec)
    }
    for group in channel_groups(stack.spec):
        norms = [torch.linalg.vector_norm(stack.parameters[f"{name}.weight"].flatten(2), dim=2) for name in group]
        medians = [norm.median(dim=1, keepdim=True).values for norm in norms]
        # A layer whose median is 0 has mostly dead filters: those exactly at 0 go.
        weak = [
            torch.where(median > 0, norm < threshold * median, norm == 0)
            for norm, median in zip(norms, medians, strict=True)
        ]
        stays = ~torch.stack(weak).all(0)
        strongest = torch.stack(norms).sum(0).argmax(1, keepdim=True)
        stays = stays.scatter(1, strongest, True)
        for name in group:
            masks[name] = stays.float()
    return masks


@torch.no_grad()
def masks_to_size(stack: Stack, share: float) -> Tensors:
    """Masks as :func:`keep_masks`, under which each model of a folded stack has at most this share of its parameters:
    the weakest channels of all groups go first (strength is relative to the mean of the layer, so that layers compare),
    no more than needed, and never the strongest of a group."""
    groups, most = channel_groups(stack.spec), share * stack.spec.parameter_count()
    norms = {
        n: torch.linalg.vector_norm(stack.parameters[f"{n}.weight"].flatten(2), dim=2) for n in gated_layers(stack.spec)
    }
    strengths = []
    for group in groups:
        relative = torch.stack([norms[n] / norms[n].mean(1, keepdim=True).clamp_min(1e-30) for n in group]).mean(0)
        strengths.append(relative.scatter(1, relative.argmax(1, keepdim=True), math.inf))
    every = torch.cat(strengths, dim=1).cpu()  # [M, channels of all groups]
    ends = list(itertools.accumulate(s.shape[1] for s in strengths))
    models = []
    for row in every:
        order = row.argsort(stable=True)

        def stays(gone: int, order: Tensor = order) -> Tensors:
            whole = torch.ones(ends[-1])
            whole[order[:gone]] = 0
            parts = torch.tensor_split(whole, ends[:-1])
            return {name: part for group, part in zip(groups, parts, strict=True) for name in group}

        candidates = range(int(row.isfinite().sum()) + 1)  # how many may go
        gone = bisect.bisect_left(candidates, -most, key=lambda n: -narrowed(stack.spec, stays(n)).parameter_count())
        models.append(stays(min(gone, candidates[-1])))
    return {name: torch.stack([m[name] for m in models]).to(stack.device) for name in norms}


def narrowed(spec: ModelSpec, stays: Mapping[str, Tensor]) -> ModelSpec:
    """The spec of the network that :func:`removed` makes, without making it."""
    kept = {name: int(mask.sum()) for name, mask in stays.items()}
    defaults = spec.replace(widths={}).layer_widths()
    widths = {key: kept[layer] for key, layer in width_layers(spec.name, spec.stem).items()}
    projector = tuple(kept[f"projector.{2 * i}"] for i in range(len(spec.projector)))
    return spec.replace(widths={k: w for k, w in widths.items() if w != defaults[k]}, projector=projector)


def share_in_time(stack: Stack, milliseconds: float | None, site: Site, probes: int = 6) -> float:
    """The largest share of parameters (by halving) at which the stack's first model, cut, takes at most so many
    milliseconds per image, in a batch of 64 on this machine now: unlike all else here, not the same twice."""
    assert milliseconds is not None
    images = site.train.images[:64]
    first, low, high = stack.take(torch.tensor([0], device=stack.device)), 0.0, 1.0
    for probe in range(probes):
        share = high if probe == 0 else (low + high) / 2
        stays = {name: mask[0] for name, mask in masks_to_size(first, share).items()}
        network = narrowed(stack.spec, stays).build().to(stack.device)
        if latency_ms(network, images) / len(images) <= milliseconds:
            low = share
            if probe == 0:
                return 1.0
        else:
            high = share
    return low or high


def removed(network: Network, stays: Mapping[str, Tensor]) -> Network:
    """The physically smaller network: channels that do not stay are cut with everything that depends on them; its spec
    says the new widths."""
    spec = network.spec
    if all(bool(mask.all()) for mask in stays.values()):
        return network
    import copy

    import torch_pruning

    device = next(network.parameters()).device
    network = copy.deepcopy(network).cpu().eval()
    graph = dependency_graph(network)
    for group in channel_groups(spec):
        gone = (stays[group[0]] < 0.5).nonzero().flatten().tolist()
        if not gone:
            continue
        root = network.get_submodule(group[0])
        cut = (
            torch_pruning.prune_conv_out_channels
            if isinstance(root, nn.Conv2d)
            else torch_pruning.prune_linear_out_channels
        )
        if isinstance(root, nn.Conv2d) and root.groups > 1 and root.groups == root.out_channels:
            cut = torch_pruning.prune_depthwise_conv_out_channels
        graph.get_pruning_group(root, cut, idxs=gone).prune()
    smaller = narrowed(spec, stays).skeleton()
    smaller.load_state_dict(
        {n: t.detach().contiguous() for n, t in network.state_dict().items()}, strict=True, assign=True
    )
    return smaller.to(device).eval()


def _width(network: nn.Module, name: str) -> int:
    layer = network.get_submodule(name)
    assert isinstance(layer, Filters)
    return int(layer.weight.shape[0])


@lru_cache(maxsize=32)
def width_layers(name: str, stem: str) -> dict[str, str]:
    """For each named width of an architecture, a layer that is so wide: found by changing the width and looking which
    layer follows."""
    spec = ModelSpec(name=name, classes=2, channels=1, size=(64, 64), width=0.01, stem=stem)  # type: ignore[arg-type]
    base = {n: m.weight.shape[0] for n, m in spec.skeleton().named_modules() if isinstance(m, Filters)}
    found = {}
    for key, width in spec.layer_widths().items():
        wider = spec.replace(widths={key: width + 1}).skeleton()
        found[key] = next(n for n, rows in base.items() if _width(wider, n) != rows)
    return found
