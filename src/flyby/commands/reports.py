"""The page that each step of real sites and servers writes beside what it made, and the figures it prints. A page that
cannot be written is a note, and no reason to fail: the work is done by then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyby.commands.common import note, said
from flyby.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

    from flyby.data.site import Part, Site
    from flyby.fusion.predictor import Predictor
    from flyby.fusion.quality import Quality
    from flyby.parcels.gate import Gate
    from flyby.report.step import Page
    from flyby.runs.site import Upload


def _written(page: Callable[[], Page], path: Path) -> str | None:
    try:
        return str(page().write(path))
    except BadInput as error:
        note([str(error)])
        return None


def train_report(made: Upload, out: Path) -> str | None:
    """Beside the parcel, never in it."""
    from flyby.report.steps import beside, train_page

    return _written(lambda: train_page(made, out, said()), beside(out))


def fuse_report(facts: dict[str, Any], gate: Gate) -> None:
    """In the model folder: it tells nothing that the parcels did not."""
    from flyby.report.steps import fuse_page
    from flyby.runs.folder import Run

    manifests = [one.manifest for one in gate.waiting]
    facts["report"] = _written(lambda: fuse_page(facts, manifests, said()), Run(facts["out"]).report)


def evaluate_report(
    model: Path, predictor: Predictor, scores: Tensor, part: Part, data: str, write: bool
) -> tuple[dict[str, Any], list[str]]:
    """The figures as JSON, and the same for people. The page is written beside the model: a signed folder must stay as
    it is."""
    from flyby.fusion.quality import by_class, matrix, quality_of, summary
    from flyby.report.steps import beside, evaluate_page
    from flyby.runs.quality import trained_on

    chances = predictor.chances(scores.double())
    found = quality_of(chances, part.labels, predictor.class_names)
    known, warnings = trained_on(model, part.images), []
    if known:
        warnings = [
            f"the model was trained on {known:,} of these {len(part):,} images, so its accuracy on new ones will be"
            " lower; judge it on images that no site had"
        ]
        note(warnings)
    told = {"model": str(model), "data": data, "warnings": warnings, "command": said()}
    facts = {"model": str(model), "data": data, **found.row(), "trained_on": known}
    facts |= {"temperature": predictor.temperature, "per_class": {one.name: one.sensitivity for one in found.classes}}
    lines = [summary(found), *by_class(found), *matrix(found)]
    if write:
        name, names = model.absolute().name, predictor.class_names
        page = _written(lambda: evaluate_page(name, found, part, chances, names, told), beside(model, "evaluate"))
        facts["report"] = page
        lines += [f"more about it: {page}"] if page else []
    return facts, lines


class Oriented:
    """``orient``: what the node's own model and the new one are worth on its validation images."""

    def __init__(self, device: str) -> None:
        self.device, self.wrong = device, ""
        self.before: Quality | None = None
        self.after: Quality | None = None

    def __call__(self, site: Site, before: Predictor, after: Predictor) -> None:
        from flyby.fusion.evaluation import scores_of
        from flyby.fusion.quality import quality_of
        from flyby.machine import pick_device
        from flyby.report.step import surest_wrong

        if not len(site.val):
            return
        found, device = [], pick_device(self.device)
        for predictor in (before, after):
            chances = predictor.chances(scores_of(predictor, site.val.images, device).double())
            found.append(quality_of(chances, site.val.labels, site.class_names))
        self.before, self.after = found
        self.wrong = surest_wrong(site.val, chances, site.class_names)

    def report(self, facts: dict[str, Any], place: Path) -> None:
        """Beside the node's folder, since the model folder may be passed on."""
        from flyby.report.steps import beside, orient_page

        if (after := self.after) is None:
            return
        facts["interval"] = list(after.interval)
        facts["report"] = _written(lambda: orient_page(facts, self.before, after, self.wrong, said()), beside(place))
