"""The noun ``Predictor``: what a fusion makes. It takes uint8 images ``[N, H, W, C]`` and gives scores ``[N,
classes]``.

A predictor is saved as a folder: ``model.json`` (its kind, specs, settings), ``model.safetensors`` (its tensors),
``README.md`` (a card for people) and, unless declined, ``model.pt2``, a program that plain PyTorch loads without flyby.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from flyby.errors import BadInput, unknown
from flyby.files import atomic_folder, read_json, strangers, write_bytes, write_json, write_text
from flyby.fusion.card import card_of, facts_of
from flyby.machine import versions
from flyby.models import ModelSpec, Network
from flyby.models.cost import Limits
from flyby.models.shelf import (
    IN_MEMORY,
    OBJECT,
    Shelf,
    bytes_of,
    outline,
    read_shelf,
    read_tensors,
    shapes_of,
    write_shelf,
)
from flyby.names import printable
from flyby.parcels import parcel
from flyby.parcels.container import MAX_JSON
from flyby.parcels.signing import FOLDER_FILE, Signed, Trust, check_model, read_folder
from flyby.registry import Registry

FORMAT = 1
MODEL, TENSORS = "model.json", "model.safetensors"
DEFAULT_LIMITS = Limits()
FILES = (MODEL, TENSORS, "sums.safetensors", "model.pt2", "README.md", "ledger.json", FOLDER_FILE)  # of a model folder


class Predictor(nn.Module):
    """Base of all predictors. ``settings`` is the JSON that, with ``specs``, rebuilds an empty one of the same shape.

    Each kind says what one member makes of the features it sees (``voice``), and what follows from all of them
    (``combine``). So members may speak one at a time, from a ``Shelf`` where ``streams`` allows it, and features that
    were computed once serve every rule over the same networks (``flyby.fusion.evaluation``).
    """

    kind: ClassVar[str]
    streams: ClassVar[bool] = False  # whether its networks may stay on a shelf
    shows: ClassVar[bool] = False  # whether members that know a shift look at images in all its ways
    least: int = 1  # images that it must be asked about at once
    temperature: float = 1.0  # of its shares; the answers are the same at any
    measured: bool = False  # whether sites measured that, or it is what is usual for the rule

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

    @property
    def pixels(self) -> Literal["uint8", "float32"]:
        return self.specs[0].pixels

    def members(self, images: Tensor) -> Iterator[tuple[Network, Tensor]]:
        """Each network with the images prepared as it wants them (sites may normalise differently)."""
        for network, spec in zip(self.networks if self.shelf is None else self.shelf, self.specs, strict=True):
            yield network if self.shelf is None else network.to(images.device), spec.prepare(images)  # type: ignore[misc]

    held: Tensor | None

    def hold(self, held: Tensor | None) -> None:
        """Keep which member knows which class, where some do not know all."""
        partial = any(spec.partial for spec in self.specs)
        empty = torch.zeros(len(self.specs), len(self.class_names), dtype=torch.bool)
        self.register_buffer("held", (empty if held is None else held) if partial else None)

    def voice(self, k: int, network: Network, features: Tensor) -> Tensor:
        """What member ``k`` says about images that it sees as ``features`` [N, d] (where it ``shows``, [N, R, d] of a
        member that knows a shift): its logits, where nothing else is written."""
        return network.head(features).float()  # type: ignore[no-any-return]

    def combine(self, voices: Sequence[Tensor], images: Tensor) -> Tensor:
        """The scores [N, classes] that follow from what each of the K members says, [N, ...], about the images."""
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        voices = []
        for k, (network, x) in enumerate(self.members(images)):
            voices.append(self.voice(k, network, network.shown(x) if self.shows else network.features(x)))
        return self.combine(voices, images)

    def chances(self, scores: Tensor) -> Tensor:
        """Scores [N, classes] as shares that add up to one, for people to read, as sure as the ``temperature`` says."""
        shares = self.raw_chances(scores)
        if self.temperature == 1:
            return shares
        return (shares.clamp_min(1e-12).log() / self.temperature).softmax(1)

    def raw_chances(self, scores: Tensor) -> Tensor:
        """The same before any temperature."""
        return scores.softmax(1)


def mean_of_those(weights: Tensor, said: Tensor, held: Tensor) -> Tensor:
    """For every class the weighted mean of what members say [K, N, C] who know it (``held`` [K, C]); ``weights`` are
    [K], or [N, K] where each image has its own."""
    each = weights.expand(said.shape[1], -1) if weights.ndim == 1 else weights
    shares = each.T[:, :, None] * held[:, None].to(said)
    return (shares * said).sum(0) / shares.sum(0).clamp_min(torch.finfo(said.dtype).tiny)


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
    """Weighted mean of the members' logits or probabilities; ``weights`` [K] sum to one. Returns log-scores. A member
    that does not know a class gives it no probability, and says nothing of it in a mean of logits (``held`` [K, C])."""

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
        held: Tensor | None = None,
    ) -> None:
        super().__init__(specs, class_names, networks, mean=mean)
        self.hold(held)
        if mean not in ("logits", "probabilities"):
            raise unknown("ensemble mean", mean, ("logits", "probabilities"))
        self.mean = mean
        self.register_buffer(
            "weights", torch.tensor(weights or [1 / len(self.specs)] * len(self.specs), dtype=torch.float32)
        )

    weights: Tensor

    def voice(self, k: int, network: Network, features: Tensor) -> Tensor:
        logits = super().voice(k, network, features)
        return logits if self.mean == "logits" else logits.softmax(-1)

    def combine(self, voices: Sequence[Tensor], images: Tensor) -> Tensor:
        said = torch.stack(tuple(voices))
        if self.held is not None and self.mean == "logits":
            return mean_of_those(self.weights, said, self.held)
        scores = torch.einsum("k,knc->nc", self.weights, said)
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
        "card": {**(card or {}), "versions": versions()},
        **temperature_said(predictor),
    }
    with atomic_folder(folder) as tmp:
        write_json(tmp / MODEL, config)
        tensors = {name: t.contiguous() for name, t in predictor.state_dict().items()}
        if predictor.shelf is not None:
            write_shelf(tmp / TENSORS, predictor.specs, predictor.shelf, tensors)
        else:
            write_bytes(tmp / TENSORS, save(tensors))
        if export:
            export_program(predictor, tmp / "model.pt2")
        write_text(tmp / "README.md", card_of(config, program=export))
    return Path(folder)


def temperature_said(predictor: Predictor) -> dict[str, Any]:
    """What ``model.json`` says of it."""
    said = {"temperature": predictor.temperature} if predictor.measured or predictor.temperature != 1 else {}
    return said | ({"measured": True} if predictor.measured else {})


def check_replaceable(folder: Path, own: Iterable[str] = ()) -> None:
    """A model folder is written whole, in place of an older one: nothing but files that flyby wrote may be lost so.
    ``own`` are patterns of further files that the caller writes there."""
    if folder.is_symlink():
        raise BadInput(f"{folder} is a link, and a link is not written through; name the folder itself")
    if not folder.is_dir():
        return
    if Path.cwd().is_relative_to(folder.resolve()):
        raise BadInput(f"{folder} is replaced whole, and you are in it; go to another folder, or name a new one")
    strange, empty = strangers(folder, (*FILES, *own)), not any(folder.iterdir())
    if strange or not (empty or (folder / MODEL).exists()):
        what = repr(strange[0]) if strange else "no model.json"
        raise BadInput(f"{folder} holds something else than a model of flyby ({what}); name a new folder")
    if not empty:
        config = read_json(folder / MODEL)
        if not isinstance(config, dict) or not {"format", "kind", "specs"} <= config.keys():
            raise BadInput(f"{folder / MODEL} was not written by flyby; name a new folder")


def model_folder(folder: Path) -> Path:
    """The model folder that a path means: itself, or ``global`` in a run folder."""
    if not (folder / MODEL).is_file() and (folder / "global" / MODEL).is_file():
        return folder / "global"
    if not folder.exists():
        raise BadInput(f"{folder} does not exist; name a model folder that flyby fuse wrote, a run folder or a .parcel")
    if folder.is_file():
        raise BadInput(f"{folder} is a file, and no model folder that flyby fuse wrote; name one")
    if not (folder / MODEL).is_file():
        raise BadInput(
            f"{folder} is not a model: it has no model.json (flyby fuse writes such a folder), and it is not a .parcel"
            " file"
        )
    return folder


def card_in(folder: Path) -> dict[str, Any]:
    """The facts for people in a model folder; none in a parcel."""
    config = {} if folder.is_file() else read_json(model_folder(folder) / MODEL)
    return facts_of(config if isinstance(config, dict) else {})


def load_predictor(
    folder: Path | str,
    trust: Trust | None = None,
    require_signed: bool = False,
    limits: Limits | None = DEFAULT_LIMITS,
) -> Predictor:
    """Read a deployable folder (or a bare ``.parcel``, as the one network in it). Nothing in it is run. A signature is
    held to every file of the folder, and to the trust file where there is one. What its networks would cost is told
    from their specs, and must be within the ``limits`` (None: it is our own), before any is built."""
    from safetensors import SafetensorError

    folder = Path(folder)
    label = printable(str(folder))
    if folder.is_file():
        _affordable([parcel.read_manifest(folder).spec], label, limits)
        made = parcel.read(folder)
        check_model(Signed.parcel(made), label, trust, require_signed)
        return Single([made.manifest.spec], made.manifest.class_names, [made.network(shared=True)]).eval()
    folder = model_folder(folder)
    check_model(read_folder(folder), label, trust, require_signed)
    if (size := (folder / MODEL).stat().st_size) > MAX_JSON:
        raise BadInput(f"{folder / MODEL} has {size} bytes, more than the {MAX_JSON} allowed; fuse the parcels again")
    config = read_json(folder / MODEL)
    try:
        if config["format"] != FORMAT:
            raise BadInput(
                f"{folder} has model format {config['format']} and this flyby reads {FORMAT}; use the flyby version"
                " that wrote it"
            )
        return _rebuilt(config, folder / TENSORS, label, limits)
    except (KeyError, TypeError, ValueError, RuntimeError, OSError, SafetensorError) as error:
        raise BadInput(
            f"{folder} is damaged ({type(error).__name__}: {(str(error).splitlines() or [''])[0]}); fuse the parcels"
            " again"
        ) from None


def _affordable(specs: Iterable[ModelSpec], label: str, limits: Limits | None) -> None:
    if limits is not None:
        for spec in dict.fromkeys(specs):
            limits.check(spec, label)


def _rebuilt(config: Mapping[str, Any], path: Path, label: str, limits: Limits | None) -> Predictor:
    """The predictor that ``model.json`` describes, with the tensors of the file beside it. No memory is taken for what
    the file does not hold: networks are drawn up without numbers first, and compared with it."""
    kind, names = PREDICTORS[config["kind"]], config["class_names"]
    specs = [ModelSpec.from_dict(s) for s in config["specs"]]
    if not specs or any(spec.classes != len(names) for spec in specs):
        raise ValueError(f"{len(names)} class names do not fit its {len(specs)} network(s)")
    _affordable(specs, label, limits)
    need, tensors = sum(bytes_of(spec) for spec in specs), sum(len(spec.shapes()) for spec in specs)
    if need > (size := path.stat().st_size if path.is_file() else 0):
        raise ValueError(f"its {len(specs)} network(s) take {need:,} bytes, and {path.name} has {size:,}")
    shelf = read_shelf(path, specs) if kind.streams and need + OBJECT * tensors > IN_MEMORY else None
    if shelf is None and OBJECT * tensors > IN_MEMORY:
        raise ValueError(f"its {len(specs)} networks of {tensors:,} tensors are too many to be held at once")
    with torch.device("meta"):
        predictor = kind(specs, names, shelf or [spec.skeleton() for spec in specs], **config["settings"])
    own = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in predictor.state_dict().items()}
    wanted, found = own | (shapes_of(specs) if shelf else {}), outline(path)
    if strange := sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)):
        raise ValueError(
            f"tensor {strange[0]!r} is {found.get(strange[0])} where its model has {wanted.get(strange[0])}"
        )
    predictor.load_state_dict(read_tensors(path, own), assign=True)
    predictor.temperature = float(config.get("temperature", predictor.temperature))
    predictor.measured = config.get("measured") is True
    if not 1e-3 <= predictor.temperature <= 1e3:
        raise ValueError(f"its temperature is {predictor.temperature}")
    return predictor.eval()


def export_program(predictor: Predictor, path: Path) -> None:
    """``model.pt2``: input uint8 or float32 [N, H, W, C] with any N, output scores [N, classes]; runs where flyby is
    not installed."""
    import logging

    logging.getLogger("torch.export").setLevel(logging.ERROR)
    example = torch.zeros((2, *predictor.size, predictor.channels), dtype=getattr(torch, predictor.pixels))
    batch = torch.export.Dim("batch", min=predictor.least, max=4096)
    with torch.no_grad():
        predictor(example)  # a frozen backbone is read now: under the export's eyes no file can be
        program = torch.export.export(predictor, (example,), dynamic_shapes=({0: batch},), strict=False)
    buffer = io.BytesIO()  # a full disk is then noticed where all files are written, and not in the midst of an archive
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensors that share memory, as those of a backbone do, are saved whole
        torch.export.save(program, buffer)
    write_bytes(path, buffer.getvalue())
