"""Who is let in: a neighbour that cannot be used is refused with a reason, and the round goes on without it.

``screen`` is flyby's own: before any adaptation, a neighbour must know more than chance of the classes it claims to
hold, judged on the node's own images of them. Random weights do not, flipped labels do worse; without it, fine-tuning
would wash a poisoned model until it looks like others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from flyby.data.classes import some
from flyby.data.site import Part, Site
from flyby.errors import BadInput
from flyby.fusion.alignment import onto
from flyby.meeting.candidate import Candidate, by_spec
from flyby.meeting.settings import OrientSettings
from flyby.meeting.stack import Stack
from flyby.meeting.tuning import stack_logits
from flyby.parcels.codecs import finite
from flyby.parcels.gate import Gate
from flyby.parcels.parcel import Parcel
from flyby.parcels.plausible import judge

PROBE = 4


def read_inbox(
    folder: Path | Sequence[Path], gate: Gate | None = None, own: Parcel | None = None
) -> tuple[list[Parcel], list[str]]:
    """The parcels of a folder, or of a list of files, that come through the gate, in name order, and a line for each
    file that does not. Fit is judged by the ``own`` model."""
    if isinstance(folder, Path) and not folder.is_dir():
        raise BadInput(f"{folder} is not a folder; name the folder that holds the received .parcel files")
    gate = gate or Gate(receiver=own.manifest.sender if own else "node")
    read = {
        path: gate.try_check(path) for path in (sorted(folder.glob("*.parcel")) if isinstance(folder, Path) else folder)
    }
    admitted = [read[Path(str(one.source))] for one in gate.settle(like=own.manifest if own else None)]
    return [item for item in admitted if item is not None], [one.line for one in gate.refused]


def admit(
    received: Sequence[Parcel], own: Parcel, site: Site, device: torch.device
) -> tuple[list[Candidate], list[str]]:
    """Candidates from what can be used, and a line for what cannot. Files of strangers have come through the gate
    before (:func:`read_inbox`); here a model must fit this node and answer its images."""
    admitted: list[Candidate] = []
    log: list[str] = []
    seen = {own.manifest.sender}
    for item in received:
        sender = item.manifest.sender
        try:
            if sender in seen:
                raise BadInput("this node has its model already; every pair exchanges once")
            seen.add(sender)
            item = for_classes(item, site.class_names)
            _check_manifest(item, site)
            candidate = Candidate.of(item, device)
            _check_runs(candidate, site)
        except Exception as error:  # whatever a stranger's model does, it is the stranger's fault, not the round's end
            reason = (
                str(error)
                if isinstance(error, BadInput)
                else f"it crashes on a batch of images ({type(error).__name__}: {_line(error)})"
            )
            log.append(f"refused {sender}: {reason}")
        else:
            admitted.append(candidate)
    return admitted, log


def for_classes(item: Parcel, names: Sequence[str]) -> Parcel:
    """A neighbour's model over this node's classes, by name: of classes that only it knows nothing is left, and of
    those that it does not know it has rows of zeros, which it learns as it is adapted."""
    if not set(names) & set(item.manifest.class_names):
        raise BadInput(f"it knows none of this node's classes, but {some(item.manifest.class_names)}")
    return onto(item, names)


def _check_manifest(item: Parcel, site: Site) -> None:
    spec = item.manifest.spec
    if (spec.size, spec.channels, spec.pixels) != (site.size, site.channels, site.pixels):
        h, w = spec.size
        raise BadInput(
            f"it takes {h}x{w}x{spec.channels} images of {spec.pixels}, this node has"
            f" {site.size[0]}x{site.size[1]}x{site.channels} of {site.pixels}"
        )
    for name, tensor in item.weights.items():
        if not finite(tensor):
            raise BadInput(f"its weights are not finite ({name})")


@torch.no_grad()
def _check_runs(candidate: Candidate, site: Site) -> None:
    out: Tensor = candidate.network()(candidate.spec.prepare(site.train.images[:PROBE]))
    if tuple(out.shape) != (min(PROBE, len(site.train)), len(site.class_names)):
        raise BadInput(f"it answers with shape {tuple(out.shape)}")
    if not finite(out):
        raise BadInput("it answers with numbers that are not finite")


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]


def part_logits(candidates: Sequence[Candidate], site: Site, part: str, settings: OrientSettings) -> None:
    """Fill every candidate's cache for ``train`` or ``val``; each network runs over a part once, however often it is
    asked for."""
    data: Part = getattr(site, part)
    for group in by_spec(c for c in candidates if part not in c.logits):
        stack = Stack.of(group[0].spec, [c.state for c in group], data.images.device, settings.backend)
        for candidate, logits in zip(group, stack_logits(stack, data.images, settings), strict=True):
            candidate.logits[part] = logits


def screen(candidates: Sequence[Candidate], site: Site, settings: OrientSettings) -> tuple[list[Candidate], list[str]]:
    """Candidates whose recall over the classes they claim (and this node holds) is clearly above chance:
    :func:`flyby.parcels.plausible.judge`."""
    for part in ("train", "val"):
        part_logits(candidates, site, part, settings)
    labels = torch.cat([site.train.labels, site.val.labels])
    kept, log = [], []
    for candidate in candidates:
        right = torch.cat([candidate.logits["train"], candidate.logits["val"]]).argmax(1) == labels
        judged = judge(right, labels, candidate.counts, len(site.class_names))
        candidate.facts["raw_recall"] = judged.recall
        if judged.passes:
            kept.append(candidate)
        else:
            log.append(f"refused {candidate.sender}: {judged.reason}")
    return kept, log
