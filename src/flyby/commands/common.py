"""What the commands share: options that mean the same everywhere, groups of them, and one way to answer."""

from __future__ import annotations

import inspect
import json
import logging
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from flyby.data.dataset import DataBundle
    from flyby.fusion.predictor import Predictor
    from flyby.models.cost import Limits
    from flyby.parcels.arrivals import Arrivals, Waiting


def _hush(quiet: bool) -> bool:
    """Library code logs at INFO what --quiet hides, at WARNING what everybody must see."""
    if quiet:
        logging.getLogger("flyby").setLevel(logging.WARNING)
    return quiet


Json = Annotated[bool, typer.Option("--json", help="Answer in JSON on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", callback=_hush, help="No progress on stderr.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any other setting, e.g. train.lr=0.01 (repeatable)."),
]
Formats = Annotated[
    list[str] | None,
    typer.Option("--format", help="markdown (the default), latex, html, csv; several with commas (repeatable)."),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Compiled = Annotated[
    str | None,
    typer.Option("--compile", help="How a GPU takes training steps: auto, off, graph or full; as train.compile."),
]
Size = Annotated[
    int | None,
    typer.Option(help="Pixels a side that images get, from the middle; else small ones stay, mixed or large get 64."),
]
ModelSize = Annotated[int | None, typer.Option(help="Pixels a side; by default what the model takes.")]
TestDir = Annotated[
    str | None, typer.Option("--test-dir", metavar="DATA", help="Own test images, as --data names them.")
]
Seed = Annotated[int, typer.Option(help="Everything random follows from it.")]
Epochs = Annotated[int | None, typer.Option(help="Local epochs.")]
Architecture = Annotated[str | None, typer.Option(help="Architecture; by default one that fits the images.")]
Backbone = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|PATH",
        help="Only train a head on this frozen network: efficientnet-lite0, timm:NAME, a parcel, a model folder ...",
    ),
]
Tune = Annotated[
    str | None, typer.Option(help="What of the backbone is trained and sent too: last (stage), all, lora; else: head.")
]
BackboneSize = Annotated[
    int | None, typer.Option(help="Pixels a side of what the backbone is given; fewer are faster, 128 on a CPU.")
]
Rule = Annotated[str | None, typer.Option(help="Another server rule than the method's own.")]
MinSize = Annotated[int | None, typer.Option(help="Fewest samples a site may hold.")]
Export = Annotated[bool, typer.Option(help="Also write model.pt2, which plain PyTorch loads.")]
ModelFolder = Annotated[Path, typer.Argument(help="A fused folder, a run folder or a .parcel.")]
Licence = Annotated[
    str | None,
    typer.Option("--license", metavar="NAME", help="The model's licence, for its card: apache-2.0, cc-by-4.0, other."),
]
TrustFile = Annotated[Path | None, typer.Option("--trust", help="Whose key is whose: a file of `flyby keys trust`.")]
MaxParameters = Annotated[
    int | None, typer.Option(min=1, help="Most numbers that a network may have; 250 million by default.")
]
MaxMemory = Annotated[
    int | None, typer.Option(min=1, help="Most bytes that one image may take in a network; 320 MiB by default.")
]
MaxSide = Annotated[int | None, typer.Option(min=1, help="Most pixels a side that a network may ask for; 1,024.")]
MaxClasses = Annotated[int | None, typer.Option(min=1, help="Most classes that a network may have; 10,000.")]
RequireSigned = Annotated[
    bool, typer.Option("--require-signed", help="Refuse what is not signed by a sender of the --trust file.")
]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command with groups among its parameters: dataclasses of options, which typer is shown one by one."""
    own = inspect.signature(command, eval_str=True).parameters
    groups: dict[str, Any] = {name: each.annotation for name, each in own.items() if is_dataclass(each.annotation)}
    flat = [
        option.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, each in own.items()
        for option in (
            inspect.signature(groups[name], eval_str=True).parameters.values() if name in groups else (each,)
        )
    ]

    @wraps(command)
    def called(**words: Any) -> None:
        for name, group in groups.items():
            words[name] = group(**{field.name: words.pop(field.name) for field in fields(group)})
        command(**words)

    called.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    called.__annotations__ = {option.name: option.annotation for option in flat}
    return called


@dataclass(frozen=True)
class LimitOptions:
    """What the networks of a file that may be a stranger's may cost."""

    max_parameters: MaxParameters = None
    max_memory: MaxMemory = None
    max_side: MaxSide = None
    max_classes: MaxClasses = None

    @property
    def limits(self) -> Limits:
        from flyby.models.cost import Limits
        from flyby.settings import build

        return build(Limits, {name: value for name, value in vars(self).items() if value is not None}, "limits")


@dataclass(frozen=True)
class NameOptions:
    """What images whose classes have other names than a model's are taken for."""

    synonyms: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Other names of classes, `old: new` on each line, such as Pferd: horse."),
    ] = None
    skip_unknown: Annotated[
        bool, typer.Option("--skip-unknown", help="Leave out images of classes that the model does not know.")
    ] = False

    def renamed(self, bundle: DataBundle) -> DataBundle:
        """The images under the names that --synonyms gives their classes."""
        from flyby.data.classes import prepared, read_synonyms

        return bundle if self.synonyms is None else prepared(bundle, read_synonyms(self.synonyms), None)


@dataclass(frozen=True)
class GateOptions:
    """Whom a command that takes parcels lets in."""

    trust: TrustFile = None
    require_signed: RequireSigned = False
    ledger: Annotated[
        Path | None,
        typer.Option(help="Who has sent before: refuse them, and add those let in (made if not there)."),
    ] = None
    quarantine: Annotated[Path | None, typer.Option(help="Move refused parcels here, each beside the reason.")] = None
    max_bytes: Annotated[int | None, typer.Option(min=1, help="Largest parcel to take; 4 GiB by default.")] = None
    max_total: Annotated[
        int | None, typer.Option(min=1, help="Most bytes of all parcels together; 64 GiB by default.")
    ] = None
    max_parcels: Annotated[int | None, typer.Option(min=1, help="Most parcels to take; 10,000 by default.")] = None
    max_parameters: MaxParameters = None
    max_memory: MaxMemory = None
    max_side: MaxSide = None
    max_classes: MaxClasses = None

    @property
    def words(self) -> dict[str, Any]:
        return dict(vars(self))

    @property
    def looking(self) -> dict[str, Any]:
        """For a gate that only looks: while a command waits, nothing is moved away yet."""
        return self.words | {"quarantine": None}


@dataclass(frozen=True)
class WatchOptions:
    """How long a command waits for parcels to arrive, and for whom."""

    deadline: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="With --watch: wait no longer than this, e.g. 90s, 10m, 2h, 1d."),
    ] = None
    expect: Annotated[
        str | None,
        typer.Option(
            metavar="N|NAMES",
            help="With --watch: go on as soon as so many sites, or those with these names, are there.",
        ),
    ] = None
    poll: Annotated[
        str, typer.Option(metavar="DURATION", help="With --watch: the longest pause between two looks at the folder.")
    ] = "5s"
    settle: Annotated[
        str,
        typer.Option(
            metavar="DURATION",
            help="With --watch and --min-sites: once enough are there, go on when nothing has come for so long.",
        ),
    ] = "10s"

    def waiting(self, watch: bool, min_sites: int | None) -> Waiting | None:
        from flyby.parcels.arrivals import Waiting

        return Waiting.of(watch, self.deadline, self.expect, min_sites, self.poll, self.settle)


def answering_model(model: Path, trust: Path | None, require_signed: bool, allowed: LimitOptions) -> Predictor:
    """The model at a path, checked; an upload that only measured sums answers by what they give."""
    from flyby.fusion import load_predictor
    from flyby.parcels.signing import Trust
    from flyby.runs.quality import answering

    found = load_predictor(model, Trust.load(trust) if trust else None, require_signed, allowed.limits)
    return answering(model, found)


def compiling(settings: list[str] | None, compiled: str | None) -> list[str]:
    """The assignments of --set, with that of --compile."""
    return [*(settings or ()), *([f'train.compile="{compiled}"'] if compiled else [])]


def standing(settings: list[str] | None, backbone: str | None, size: int | None, tune: str | None) -> list[str]:
    """The assignments of --set, after those of --backbone, --backbone-size and --tune."""
    asked = {"model.backbone": backbone, "model.backbone_size": size, "model.tune": tune}
    return [*(f"{key}={json.dumps(value)}" for key, value in asked.items() if value is not None), *(settings or ())]


def say(value: Any, as_json: bool, text: str) -> None:
    """Answer on stdout: the value as JSON, or a text for people, in which a stranger's names turn nothing."""
    from flyby.names import printable

    print(json.dumps(value, indent=1) if as_json else "\n".join(printable(line) for line in text.split("\n")))


def said() -> str:
    """The command that is running, to be given again."""
    return shlex.join(["flyby", *sys.argv[1:]])


def note(lines: Iterable[str]) -> None:
    """What people should know beside the answer, on stderr."""
    from flyby.names import printable

    for line in lines:
        print(f"note: {printable(line)}", file=sys.stderr)


def note_absent(came: Arrivals | None, facts: dict[str, Any]) -> None:
    """Say what took no part: files that were not whole, or that came after the wait had ended. What was refused was
    said while waiting."""
    if came is None:
        return
    facts["watch"] = came.row()
    for kind, names in (("not whole in time", list(came.unfinished)), ("too late", facts["watch"]["late"])):
        if names:
            note([f"{kind}: {', '.join(names)}"])
