"""FedCVAE's client [Heinbaugh, Luz-Ricca and Shao, ICLR 2023]: a conditional VAE of the site's images, beside a plain
classifier.

L = CE(classifier) + E_q(z|x,y)[-log p(x|z,y)] + beta KL(q(z|x,y) || N(0, I)), with pixels in 0..1 as Bernoulli
(``bce``) or unit Gaussian (``mse``) variables, summed over the picture and averaged over the batch. Classifier and CVAE
share no parameter, so the same upload also serves ensembles and every other rule on plain classifiers. The decoder
travels; the encoder, which has seen the images, stays.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from flyby.data.site import Site
from flyby.models import Network
from flyby.models.decoder import Decoder, DecoderSpec, Encoder, build
from flyby.objectives.base import Batch, ObjectiveSettings, Terms
from flyby.objectives.supervised import Supervised, SupervisedSettings
from flyby.rng import generator


class CvaeSettings(SupervisedSettings):
    latent: int = Field(16, ge=1, le=4096, description="length of z; the same at every site for fedcvae-kd")
    width: int = Field(32, ge=1, le=4096, description="filters of encoder and decoder")
    beta: float = Field(1.0, ge=0, description="weight of the KL term")
    reconstruction: Literal["bce", "mse"] = Field(
        "bce", description="pixels as Bernoulli (bce) or unit Gaussian (mse) variables"
    )


class Cvae(Supervised):
    """A classifier and a conditional VAE, trained side by side."""

    name = "cvae"
    about = "a plain classifier, and beside it a conditional VAE whose decoder travels"
    per_sample = False  # it trains a decoder beside the network
    one_class = True  # for the decoder's sake
    pictures = True  # which it learns to paint
    paper = "FedCVAE: Heinbaugh et al., ICLR 2023"
    provides = Supervised.provides | {"decoder"}
    settings_type: ClassVar[type[ObjectiveSettings]] = CvaeSettings
    settings: CvaeSettings
    encoder: Encoder
    decoder: Decoder
    steps: Tensor

    @classmethod
    def defaults(cls, settings: ObjectiveSettings) -> dict[str, Any]:
        """Adam, as published: under SGD the classifier's learning rate makes a VAE diverge or stand still."""
        return {"optimizer": "adam", "lr": 1e-3, "weight_decay": 0.0}

    def prepare(self, model: Network, site: Site, seed: int) -> None:
        device = next(model.parameters()).device
        spec = DecoderSpec.beside(model.spec, self.settings.latent, self.settings.width)
        self.encoder = build(Encoder, spec, generator(seed, "shared", "encoder")).to(device)
        self.decoder = build(Decoder, spec, generator(seed, "shared", "decoder")).to(device)
        # How many batches were seen names the noise of the next one, so that resume is exact; on the host, where
        # reading it waits for nothing.
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.key = (seed, site.id, "latent")
        self.pixel_scale = tuple(t.view(-1, 1, 1) for t in model.spec.statistics(device))

    def loss(self, model: Network, batch: Batch, progress: Tensor) -> Terms:
        plain = super().loss(model, batch, progress)
        # Of the images as they are: a decoder that learnt shifted ones would paint their black borders.
        pixels, labels = self.pixels(batch), batch.labels
        if batch.plain is not None:
            labels = labels[: len(pixels)]
        centre, log_variance = self.encoder(pixels, labels)
        noise = torch.randn(
            centre.shape, generator=generator(*self.key, int(self.steps), device=centre.device), device=centre.device
        )
        self.steps += 1
        logits = self.decoder.logits(centre + noise * (log_variance / 2).exp(), labels)
        apart, divergence = (
            reconstruction(logits, pixels, self.settings.reconstruction),
            gaussian_kl(centre, log_variance),
        )
        parts = {"cross_entropy": plain.total, "reconstruction": apart, "kl": divergence, **plain.parts}
        return Terms(plain.total + apart + self.settings.beta * divergence, parts)

    def pixels(self, batch: Batch) -> Tensor:
        """What the decoder is to paint, in 0..1."""
        if batch.plain is not None:
            return batch.plain.permute(0, 3, 1, 2).float() / 255
        mean, std = self.pixel_scale
        return (batch.images.float() * std + mean).clamp(0, 1)

    def extras(self, model: Network, site: Site, seed: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """``decoder.NAME`` for each of its tensors. Label frequencies and count are the manifest's own, as exact as the
        site chose."""
        tensors, facts = super().extras(model, site, seed)
        tensors |= {f"decoder.{name}": value for name, value in self.decoder.state_dict().items()}
        return tensors, facts | {"decoder_latent": self.settings.latent, "decoder_width": self.settings.width}


def reconstruction(logits: Tensor, pixels: Tensor, kind: str) -> Tensor:
    """-log p(x | z, y) up to a constant, summed over the picture, the batch's mean: ``bce``, or ``mse`` = half the
    squared distance."""
    if kind == "bce":
        each = F.binary_cross_entropy_with_logits(logits, pixels, reduction="none")
    else:
        each = (logits.sigmoid() - pixels).square() / 2
    return each.flatten(1).sum(1).mean()


def gaussian_kl(mean: Tensor, log_variance: Tensor) -> Tensor:
    """KL(N(mean, diag variance) || N(0, I)) = sum_j (mean_j^2 + var_j - 1 - log var_j) / 2, the batch's mean."""
    return (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean() / 2
