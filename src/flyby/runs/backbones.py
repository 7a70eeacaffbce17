"""What ``--backbone NAME|PATH`` means: a backbone by its name, or the network of a parcel or model folder of flyby's
own without its head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from flyby.errors import BadInput
from flyby.fusion.predictor import Single, load_predictor
from flyby.models import ModelSpec
from flyby.models.backbones import Backbone, Named, Tune, is_name, keep, known
from flyby.models.lite import LITE
from flyby.settings import build

RANK = 4


def backbone_at(text: str, size: int | None = None) -> Named:
    """The backbone that somebody at this machine asks for, kept in the cache folder from now on. ``size`` are the
    pixels a side that images are resized to for it, where those it was trained on are not wanted."""
    if is_name(text):
        return known(text, size)
    path = Path(text).expanduser()
    if not path.exists():
        raise BadInput(
            f"there is no backbone {text!r}: give one of {', '.join(LITE)}, timm:NAME, hf:NAME, or the path of a parcel"
            " or a model folder of flyby's"
        )
    predictor = load_predictor(path, limits=None)  # whoever names a file as backbone trusts it to answer
    if not isinstance(predictor, Single):
        raise BadInput(
            f"{path} is an {predictor.kind} of {len(predictor.specs)} networks, which have no features in common; name"
            " one parcel, or a model fused to one network (fedavg)"
        )
    return own(predictor.specs[0], predictor.networks[0].state_dict(), size)


def tuned(backbone: Backbone, tune: Tune | None, rank: int | None) -> Backbone:
    """The same backbone, of which something is trained too."""
    if rank is not None and tune != "lora":
        raise BadInput("model.rank belongs to --tune lora; choose that, or leave the rank out")
    words = {"tune": tune or "head", "rank": (rank or RANK) if tune == "lora" else 0}
    return build(Backbone, {**dict(backbone), **words}, "backbone")


def own(spec: ModelSpec, state: dict[str, Tensor], size: int | None = None) -> Named:
    """A network of flyby's as backbone, from its spec and state dict."""
    if spec.backbone is not None:
        raise BadInput(f"that model stands on the backbone {spec.name} itself; name that one")
    if size is not None and spec.name == "mlp" and (size, size) != spec.size:
        raise BadInput(f"an mlp takes images of {spec.size[0]}x{spec.size[1]} only; leave the backbone's size out")
    mean, std = spec.statistics()
    card: dict[str, Any] = {
        "kind": "flyby",
        "name": f"flyby:{spec.name}",
        "architecture": spec.name,
        "stem": spec.stem,
        "widths": spec.layer_widths(),
        "projector": list(spec.projector),
        "dim": spec.feature_dim(),
        "channels": spec.channels,
        "size": list(spec.size),
        "mean": mean.tolist(),
        "std": std.tolist(),
        "pixels": spec.pixels,
    }
    return keep(card, {name: t for name, t in state.items() if not name.startswith("head.")}, size)
