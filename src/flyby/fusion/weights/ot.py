"""OT fusion [Singh and Jaggi, NeurIPS 2020]: match the neurons of every network to those of one, then average.

The neurons of a layer have no order of their own: sites that began differently may have learned the same features in
other places. For equal widths optimal transport is an exact assignment: for every layer, the permutation of a client's
neurons whose incoming weights [W | b], with the layer before already matched, are nearest to the reference's in sum of
squares (``cost: activations``: whose outputs on proxy images are). Channels that are added together (residual stages),
or follow each other depthwise, share one matching, found from all layers that produce them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from flyby.errors import BadInput
from flyby.fusion.base import Fusion, Server
from flyby.fusion.predictor import Predictor
from flyby.fusion.weights.average import AverageSettings, FedAvg
from flyby.fusion.weights.layers import Revised
from flyby.models import ModelSpec, Network
from flyby.parcels.inbox import Inbox
from flyby.parcels.parcel import Parcel
from flyby.rng import generator


class Axis(NamedTuple):
    """One dimension of one tensor along which a group of neurons lies, ``block`` numbers per neuron (more than 1 where
    maps are flattened)."""

    tensor: str
    dim: int
    block: int


Weights = Mapping[str, Tensor]
Orders = dict[str, Tensor]  # by group of neurons: the client's neuron that takes each place


class OtSettings(AverageSettings):
    cost: Literal["weights", "activations"] = Field(
        "weights", description="activations: outputs on proxy images instead of incoming weights"
    )
    rounds: int = Field(4, ge=1, description="most passes over all layers; a second one helps residual stages only")
    probe: int = Field(512, ge=1, description="proxy images used for cost: activations")


class OtFusion(Fusion):
    name = "ot"
    paper = "OT fusion: Singh and Jaggi, NeurIPS 2020"
    about = "neurons matched to the largest site's, layer by layer, then averaged"
    settings_type = OtSettings
    settings: OtSettings

    def combine(self, parcels: Inbox, server: Server) -> Predictor:
        parcels.same_spec(self.name)
        proxy, device = server.proxy, server.device
        if self.settings.cost == "activations" and (proxy is None or len(proxy) == 0):
            raise BadInput(
                "fusion.cost=activations needs unlabelled images; give them with --proxy PATH, or use"
                " fusion.cost=weights"
            )
        spec = parcels.manifests[0].spec
        place = max(range(len(parcels)), key=lambda k: parcels.samples[k])  # the first of the largest
        reference = parcels.read(place)
        rows = []

        def aligned(item: Parcel) -> dict[str, Tensor]:
            if item.manifest.sender == reference.manifest.sender:
                return item.weights
            if self.settings.cost == "weights":
                orders = match_weights(spec, reference.weights, item.weights, self.settings.rounds)
            else:
                assert proxy is not None
                rows_used = torch.randperm(len(proxy), generator=generator(server.seed, "server", "probe"))[
                    : self.settings.probe
                ].numpy()
                images = torch.from_numpy(proxy.images[rows_used])
                orders = match_activations(reference.network(device), item.network(device), images)
            moved = permute(spec, item.weights, orders)
            changed = sum(int((order != torch.arange(len(order))).sum()) for order in orders.values())
            neurons = sum(len(order) for order in orders.values())
            rows.append(
                [
                    item.manifest.sender,
                    neurons,
                    changed,
                    *(round(distance(reference.weights, w), 4) for w in (item.weights, moved)),
                ]
            )
            return moved

        plain = AverageSettings(weights=self.settings.weights, recalibrate=self.settings.recalibrate)
        predictor = FedAvg(plain).fuse(Revised(parcels, aligned), server)
        server.report.append(
            {
                "title": "OT fusion: the matching",
                "text": (
                    f"Neurons were matched to those of {reference.manifest.sender}, which has the most samples."
                    " Distances are between all weights, relative to the reference's."
                ),
                "table": {"columns": ["site", "neurons", "moved", "distance before", "distance after"], "rows": rows},
            }
        )
        return predictor


@lru_cache(maxsize=64)
def neuron_axes(spec: ModelSpec) -> dict[str, tuple[Axis, ...]]:
    """Every group of neurons that can be reordered on its own, in the order data meets them, with all dimensions it
    lies along.

    Found by making one width larger by 1 and seeing which dimensions of which tensors grow: the spec itself says what
    is coupled. Features that meet fixed anchors (the ``etf`` head) are left out: they have an order of their own.
    """
    shapes = spec.shapes()
    wider = {key: spec.replace(widths={**spec.widths, key: width + 1}) for key, width in spec.layer_widths().items()}
    for i, width in enumerate(spec.projector):
        wider[f"projector.{i}"] = spec.replace(projector=(*spec.projector[:i], width + 1, *spec.projector[i + 1 :]))
    found: dict[str, tuple[Axis, ...]] = {}
    for key, larger in wider.items():
        grown = larger.shapes()
        axes = [
            Axis(name, dim, grown[name][0][dim] - extent)
            for name, (shape, _) in shapes.items()
            for dim, extent in enumerate(shape)
            if grown[name][0][dim] != extent
        ]
        if not any(axis.tensor == "head.anchors" for axis in axes):
            found[key] = tuple(axes)
    position = {name: i for i, name in enumerate(shapes)}
    return dict(sorted(found.items(), key=lambda item: min(position[axis.tensor] for axis in item[1] if axis.dim == 0)))


def permute(spec: ModelSpec, weights: Weights, orders: Orders) -> dict[str, Tensor]:
    """The same function with its neurons in another order: place i of group g is taken by neuron ``orders[g][i]``."""
    moved = dict(weights)
    for key, axes in neuron_axes(spec).items():
        if key in orders:
            for axis in axes:
                moved[axis.tensor] = _select(moved[axis.tensor], axis, orders[key])
    return moved


def _select(tensor: Tensor, axis: Axis, order: Tensor) -> Tensor:
    places = (order[:, None] * axis.block + torch.arange(axis.block)).flatten()
    return tensor.index_select(axis.dim, places)


def match_weights(spec: ModelSpec, reference: Weights, weights: Weights, rounds: int = 4) -> Orders:
    """The order of a client's neurons whose incoming weights are nearest to the reference's, group by group.

    The first pass uses the layers whose own inputs are already matched; further ones, until nothing changes, use all
    that feed a group.
    """
    axes = neuron_axes(spec)
    along: dict[str, list[tuple[str, Axis]]] = {}  # by tensor: the groups that lie along its other dimensions
    for key, places in axes.items():
        for axis in places:
            if axis.dim > 0:
                along.setdefault(axis.tensor, []).append((key, axis))
    orders: Orders = {}
    for _ in range(rounds):
        before = dict(orders)
        for key, places in axes.items():
            likeness: Tensor | None = None
            for axis in places:
                others = along.get(axis.tensor, [])
                if axis.dim > 0 or weights[axis.tensor].ndim < 2 or any(other not in orders for other, _ in others):
                    continue
                theirs, ours = weights[axis.tensor], reference[axis.tensor]
                for other, where in others:
                    theirs = _select(theirs, where, orders[other])
                product = _rows(reference, axis.tensor, ours) @ _rows(weights, axis.tensor, theirs).T
                likeness = product if likeness is None else likeness + product
            assert likeness is not None, f"nothing that feeds {key} was matched before it"
            orders[key] = assign(likeness)
        if before and all(torch.equal(before[key], orders[key]) for key in orders):
            break
    return orders


def _rows(weights: Weights, name: str, weight: Tensor) -> Tensor:
    """[W | b] of a layer, a row a neuron, in float64."""
    rows = weight.flatten(1).double()
    bias = weights.get(name.removesuffix("weight") + "bias")
    return rows if bias is None else torch.cat((rows, bias[:, None].double()), dim=1)


def assign(likeness: Tensor) -> Tensor:
    """The permutation with the largest sum of ``likeness[i, order[i]]``. For inner products that is the smallest sum of
    squared distances."""
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

    _, order = linear_sum_assignment(likeness.numpy(), maximize=True)
    return torch.from_numpy(order)


@torch.no_grad()
def match_activations(reference: Network, network: Network, images: Tensor) -> Orders:
    """The order of a client's neurons whose outputs on uint8 images are nearest to the reference's.

    Outputs are taken before the activation, after BatchNorm where there is one; both networks see a batch at a time, so
    that only one batch of outputs is held.
    """
    spec = reference.spec
    watched = {key: _producers(reference, axes) for key, axes in neuron_axes(spec).items()}
    likeness: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    handles = []
    for net in (reference, network):
        for key, names in watched.items():
            for name in names:

                def seen(
                    _: nn.Module,
                    __: object,
                    y: Tensor,
                    key: str = key,
                    name: str = name,
                    first: bool = net is reference,
                ) -> None:
                    rows = y.transpose(0, 1).flatten(1)
                    if first:
                        outputs[name] = rows.clone()  # what follows may work in place
                    else:
                        product = (outputs.pop(name) @ rows.T).double().cpu()
                        likeness[key] = likeness[key] + product if key in likeness else product

                handles.append(net.get_submodule(name).register_forward_hook(seen))
    device = next(reference.parameters()).device
    try:
        for piece in torch.split(images, 64):
            for net in (reference, network):
                net(net.spec.prepare(piece.to(device)))
    finally:
        for handle in handles:
            handle.remove()
    return {key: assign(value) for key, value in likeness.items()}


def _producers(network: Network, axes: tuple[Axis, ...]) -> list[str]:
    """The modules whose outputs are the neurons of a group: BatchNorms where it has some, else its layers."""
    owners = dict.fromkeys(axis.tensor.rpartition(".")[0] for axis in axes if axis.dim == 0)
    norms = [name for name in owners if isinstance(network.get_submodule(name), nn.BatchNorm2d)]
    return norms or list(owners)


def distance(reference: Weights, weights: Weights) -> float:
    """||weights - reference|| / ||reference|| over everything that is learned or measured."""
    floating = [name for name, value in reference.items() if value.is_floating_point()]
    gap = sum(float((weights[name] - reference[name]).double().square().sum()) for name in floating)
    size = sum(float(reference[name].double().square().sum()) for name in floating)
    return float((gap / max(size, 1e-30)) ** 0.5)
