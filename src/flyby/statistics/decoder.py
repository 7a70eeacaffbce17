"""The decoder of a conditional VAE as an extra (``flyby.objectives.cvae`` trains it): ``decoder.NAME`` for each of its
tensors, and its latent and width among the manifest's facts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flyby.data.classes import spread
from flyby.models.decoder import Decoder, DecoderSpec
from flyby.parcels.parcel import Manifest, Parcel
from flyby.rng import generator
from flyby.statistics.extras import Entry, Extra, Sent, Sizes, rms, sent

PICTURES = 8  # painted to see that they are finite
MAX_LOGIT = 1e4  # of a pixel; honest ones are below a hundred


class Painter(Extra):
    """Exactly the tensors of the decoder that the manifest describes; what it paints is finite."""

    name = "decoder"
    cure = "train its sites with --method fedcvae"

    def entries(self, manifest: Manifest, given: Sent) -> dict[str, Entry]:
        tensors = described(manifest).state_dict()
        return {f"decoder.{name}": Entry(value.dtype, tuple(value.shape)) for name, value in tensors.items()}

    def onto(self, manifest: Manifest, given: Sent, source: Sequence[int]) -> dict[str, Tensor]:
        """The first layer takes z and then a place for every class; a class not known has no weight."""
        name, classes = "decoder.hidden.weight", manifest.spec.classes
        latent, own = given[name][:, :-classes], given[name][:, -classes:]
        return {**given, name: torch.cat((latent, spread(own, source, 1)), dim=1)}

    @torch.no_grad()
    def sound(self, manifest: Manifest, given: Sent) -> str:
        decoder, labels = rebuilt(manifest, given), torch.arange(PICTURES) % manifest.spec.classes
        z = torch.randn(PICTURES, decoder.spec.latent, generator=generator("extras", "decoder"))
        within = float(decoder.logits(z, labels).abs().max()) <= MAX_LOGIT  # NaN is not below anything
        return "" if within else f"its pictures are not finite or beyond {MAX_LOGIT:g}"

    def sizes(self, manifest: Manifest, given: Sent) -> Sizes:
        return {name: rms(value) for name, value in given.items()}


def described(manifest: Manifest) -> Decoder:
    """The decoder of a manifest's facts, on the meta device."""
    facts = manifest.meta
    with torch.device("meta"):
        return Decoder(DecoderSpec.beside(manifest.spec, facts.get("decoder_latent"), facts.get("decoder_width")))


def rebuilt(manifest: Manifest, given: Sent) -> Decoder:
    decoder = described(manifest)
    decoder.load_state_dict(
        {name.removeprefix("decoder."): value.clone() for name, value in given.items()}, assign=True
    )
    return decoder.eval().requires_grad_(False)


def decoder_of(item: Parcel) -> Decoder:
    """The decoder that an upload carries."""
    return rebuilt(item.manifest, sent(item, Painter()))
