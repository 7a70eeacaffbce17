"""What closed forms share: sums of features added up over the parcels, a linear head solved from the total, and the
network that ends in it.

Sums are added in sender order, whoever came first, so the same parcels give the same bytes. All sites must have looked
through the same eyes: one spec, one set of weights before the head, and the same random features if any. Where sums
have noise, it is the total that is brought back to what images could give, once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from flyby.errors import BadInput
from flyby.fusion.alignment import aligned
from flyby.fusion.base import Fusion, FusionSettings, Server
from flyby.fusion.predictor import Predictor, Single
from flyby.models import ModelSpec, Network
from flyby.models.heads import LinearHead
from flyby.parcels.inbox import Inbox
from flyby.parcels.parcel import EXTRA, Manifest
from flyby.statistics.extras import sent
from flyby.statistics.feature_sums import NAME, Choice, FeatureSums, Sums, choice_of, random_rows

KIND = FeatureSums()
# How far the score of a class that no site holds lies below the mean of the others, which is never above the best.
NEVER = -1e3


class ClosedSettings(FusionSettings):
    keep: Literal["sites", "total"] = Field(
        "sites",
        description="what a model folder keeps: each site's sums (any is taken out by name), or their total alone",
    )


@dataclass(frozen=True)
class Linear:
    """Scores W x + b: ``weight`` [C, D] and ``bias`` [C], in float64."""

    weight: Tensor
    bias: Tensor


class ClosedForm(Fusion):
    """A rule that solves for a linear head, given the sums alone."""

    needs = frozenset({NAME})
    settings_type = ClosedSettings
    settings: ClosedSettings

    @abstractmethod
    def solve(self, sums: Contributions, server: Server) -> Linear:
        """The head that follows from the sums. Classes without images are left to the caller."""

    def combine(self, parcels: Inbox, server: Server) -> Predictor:
        sums = Contributions(parcels, self.name, server.device)
        head = without(self.solve(sums, server), sums.total.counts)
        network = ending_in(head, parcels.read(0).network(), sums.choice)
        predictor = Single([network.spec], parcels.class_names, [network])
        predictor.temperature = self.usual_temperature(len(parcels.class_names))
        return predictor

    def usual_temperature(self, classes: int) -> float:
        """How sure its scores usually are, where no site has measured it."""
        return 1.0


def without(head: Linear, counts: Tensor) -> Linear:
    """The same head, which never answers with a class of which there was no image."""
    held = counts.to(head.bias.device) > 0
    weight, bias = head.weight[held].mean(0), head.bias[held].mean() + NEVER
    return Linear(torch.where(held[:, None], head.weight, weight), torch.where(held, head.bias, bias))


class Contributions:
    """The sums that parcels bring, one by one in sender order, as they are sent together (``sent``) and as a rule may
    use them (``total``); each parcel is one site or one region."""

    def __init__(self, parcels: Inbox, rule: str, device: torch.device | str = "cpu") -> None:
        parcels = aligned(parcels, (NAME,))
        parcels.same_spec(rule)
        same_eyes(parcels, rule)
        once(parcels.manifests)
        self.parcels, self.rule, self.device = parcels, rule, device
        self.choice = choice_of(sent(parcels.read(0), KIND))
        self.sent = self._total()

    @cached_property
    def total(self) -> Sums:
        made = self.sent.settled()
        if not bool((made.counts > 0).any()):
            raise BadInput(
                "the noise is larger than the count of every class, so nothing can be told from these sums; raise"
                " --dp-epsilon, or fuse more sites"
            )
        return made

    def __len__(self) -> int:
        return len(self.parcels)

    def __iter__(self) -> Iterator[Sums]:
        for item in self.parcels:
            given = sent(item, KIND)
            if choice_of(given)[:2] != self.choice[:2]:
                one, first = item.manifest.sender, self.parcels.manifests[0].sender
                raise BadInput(
                    f"{self.rule} adds up features of one kind, and {one} and {first} have other random features beside"
                    f" them; send the same {NAME}:random=...;draw=... from all sites"
                )
            yield Sums.unpacked(given, self.device)

    def _total(self) -> Sums:
        each = iter(self)
        total = next(each)
        for sums in each:
            total += sums
        return total


def eyes(manifest: Manifest) -> dict[str, str]:
    """The hashes of all weights that features come from."""
    stored = {name: info.sha256 for name, info in manifest.tensors.items() if not name.startswith(EXTRA)}
    return {name: sha for name, sha in stored.items() if not name.startswith("head.")}


def same_eyes(parcels: Inbox, rule: str) -> None:
    """Refuse sums of features that different networks gave."""
    first = parcels.manifests[0]
    own = eyes(first)
    for manifest in parcels.manifests:
        if eyes(manifest) != own:
            raise BadInput(
                f"{rule} adds up features, and those of {manifest.sender} and {first.sender} come from different"
                " weights; train all sites with --method ridge (nothing is trained), one seed and one backbone"
            )


def members(manifest: Manifest) -> tuple[list[str], list[str]]:
    """(names, digests of their sums) of the sites that a parcel speaks for, as far as it tells."""
    if manifest.sites == 1 and "site_digests" not in manifest.meta:
        return [manifest.sender], [manifest.content_digest((NAME,))[:16]]
    told = [manifest.meta.get(key) for key in ("site_names", "site_digests")]
    names, digests = ([str(one) for one in part] if isinstance(part, list) else [] for part in told)
    return [manifest.sender, *names], digests


def once(manifests: list[Manifest]) -> None:
    """Refuse a site that is in two parcels: its images would count twice."""
    seen: dict[str, str] = {}
    for manifest in manifests:
        names, digests = members(manifest)
        if len(digests) != manifest.sites:
            raise BadInput(
                f"{manifest.sender} says that it speaks for {manifest.sites} sites and tells of {len(digests)}; have it"
                " made again with flyby fuse --partial"
            )
        for one in [*names, *(f"a site with the sums {digest}" for digest in digests)]:
            if one in seen:
                raise BadInput(
                    f"{one} counts in {seen[one]} and again in {manifest.sender}; each site counts once, so leave one"
                    " of the two parcels out"
                )
            seen[one] = manifest.sender


# -- the network


def spec_with(spec: ModelSpec, choice: Choice) -> ModelSpec:
    """The spec of the fused network. Random features become a projector: relu(R x), and x itself as relu(x) -
    relu(-x)."""
    plain = spec.replace(head="linear", logit_scale=False)
    if not choice.random:
        return plain
    if spec.projector:
        raise BadInput("random features need a network without a projector; leave out model.projector, or random=...")
    return plain.replace(projector=(choice.random + 2 * spec.feature_dim(), spec.classes))


def ending_in(head: Linear, network: Network, choice: Choice) -> Network:
    """The network with its backbone as it is, ending in a head over its features and the random ones."""
    width, classes = network.feature_dim, network.spec.classes
    made = spec_with(network.spec, choice).skeleton()
    made.backbone, made.projector = network.backbone, network.projector
    weight, bias = head.weight.float().cpu(), head.bias.float().cpu()
    if choice.random:
        identity = torch.eye(width)
        hidden = torch.cat((random_rows(choice.random, width, choice.draw), identity, -identity))
        own, drawn = weight[:, :width], weight[:, width:]
        first, last = nn.Linear(width, len(hidden)), nn.Linear(len(hidden), classes)
        _fill(first, hidden, torch.zeros(len(hidden)))
        _fill(last, torch.cat((drawn, own, -own), dim=1), bias)
        made.projector = nn.Sequential(first, nn.ReLU(), last)
        weight, bias = torch.eye(classes), torch.zeros(classes)
    made.head = LinearHead(weight.shape[1], classes, False)
    _fill(made.head, weight, bias)
    return made.eval()


def _fill(layer: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    layer.weight, layer.bias = nn.Parameter(weight.contiguous()), nn.Parameter(bias.contiguous())
