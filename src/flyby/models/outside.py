"""Backbones of other libraries, where those are installed: ``timm:NAME`` and ``hf:NAME`` (transformers).

Only ``fetch`` downloads anything, and only what the person at this machine names. ``outside_network`` makes the
module from the card that was kept, without numbers. Neither library is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from flyby.errors import BadInput

PACKAGES = {"timm": "timm", "hf": "transformers"}


def library(kind: str, name: str) -> Any:
    try:
        return importlib.import_module(PACKAGES[kind])
    except ImportError:
        raise BadInput(
            f"the backbone {name} needs the package {PACKAGES[kind]}; install it with: pip install {PACKAGES[kind]}"
        ) from None


def fetch(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The card and the weights of a pre-trained network, from the library's own place for them."""
    kind, _, model = name.partition(":")
    source = library(kind, name)
    try:
        return (_timm if kind == "timm" else _hf)(source, name, model)
    except Exception as error:  # whatever a foreign library does where a name is wrong or a network is not there
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise BadInput(
            f"{PACKAGES[kind]} cannot give {model!r} ({reason}); check the name and the connection"
        ) from error


def _timm(timm: Any, name: str, model: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    network = timm.create_model(model, pretrained=True, num_classes=0)
    facts = network.pretrained_cfg
    channels, *size = facts["input_size"]
    card = {"kind": "timm", "name": name, "dim": int(network.num_features), "channels": int(channels)}
    card |= {"size": [int(side) for side in size]}
    card |= {key: [float(value) for value in facts[key]] for key in ("mean", "std")}
    return card, network.state_dict()


def _hf(transformers: Any, name: str, model: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    network = transformers.AutoModel.from_pretrained(model)
    facts = transformers.AutoImageProcessor.from_pretrained(model)
    size = facts.size.get("shortest_edge") or facts.size.get("height")
    config = network.config.to_dict()
    dim = config.get("hidden_size") or config["hidden_sizes"][-1]
    card = {"kind": "hf", "name": name, "dim": int(dim), "channels": int(config.get("num_channels", 3))}
    card |= {"size": [int(size), int(size)], "mean": list(facts.image_mean), "std": list(facts.image_std)}
    return card | {"config": config}, network.state_dict()


def outside_network(card: Mapping[str, Any]) -> nn.Module:
    """The module that a card describes."""
    kind, _, model = str(card["name"]).partition(":")
    source = library(kind, str(card["name"]))
    if kind == "timm":
        return source.create_model(model, pretrained=False, num_classes=0)  # type: ignore[no-any-return]
    config = dict(card["config"])
    return Pooled(source.AutoModel.from_config(source.AutoConfig.for_model(config.pop("model_type"), **config)))


class Pooled(nn.Module):
    """A network of transformers, to its pooled features: those it has, or else the mean over its last tokens."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def load_state_dict(self, *args: Any, **words: Any) -> Any:
        return self.network.load_state_dict(*args, **words)

    def forward(self, x: Tensor) -> Tensor:
        said = self.network(pixel_values=x)
        pooled = getattr(said, "pooler_output", None)
        return pooled.flatten(1) if pooled is not None else said.last_hidden_state.mean(1)  # type: ignore[no-any-return]
