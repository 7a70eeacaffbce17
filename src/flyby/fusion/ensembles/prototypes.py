"""FedProto [Tan et al., AAAI 2022] and FedTGP's server [Zhang et al., AAAI 2024], one-shot: nearest class mean among
all clients.

Clients send their models and, per class they hold, the mean m_kc of their unnormalised features. As published, later
rounds pull the clients' feature spaces together; after a single exchange they are still apart. So each client measures
in its own space, and only for the classes it holds (H_c are the holders of c):

    score_c(x) = - (1 / |H_c|) sum_{k in H_c} ||f_k(x) - g_kc|| / s_k.

FedProto: g_kc = m_kc; ``space: shared`` is the literal reading instead, the clients' mean feature against the mean of
their means. FedTGP: g_kc = g_c = MLP(embedding_c), trained on all uploaded means with CE over -(||m_kc - g_j|| + m 1[j
= c]), m = min(max_c min_j ||M_c - M_j||, 100) for the averaged means M. s_k = 1, or with ``scale: means`` the mean
length of client k's means: for mixed architectures, whose features differ in length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from flyby.errors import unknown
from flyby.fusion.base import Fusion, FusionSettings, Server
from flyby.fusion.predictor import Predictor
from flyby.models import ModelSpec, Network
from flyby.models.heads import uniform_fan_in
from flyby.parcels.inbox import Inbox
from flyby.rng import generator
from flyby.statistics.catalogue import EXTRAS
from flyby.statistics.extras import sent

SPACES = ("own", "shared")
Means = dict[int, Tensor]  # class -> [d]


class NearestMeans(Predictor):
    """All networks kept, with one table of class means [C, d_k] each; ``held`` [K, C] says which rows count, ``scales``
    [K] are s_k."""

    kind = "nearest-means"

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        class_names: Sequence[str],
        networks: Sequence[Network] | None = None,
        *,
        space: str = "own",
        means: Sequence[Tensor] | None = None,
        held: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> None:
        if space not in SPACES:
            raise unknown("space", space, SPACES)
        super().__init__(specs, class_names, networks, space=space)
        self.space, classes = space, len(self.class_names)
        for k, network in enumerate(self.networks):
            empty = torch.zeros(classes, int(network.feature_dim))  # type: ignore[arg-type]
            self.register_buffer(f"means_{k}", empty if means is None else means[k].float().clone())
        self.register_buffer("held", torch.zeros(len(self.specs), classes) if held is None else held.float())
        self.register_buffer("scales", torch.ones(len(self.specs)) if scales is None else scales.float())

    held: Tensor
    scales: Tensor

    def voice(self, k: int, network: Network, features: Tensor) -> Tensor:
        return features.float()

    def combine(self, voices: Sequence[Tensor], images: Tensor) -> Tensor:
        if self.space == "shared":
            away = distances(torch.stack(tuple(voices)).mean(0), self.means_0)  # type: ignore[arg-type]
            return (-away).masked_fill(self.held.sum(0) == 0, torch.finfo(away.dtype).min)
        each = torch.stack([distances(feature, getattr(self, f"means_{k}")) for k, feature in enumerate(voices)])
        total, holders = torch.einsum("kc,knc->nc", self.held / self.scales[:, None], each), self.held.sum(0)
        # A class nobody speaks for comes after all others.
        return (-total / holders.clamp_min(1)).masked_fill(holders == 0, torch.finfo(total.dtype).min)


def distances(points: Tensor, centres: Tensor) -> Tensor:
    """||p_i - c_j|| as [N, C]; not through the scalar product, which loses the small ones."""
    return (points[:, None] - centres[None]).square().sum(2).clamp_min(1e-12).sqrt()


class FedProtoSettings(FusionSettings):
    space: Literal["own", "shared"] = Field(
        "own", description="each client's own feature space, or the mean of all features"
    )
    scale: Literal["none", "means"] = Field(
        "none", description="distances as they are, or in units of the mean length of a client's means"
    )


class FedProto(Fusion):
    name = "fedproto"
    paper = "FedProto: Tan et al., AAAI 2022"
    about = "nearest class mean, each client in its own feature space for the classes it holds"
    needs = frozenset({"weights", "class-means"})
    heterogeneous = True
    settings_type = FedProtoSettings
    settings: FedProtoSettings

    def combine(self, parcels: Inbox, server: Server) -> Predictor:
        if self.settings.space == "shared":
            parcels.same_features("fedproto with space=shared")
        networks, tables = gather(parcels)
        classes = len(parcels.class_names)
        if self.settings.space == "shared":
            means = [filled(averaged(tables), classes)] * len(tables)
        else:
            means = [filled(table, classes) for table in tables]
        return predictor_of(parcels, networks, tables, means, self.settings.scale, self.settings.space)


class FedTgpSettings(FusionSettings):
    scale: Literal["none", "means"] = Field(
        "none", description="distances as they are, or in units of the mean length of a client's means"
    )
    epochs: int = Field(500, ge=1, description="passes over the uploaded means; published: 100 in each of many rounds")
    batch: int = Field(10, ge=1, description="class means in a step")
    lr: float = Field(0.01, gt=0, description="learning rate of the prototypes")
    threshold: float = Field(100.0, ge=0, description="largest margin")


class FedTgp(Fusion):
    name = "fedtgp"
    paper = "FedTGP: Zhang et al., AAAI 2024"
    about = "global prototypes trained at the server to stand apart, nearest one wins"
    needs = frozenset({"weights", "class-means"})
    settings_type = FedTgpSettings
    settings: FedTgpSettings

    def combine(self, parcels: Inbox, server: Server) -> Predictor:
        parcels.same_features(self.name)
        networks, tables = gather(parcels)
        margin = margin_of(averaged(tables), self.settings.threshold)
        trained, losses = train_prototypes(tables, len(parcels.class_names), margin, self.settings, server)
        rows: list[list[object]] = [
            ["margin", round(margin, 4)],
            ["first loss", round(losses[0], 4)],
            ["last loss", round(losses[-1], 4)],
        ]
        table = {"columns": ["", "value"], "rows": rows}
        server.report.append({"title": "Trained global prototypes", "table": table})
        return predictor_of(parcels, networks, tables, [trained] * len(tables), self.settings.scale, "own")


class GlobalPrototypes(nn.Module):
    """g_c = MLP(embedding_c), one hidden layer of width d: all prototypes ``[C, d]``."""

    def __init__(self, classes: int, dim: int, rng: torch.Generator) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(classes, dim, generator=rng))
        self.hidden, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        for layer in (self.hidden, self.out):
            uniform_fan_in(layer, rng)

    def forward(self) -> Tensor:
        prototypes: Tensor = self.out(F.relu(self.hidden(self.embedding)))
        return prototypes


def train_prototypes(
    tables: Sequence[Means], classes: int, margin: float, settings: FedTgpSettings, server: Server
) -> tuple[Tensor, list[float]]:
    """The trained prototypes [C, d] on the host and each epoch's mean loss. A matter of seconds: it is not
    checkpointed."""
    seed, device = server.seed, server.device
    points = torch.stack([mean for table in tables for mean in table.values()]).float()
    labels = torch.tensor([c for table in tables for c in table], device=device)
    model = GlobalPrototypes(classes, points.shape[1], generator(seed, "server", "prototypes")).to(device)
    points = points.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr)
    losses = []
    for epoch in range(settings.epochs):
        order = torch.randperm(len(points), generator=generator(seed, "server", "means", epoch)).to(device)
        seen = torch.zeros((), device=device)
        for rows in torch.split(order, settings.batch):
            loss = margin_loss(points[rows], labels[rows], model(), margin)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            seen = seen + loss.detach() * len(rows)
        losses.append(float(seen) / len(points))
    return model().detach().cpu(), losses


def margin_loss(points: Tensor, labels: Tensor, prototypes: Tensor, margin: float) -> Tensor:
    """CE over -(||p - g_c|| + m 1[c = y]): the own prototype must be nearer than every other by the margin."""
    away = distances(points, prototypes)
    return F.cross_entropy(-(away + margin * F.one_hot(labels, len(prototypes))), labels)


def margin_of(means: Means, threshold: float) -> float:
    """min(max_c min_{j != c} ||M_c - M_j||, threshold): as far apart as the loneliest class already is. 0 for a single
    class."""
    rows = torch.stack(list(means.values()))
    apart = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(torch.inf).amin(1)
    return min(float(apart.max()), threshold) if len(rows) > 1 else 0.0


def averaged(tables: Sequence[Means]) -> Means:
    """M_c: the plain mean over the clients that hold c, as both papers' code has it."""
    return {c: torch.stack([t[c] for t in tables if c in t]).mean(0) for c in sorted(set().union(*tables))}


def filled(table: Means, classes: int) -> Tensor:
    """The means as rows of [C, d], zeros where there is none."""
    rows = torch.zeros(classes, len(next(iter(table.values()))))
    for c, mean in table.items():
        rows[c] = mean
    return rows


def gather(parcels: Inbox) -> tuple[list[Network], list[Means]]:
    """Each client's network and class means."""
    networks, tables = [], []
    for item in parcels:
        found = sent(item, EXTRAS["class-means"])
        networks.append(item.network())
        tables.append(dict(zip(found["class-means.classes"].tolist(), found["class-means.means"], strict=True)))
    return networks, tables


def predictor_of(
    parcels: Inbox, networks: list[Network], tables: list[Means], means: list[Tensor], scale: str, space: str
) -> NearestMeans:
    held = torch.zeros(len(tables), len(parcels.class_names))
    for k, table in enumerate(tables):
        held[k, list(table)] = 1.0
    lengths = torch.stack([torch.stack(list(table.values())).norm(dim=1).mean().clamp_min(1e-6) for table in tables])
    scales = lengths if scale == "means" else torch.ones(len(tables))
    specs = [m.spec for m in parcels.manifests]
    return NearestMeans(specs, parcels.class_names, networks, space=space, means=means, held=held, scales=scales)
