"""The noun ``Predictor``: what a fusion makes. It takes uint8 images ``[N, H, W, C]`` and gives scores ``[N,
classes]``.

A predictor is saved as a folder: ``model.json`` (its kind, specs, settings), ``model.safetensors`` (its tensors),
``README.md`` (a card for people) and, unless declined, ``model.pt2``, a program that plain PyTorch loads without flyby.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flyby.errors import BadInput, unknown
from flyby.files import atomic_folder, read_json, write_bytes, write_json, write_text
from flyby.models import ModelSpec, Network
from flyby.models.shelf import IN_MEMORY, Shelf, bytes_of, read_shelf, write_shelf
from flyby.registry import Registry

FORMAT = 1
MODEL = "model.json"
FILES = (MODEL, "model.safetensors", "model.pt2", "README.md", "ledger.json")  # of a model folder


class Predictor(nn.Module):
    """Base of all predictors. ``settings`` is the JSON that, with ``specs``, rebuilds an empty one of the same shape.

    Each kind says what one member makes of the features it sees (``voice``), and what follows from all of them
    (``combine``). So members may speak one at a time, from a ``Shelf`` where ``streams`` allows it, and features that
    were computed once serve every rule over the same networks (``flyby.fusion.evaluation``).
    """

    kind: ClassVar[str]
    streams: ClassVar[bool] = False  # whether its networks may stay on a shelf

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        class_names: Sequence[str],
        networks: Sequence[Network] | Shelf | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.specs, self.class_names, self.settings = tuple(specs), tuple(class_names), settings
        self.shelf = networks if isinstance(networks, Shelf) else None
        held = (
            ()
            if isinstance(networks, Shelf)
            else networks
            if networks is not None
            else [spec.build() for spec in specs]
        )
        self.networks = nn.ModuleList(held)
        self.eval()  # a predictor predicts: BatchNorm uses what was learned, not the batch at hand

    @property
    def size(self) -> tuple[int, int]:
        return self.specs[0].size

    @property
    def channels(self) -> int:
        return self.specs[0].channels

    def members(self, images: Tensor) -> Iterator[tuple[Network, Tensor]]:
        """Each network with the images prepared as it wants them (sites may normalise differently)."""
        for network, spec in zip(self.networks if self.shelf is None else self.shelf, self.specs, strict=True):
            yield network if self.shelf is None else network.to(images.device), spec.prepare(images)  # type: ignore[misc]

    def voice(self, network: Network, features: Tensor) -> Tensor:
        """What one member says about images that it sees as ``features`` [N, d]: its logits, where nothing else is
        written."""
        return network.head(features).float()  # type: ignore[no-any-return]

    def combine(self, voices: Sequence[Tensor], images: Tensor) -> Tensor:
        """The scores [N, classes] that follow from what each of the K members says, [N, ...], about the images."""
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        voices = [self.voice(network, network.features(x)) for network, x in self.members(images)]
        return self.combine(voices, images)

    def chances(self, scores: Tensor) -> Tensor:
        """Scores [N, classes] as shares that add up to one, for people to read."""
        return scores.softmax(1)


class Single(Predictor):
    """One network: what averaging, distillation or local training gives."""

    kind = "single"

    def __init__(
        self, specs: Sequence[ModelSpec], class_names: Sequence[str], networks: Sequence[Network] | None = None
    ) -> None:
        super().__init__(specs, class_names, networks)

    def combine(self, voices: Sequence[Tensor], images: Tensor) -> Tensor:
        return voices[0]


class Ensemble(Predictor):
    """Weighted mean of the members' logits or probabilities; ``weights`` [K] sum to one. Returns log-scores."""

    kind = "ensemble"
    streams = True

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        class_names: Sequence[str],
        networks: Sequence[Network] | Shelf | None = None,
        *,
        mean: str = "probabilities",
        weights: Sequence[float] = (),
    ) -> None:
        super().__init__(specs, class_names, networks, mean=mean)
        if mean not in ("logits", "probabilities"):
            raise unknown("ensemble mean", mean, ("logits", "probabilities"))
        self.mean = mean
        self.register_buffer(
            "weights", torch.tensor(weights or [1 / len(self.specs)] * len(self.specs), dtype=torch.float32)
        )

    weights: Tensor

    def voice(self, network: Network, features: Tensor) -> Tensor:
        logits = super().voice(network, features)
        return logits if self.mean == "logits" else logits.softmax(-1)

    def combine(self, voices: Sequence[Tensor], images: Tensor) -> Tensor:
        scores = torch.einsum("k,knc->nc", self.weights, torch.stack(tuple(voices)))
        return scores if self.mean == "logits" else scores.clamp_min(1e-12).log()


PREDICTORS: Registry[type[Predictor]] = Registry(
    "predictor kind", {p.kind: p for p in (Single, Ensemble)}, group="flyby.predictors"
)


def save_predictor(
    predictor: Predictor, folder: Path | str, card: dict[str, Any] | None = None, *, export: bool = True
) -> Path:
    """Write the deployable folder, whole or not at all. ``card`` holds facts for people: method, sites, accuracy if
    known."""
    from safetensors.torch import save

    predictor = predictor.eval().cpu()
    export = export and predictor.shelf is None  # a program holds all its networks at once
    config = {
        "format": FORMAT,
        "kind": predictor.kind,
        "specs": [spec.model_dump(mode="json") for spec in predictor.specs],
        "class_names": list(predictor.class_names),
        "settings": predictor.settings,
        "card": card or {},
    }
    with atomic_folder(folder) as tmp:
        write_json(tmp / MODEL, config)
        tensors = {name: t.contiguous() for name, t in predictor.state_dict().items()}
        if predictor.shelf is not None:
            write_shelf(tmp / "model.safetensors", predictor.specs, predictor.shelf, tensors)
        else:
            write_bytes(tmp / "model.safetensors", save(tensors))
        if export:
            export_program(predictor, tmp / "model.pt2")
        write_text(tmp / "README.md", _card(config, export))
    return Path(folder)


def check_replaceable(folder: Path, own: Iterable[str] = ()) -> None:
    """A model folder is written whole, in place of an older one: nothing but files that flyby wrote may be lost so.
    ``own`` are patterns of further files that the caller writes there."""
    if folder.is_symlink():
        raise BadInput(f"{folder} is a link, and a link is not written through; name the folder itself")
    if not folder.is_dir():
        return
    names = sorted(path.name for path in folder.iterdir())
    strange = [name for name in names if not any(fnmatchcase(name, one) for one in (*FILES, *own))]
    if strange or (names and MODEL not in names):
        what = repr(strange[0]) if strange else "no model.json"
        raise BadInput(f"{folder} holds something else than a model of flyby ({what}); name a new folder with --out")
    if names:
        config = read_json(folder / MODEL)
        if not isinstance(config, dict) or not {"format", "kind", "specs"} <= config.keys():
            raise BadInput(f"{folder / MODEL} was not written by flyby; name a new folder with --out")


def load_predictor(folder: Path | str) -> Predictor:
    """Read a deployable folder (or a bare ``.parcel``, as the one network in it)."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(folder)
    if folder.is_file():
        from flyby.parcels import parcel

        made = parcel.read(folder)
        return Single([made.manifest.spec], made.manifest.class_names, [made.network()]).eval()
    if not (folder / "model.json").exists() and (folder / "global" / "model.json").exists():
        folder = folder / "global"  # a run folder was named
    if not (folder / "model.json").exists():
        raise BadInput(
            f"{folder} is not a model: it has no model.json (flyby fuse writes such a folder), and it is not a .parcel"
            " file"
        )
    config = read_json(folder / "model.json")
    try:
        if config["format"] != FORMAT:
            raise BadInput(
                f"{folder} has model format {config['format']} and this flyby reads {FORMAT}; use the flyby version"
                " that wrote it"
            )
        kind = PREDICTORS[config["kind"]]
        specs = [ModelSpec.from_dict(s) for s in config["specs"]]
        if not specs or any(spec.classes != len(config["class_names"]) for spec in specs):
            raise ValueError(f"{len(config['class_names'])} class names do not fit its {len(specs)} network(s)")
        if kind.streams and sum(bytes_of(spec) for spec in specs) > IN_MEMORY:
            shelf, tensors = read_shelf(folder / "model.safetensors", specs)
            predictor = kind(specs, config["class_names"], shelf, **config["settings"])
        else:
            predictor, tensors = (
                kind(specs, config["class_names"], **config["settings"]),
                load_file(folder / "model.safetensors"),
            )
        predictor.load_state_dict(tensors)
    except (KeyError, TypeError, ValueError, RuntimeError, OSError, SafetensorError) as error:
        raise BadInput(
            f"{folder} is damaged ({type(error).__name__}: {str(error).splitlines()[0]}); fuse the parcels again"
        ) from None
    return predictor.eval()


def export_program(predictor: Predictor, path: Path) -> None:
    """``model.pt2``: input uint8 [N, H, W, C] with any N, output scores [N, classes]; runs where flyby is not
    installed."""
    import logging

    logging.getLogger("torch.export").setLevel(logging.ERROR)
    example = torch.zeros((2, *predictor.size, predictor.channels), dtype=torch.uint8)
    batch = torch.export.Dim("batch", min=1, max=4096)
    with torch.no_grad():
        program = torch.export.export(predictor, (example,), dynamic_shapes=({0: batch},), strict=False)
    buffer = io.BytesIO()  # a full disk is then noticed where all files are written, and not in the midst of an archive
    torch.export.save(program, buffer)
    write_bytes(path, buffer.getvalue())


def _card(config: dict[str, Any], export: bool) -> str:
    names = sorted({s["name"] for s in config["specs"]})
    (height, width), channels = config["specs"][0]["size"], config["specs"][0]["channels"]
    what = f"{config['kind']} of {len(config['specs'])} network(s) ({', '.join(names)})"
    what += f" for {len(config['class_names'])} classes"
    facts = "\n".join(f"- {key}: {value}" for key, value in config["card"].items())
    plain = (
        f"""
Without flyby, in plain PyTorch:

```python
import torch
model = torch.export.load("model.pt2").module()
images = torch.zeros(1, {height}, {width}, {channels}, dtype=torch.uint8)   # your images: uint8, N x H x W x C
with torch.no_grad():
    print(model(images).argmax(1))
```
"""
        if export
        else ""
    )
    return f"""# A model fused by flyby

{what}; images {height}x{width}x{channels}, uint8.
{facts}

```
flyby evaluate . --data PATH
flyby predict . IMAGE...
```
{plain}"""
