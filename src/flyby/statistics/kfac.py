"""K-FAC factors of a trained network [Martens and Grosse, ICML 2015; Grosse and Martens, ICML 2016], for FedLPA.

For every linear and convolution layer with weights M = [W | b] the Fisher matrix is taken as B (x) A, where

    A = E[a a^T]    a: the layer's inputs with a 1 appended for the bias; a convolution's patches, averaged over its
                    positions
    B = E[g g^T]    g: the gradients of the cross-entropy with the true labels at the layer's outputs, summed over its
                    positions

so that B (x) A is the Fisher matrix itself, not a multiple of it, for a layer at one position as for one at many. One
pass over the site's own images after training; BatchNorm uses what it learned, so the images do not mix. A convolution
in groups has a pair of factors for every group: everything here has a leading dimension for them, which is 1 for all
other layers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flyby.data.classes import spread
from flyby.data.site import Part, Site
from flyby.models import ModelSpec, Network
from flyby.models.lite import Same
from flyby.parcels.parcel import Manifest
from flyby.rng import generator
from flyby.statistics.extras import Entry, Extra, Sent, Sizes, positive

SAMPLES = 10_000  # more images than this sharpen no expectation that the server could tell apart
BATCH = 64  # a batch of patches of a wide convolution takes 150 MB

Layer = nn.Linear | nn.Conv2d


def kfac(network: Network, site: Site, seed: int, *, samples: int = SAMPLES, half: bool = True) -> dict[str, Tensor]:
    """The statistic ``kfac``: for every layer the packed factors ``LAYER.A.*`` and ``LAYER.B.*``, undamped (the server
    damps them).

    ``samples`` caps the images used (a random choice among more); ``half`` stores float16 instead of float32.
    """
    part = some_of(site, samples, seed, "kfac")
    inputs, gradients = second_moments(network, part.images, part.labels)
    packed: dict[str, Tensor] = {}
    for name in inputs:
        for letter, factor in (("A", inputs[name]), ("B", gradients[name])):
            packed |= {f"{name}.{letter}.{key}": value for key, value in pack(factor, half=half).items()}
    return packed


def matrix_layers(network: nn.Module) -> dict[str, Layer]:
    """The layers whose weights are a matrix: linear and convolution layers, by name, in order."""
    return {name: module for name, module in network.named_modules() if isinstance(module, Layer)}


def matrix_shape(layer: Layer) -> tuple[int, int, int]:
    """(groups, outputs, inputs) of a layer's matrix [W | b], outputs and inputs of one group; a bias is one more
    input."""
    groups = layer.groups if isinstance(layer, nn.Conv2d) else 1
    return groups, layer.weight.shape[0] // groups, math.prod(layer.weight.shape[1:]) + (layer.bias is not None)


def join(weights: Mapping[str, Tensor], name: str, layer: Layer) -> Tensor:
    """A layer's matrix [W | b] out of a state dict: ``[groups, outputs, inputs]``."""
    groups, outputs, _ = matrix_shape(layer)
    columns = [weights[f"{name}.weight"].reshape(groups, outputs, -1)]
    if layer.bias is not None:
        columns.append(weights[f"{name}.bias"].reshape(groups, outputs, 1))
    return torch.cat(columns, dim=2)


def divide(matrix: Tensor, name: str, layer: Layer) -> dict[str, Tensor]:
    """The entries of the state dict that a matrix [W | b] stands for; undoes :func:`join`."""
    if layer.bias is None:
        return {f"{name}.weight": matrix.reshape(layer.weight.shape)}
    return {
        f"{name}.weight": matrix[:, :, :-1].reshape(layer.weight.shape),
        f"{name}.bias": matrix[:, :, -1].reshape(layer.bias.shape),
    }


def input_rows(layer: Layer, x: Tensor) -> Tensor:
    """What a layer multiplies its matrix with: ``[groups, images * positions, inputs]``, a 1 appended where it has a
    bias."""
    groups = matrix_shape(layer)[0]
    if isinstance(layer, nn.Conv2d):
        x, around = layer.bordered(x) if isinstance(layer, Same) else (x, layer.padding)
        patches = F.unfold(x, layer.kernel_size, layer.dilation, around, layer.stride)  # type: ignore[arg-type]
        rows = _by_group(patches, groups)
    else:
        rows = x[None]
    return rows if layer.bias is None else F.pad(rows, (0, 1), value=1.0)


def output_rows(layer: Layer, y: Tensor) -> Tensor:
    """The layer's outputs (or the gradients there) in the same layout: ``[groups, images * positions, outputs]``."""
    groups = matrix_shape(layer)[0]
    return _by_group(y.flatten(2), groups) if y.ndim == 4 else y[None]


def _by_group(columns: Tensor, groups: int) -> Tensor:
    """``[images, groups * n, positions]`` as rows ``[groups, images * positions, n]``."""
    return columns.reshape(len(columns), groups, -1, columns.shape[2]).permute(1, 0, 3, 2).flatten(1, 2)


def second_moments(
    network: Network, images: Tensor, labels: Tensor | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(A, B) of every layer over uint8 images; without labels there is no backward pass and B is empty."""
    inputs: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}
    first = next(network.parameters())
    images = images.to(first.device)

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def seen(layer: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
            assert isinstance(layer, Layer)
            rows = input_rows(layer, given[0].detach())
            _add(inputs, name, rows, len(given[0]) / rows.shape[1])
            if labels is not None:
                # On the tensor, not on the module: a ReLU that works in place may follow.
                output.register_hook(lambda gradient: _add(gradients, name, output_rows(layer, gradient), 1.0))  # type: ignore[no-untyped-call]

        return seen

    handles = [layer.register_forward_hook(watch(name)) for name, layer in matrix_layers(network).items()]
    network.eval()
    try:
        for start in range(0, len(images), BATCH):
            x = network.spec.prepare(images[start : start + BATCH]).to(first.dtype)
            if labels is None:
                with torch.no_grad():
                    network(x)
                continue
            with torch.enable_grad():
                x.requires_grad_()
                loss = F.cross_entropy(network(x), labels[start : start + BATCH].to(first.device), reduction="sum")
                # With respect to x alone: no weight's gradient is computed, every hook is passed.
                torch.autograd.grad(loss, x)
    finally:
        for handle in handles:
            handle.remove()
    return {name: total / len(images) for name, total in inputs.items()}, {
        name: gradients[name] / len(images) for name in inputs if gradients
    }


def _add(totals: dict[str, Tensor], name: str, rows: Tensor, scale: float) -> None:
    product = rows.mT @ rows * scale
    totals[name] = totals[name].add_(product) if name in totals else product


def some_of(site: Site, samples: int, seed: int, purpose: str) -> Part:
    """At most so many of a site's training images, chosen at random where there are more."""
    if len(site.train) <= samples:
        return site.train
    rows = torch.randperm(len(site.train), generator=generator(seed, site.id, purpose))[:samples].to(
        site.train.images.device
    )
    return Part(site.train.images[rows], site.train.labels[rows])


def pack(matrices: Tensor, *, half: bool = True) -> dict[str, Tensor]:
    """Symmetric matrices ``[groups, n, n]`` as their upper triangles; with ``half`` in float16, in units of each one's
    largest entry."""
    rows, columns = torch.triu_indices(matrices.shape[1], matrices.shape[1], device=matrices.device)
    triangle = matrices[:, rows, columns].float()
    if not half:
        return {"triangle": triangle}
    scale = triangle.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny)
    return {"triangle": (triangle / scale[:, None]).half(), "scale": scale}


def unpack(
    packed: Mapping[str, Tensor], n: int, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
) -> Tensor:
    """The symmetric matrices ``[groups, n, n]`` that :func:`pack` was given."""
    values = packed["triangle"].to(device, dtype)
    if "scale" in packed:
        values = values * packed["scale"].to(device, dtype)[:, None]
    rows, columns = torch.triu_indices(n, n, device=device)
    matrices = torch.empty(len(values), n, n, dtype=dtype, device=device)
    matrices[:, rows, columns] = values
    matrices[:, columns, rows] = values
    return matrices


def under(start: str, given: Sent) -> dict[str, Tensor]:
    """The tensors ``START.REST``, by what follows."""
    return {name.removeprefix(f"{start}."): value for name, value in given.items() if name.startswith(f"{start}.")}


def packed_entries(start: str, groups: int, n: int, given: Sent) -> dict[str, Entry]:
    """What :func:`pack` makes of matrices ``[groups, n, n]``: the sender chose the precision."""
    shape = (groups, n * (n + 1) // 2)
    if f"{start}.scale" not in given:
        return {f"{start}.triangle": Entry(torch.float32, shape)}
    scale = Entry(torch.float32, (groups,), low=torch.finfo(torch.float32).tiny)
    return {f"{start}.triangle": Entry(torch.float16, shape, -1.0, 1.0), f"{start}.scale": scale}


class Kfac(Extra):
    """Two positive semidefinite factors for every layer; where a layer has a bias its last input is always 1, and so is
    the last number on A's diagonal."""

    name = "kfac"
    cure = "train it with --set objective.send=[kfac], or use fedavg"

    def entries(self, manifest: Manifest, given: Sent) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for start, groups, n, _ in factors(manifest):
            found |= packed_entries(start, groups, n, given)
        return found

    def onto(self, manifest: Manifest, given: Sent, source: Sequence[int]) -> dict[str, Tensor]:
        """Of a linear head the outputs are the classes: B in their order, and no gradient for those not known."""
        found = dict(given)
        if f"{OUTPUTS}.triangle" in given:
            found[f"{OUTPUTS}.triangle"] = reordered(given[f"{OUTPUTS}.triangle"], manifest.spec.classes, source)
        return found

    def sound(self, manifest: Manifest, given: Sent) -> str:
        for start, _, n, one in factors(manifest):
            factor = unpack(under(start, given), n, torch.float32)
            if not positive(factor):
                return f"{start} is not positive semidefinite"
            if one and not bool(((factor[:, -1, -1] - 1).abs() < 1e-2).all()):
                return f"{start} does not end with the 1 of the bias"
        return ""

    def sizes(self, manifest: Manifest, given: Sent) -> Sizes:
        """Root mean square inputs and gradients."""
        found = {}
        for start, _, n, _ in factors(manifest):
            packed, (rows, columns) = under(start, given), torch.triu_indices(n, n)
            squares = packed["triangle"][:, rows == columns].double().mean(1) * packed.get("scale", torch.ones(1))
            found[start] = math.sqrt(max(0.0, float(squares.mean())))
        return found


OUTPUTS = "kfac.head.B"


def reordered(triangle: Tensor, n: int, source: Sequence[int]) -> Tensor:
    """Upper triangles ``[groups, n (n + 1) / 2]`` of symmetric matrices with rows and columns in another order, zeros
    where ``source`` is -1: every number as it was packed."""
    at = torch.empty(n, n, dtype=torch.int64)
    rows, columns = torch.triu_indices(n, n)
    at[rows, columns] = at[columns, rows] = torch.arange(len(rows))
    at = spread(spread(at, source, 0, -1), source, 1, -1)
    return spread(triangle, at[tuple(torch.triu_indices(len(source), len(source)))].tolist(), 1)


def factors(manifest: Manifest) -> Iterator[tuple[str, int, int, bool]]:
    """(name, groups, rows, whether its last number is 1) of every factor that a network has."""
    for name, (groups, outputs, inputs), biased in matrices(manifest.spec):
        yield f"kfac.{name}.A", groups, inputs, biased
        yield f"kfac.{name}.B", groups, outputs, False


@functools.lru_cache(maxsize=64)
def matrices(spec: ModelSpec) -> list[tuple[str, tuple[int, int, int], bool]]:
    """(name, shape of its matrix, whether it has a bias) of every layer that a spec's network has."""
    layers = matrix_layers(spec.skeleton())
    return [(name, matrix_shape(layer), layer.bias is not None) for name, layer in layers.items()]
