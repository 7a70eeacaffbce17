"""FedDF [Lin et al., NeurIPS 2020], one-shot: the mean of the clients' logits is distilled on unlabelled proxy images.

Loss: KL(softmax(mean_k f_k(x)) || softmax(s(x))), T = 1. The student starts at the weighted average of the clients
where they share one architecture and it is the student's too, as in the paper's Algorithm 1; else afresh.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field

from flyby.data.dataset import Dataset
from flyby.errors import BadInput
from flyby.fusion.base import FusionSettings
from flyby.fusion.distilled.distill import Distillation, DistillSettings, Learner, Student, student_spec
from flyby.fusion.distilled.synthesis import Pool, as_unit
from flyby.fusion.distilled.teachers import Teachers
from flyby.fusion.weights.average import FedAvg
from flyby.models import Network
from flyby.parcels.inbox import Inbox


class FedDFSettings(DistillSettings):
    epochs: int = Field(50, ge=1, le=100_000)
    optimizer: Literal["sgd", "adam"] = "adam"
    lr: float = Field(1e-3, gt=0)
    schedule: Literal["constant", "cosine", "one-cycle"] = "cosine"
    temperature: float = Field(1.0, gt=0)
    start: Literal["average", "fresh"] = Field(
        "average", description="where the student starts, if the clients' weights can be averaged"
    )
    refuse: tuple[str, ...] = Field((), description="digests of data that may not serve as proxy, such as a test set's")


class FedDF(Distillation):
    """Ensemble distillation on a named unlabelled proxy set; the proxy's labels are never read."""

    name = "feddf"
    paper = "FedDF: Lin et al., NeurIPS 2020"
    about = "ensemble distilled on unlabelled proxy images (--proxy PATH)"
    data_free = False
    settings_type: ClassVar[type[FusionSettings]] = FedDFSettings
    settings: FedDFSettings

    def learner(self, parcels: Inbox, seed: int) -> Learner:
        specs = {m.spec.replace(partial=False) for m in parcels.manifests}
        if self.settings.start == "average" and specs == {student_spec(parcels, self.settings.student)}:
            network = FedAvg().fuse(parcels).networks[0]
            assert isinstance(network, Network)
            return Student(network)
        return super().learner(parcels, seed)

    def pool(self, teachers: Teachers, proxy: Dataset | None) -> Pool:
        if proxy is not None and proxy.digest in self.settings.refuse:
            raise BadInput(
                "the proxy set is one that may not be used (fusion.refuse), such as the test set; name other images"
                " with --proxy"
            )
        pool = Pool(teachers.specs[0], len(teachers), teachers.device, kept=False)
        add_proxy(pool, teachers, proxy, self.name, asked=not self.settings.augment)
        return pool


def add_proxy(pool: Pool, teachers: Teachers, proxy: Dataset | None, rule: str, asked: bool) -> None:
    """Unlabelled images for a pool; ``asked``: with what clients say of them, where nobody will ask again."""
    if proxy is None or len(proxy) < 2:
        raise BadInput(
            f"{rule} distils on unlabelled images and has none; name some with --proxy PATH (flyby run: --set"
            " proxy=PATH), or use dense, which needs none"
        )
    spec = teachers.specs[0]
    if (proxy.size, proxy.channels) != (spec.size, spec.channels):
        raise BadInput(
            f"the proxy images are {proxy.size}x{proxy.channels} where the clients take {spec.size}x{spec.channels};"
            " convert them first"
        )
    images, _ = proxy.tensors(device=teachers.device)
    said = (
        teachers.say(as_unit(images))
        if asked
        else torch.empty((len(teachers), len(images), 0), device=pool.images.device)
    )
    pool.add(images, torch.full((len(images),), -1, device=teachers.device), said)
