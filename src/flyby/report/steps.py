"""What the page of each step says: ``train``, ``evaluate``, ``fuse`` and ``orient``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from flyby.data.site import Part
from flyby.drawing import clean
from flyby.fusion.quality import Quality
from flyby.parcels.parcel import Manifest
from flyby.report import page
from flyby.report.step import (
    Page,
    accuracy_of,
    confidence_facts,
    counts_table,
    quality_sections,
    surest_wrong,
)
from flyby.runs.estimate import duration, named
from flyby.runs.site import Upload


def beside(path: Path, word: str = "report") -> Path:
    """Where the page of a file or folder goes: ``a.parcel`` -> ``a.report.html``, ``global`` -> ``global.report.html``.
    Never into a folder that is passed on."""
    name = path.absolute()
    return name.with_name(f"{name.stem if name.suffix == '.parcel' else name.name}.{word}.html")


def train_page(made: Upload, parcel: Path, command: str) -> Page:
    manifest, site, seen = made.manifest, made.site, made.seen
    spec, train = manifest.spec, manifest.provenance.get("train")
    epochs = train.get("epochs") if isinstance(train, dict) else None
    learned = f"{page.plural(epochs, 'epoch')} of {named(spec)}" if epochs else f"one look through {named(spec)}"
    lead = (
        f"{manifest.sender} trained by {manifest.method} on {len(site.train):,} of its images at"
        f" {spec.size[0]}x{spec.size[1]}: {learned}, {duration(made.seconds)}. {len(site.val):,} were held out to judge"
        " by: it has never learned from them."
    )
    facts = [(page.size(made.bytes), f"{parcel.name}, the one file that is sent")]
    facts.append((f"{100 * seen.train.accuracy:.1f} %", "accuracy on images that it learned from"))
    sections = [("Images", counts_table(site.class_names, _parts(made)))]
    if seen.held is not None and seen.chances is not None:
        facts += confidence_facts(seen.held)
        wrong = surest_wrong(site.val, seen.chances, site.class_names)
        sections = [*quality_sections(seen.held, wrong), *sections]
    if seen.temperature is not None:
        facts.append((f"{seen.temperature:g}", "temperature: what makes its confidence fit, sent with the model"))
    return Page(
        brand="flyby train",
        title=manifest.sender,
        lead=lead,
        number=None if seen.held is None else accuracy_of(seen.held, "held-out images"),
        facts=facts,
        warnings=made.notes,
        sections=sections,
        command=command,
    )


def _parts(made: Upload) -> list[tuple[str, list[int | None]]]:
    site, counts = made.site, [0] * len(made.site.class_names)
    for label in site.val.labels.tolist():
        counts[label] += 1
    return [("Learned from", list(site.counts)), ("Held out", list(counts))]


def evaluate_page(
    title: str, found: Quality, part: Part, chances: Tensor, names: Sequence[str], facts: Mapping[str, Any]
) -> Page:
    """``facts``: ``model``, ``data``, ``command`` and ``warnings`` of the evaluation."""
    return Page(
        brand="flyby evaluate",
        title=title,
        lead=f"{facts['model']} on the labelled images of {facts['data']}.",
        number=accuracy_of(found, "images"),
        facts=confidence_facts(found),
        warnings=facts["warnings"],
        sections=quality_sections(found, surest_wrong(part, chances, names)),
        command=facts["command"],
    )


def fuse_page(facts: Mapping[str, Any], manifests: Sequence[Manifest], command: str) -> Page:
    """Who sent what, and what was made of it. No image is on it: it lies in the model folder, which is passed on."""
    rows = [
        [
            m.sender,
            page.count(m.samples),
            m.method,
            named(m.spec),
            page.NONE if (told := m.meta.get("temperature")) is None else clean(told),
            page.name(str(signer)[:16] if (signer := (facts.get("signers") or {}).get(m.sender)) else ""),
        ]
        for m in manifests
    ]
    head = ["Site", "Images", "Method", "Network", "Temperature", "Signed by"]
    sections = [("Who sent what", page.table(head, rows, numeric=(1, 4), label="Sites", tall=len(rows) > 24))]
    names = list(dict.fromkeys(name for m in manifests for name in m.class_names))
    if len(manifests) <= 12:
        sections.append(("Who holds what", counts_table(names, [(m.sender, _held(m, names)) for m in manifests])))
    refused = facts.get("refused") or []
    if refused:
        rows = [[clean(one.get("name") or one.get("sender") or ""), clean(one.get("reason", ""))] for one in refused]
        sections.append(("Refused", page.table(["Parcel", "Why"], rows, label="Refused parcels")))
    kind, sites, verdict = clean(facts["kind"]), facts["sites"], facts.get("validation") or {}
    shown = [(page.size(facts["bytes_up"]), "received, in all")]
    if temperature := facts.get("temperature"):
        shown.append((f"{temperature:.4g}", "temperature of the fused model, from those of the sites"))
    return Page(
        brand="flyby fuse",
        title=Path(str(facts["out"])).name,
        lead=f"{page.plural(sites, 'site')} fused by {clean(facts['fusion'])} into one model ({kind}).",
        number=(f"{100 * verdict['accuracy']:.1f} %", f"accuracy on {verdict['images']:,} validation images")
        if verdict
        else None,
        facts=shown,
        warnings=[clean(note) for note in facts.get("notes") or []],
        sections=sections,
        command=command,
    )


def _held(manifest: Manifest, names: Sequence[str]) -> list[int | None]:
    told = dict(zip(manifest.class_names, manifest.counts or (), strict=False))
    return [told.get(name) for name in names]


def orient_page(facts: Mapping[str, Any], before: Quality | None, after: Quality, wrong: str, command: str) -> Page:
    """A node's model before and after the round, on its own validation images."""
    came = f"{page.plural(len(facts['new']), 'new neighbour')}, {len(facts['refused'])} refused"
    shown = [(f"{100 * before.accuracy:.1f} %", "accuracy before the round, on the same images")] if before else []
    shown += confidence_facts(after)
    rows = [
        [
            *(label, page.percent(one.accuracy), page.interval(one.interval)),
            *(f"{one.log_loss:.3f}", page.percent(one.calibration_error)),
        ]
        for label, one in (("before", before), ("after", after))
        if one is not None
    ]
    head = ["", "Accuracy %", "95 % interval", "Log-loss", "Calibration error %"]
    table = page.table(head, rows, numeric=range(1, 5), label="Before and after the round")
    chosen = ", ".join("its own" if name == "self" else clean(name) for name in facts["chosen"]) or "none but its own"
    told = f"<p>In its ensemble: {page.text(chosen)}.</p>"
    return Page(
        brand="flyby orient",
        title=clean(facts["node"]),
        lead=f"Round {facts['round']} without a server: {came}; {facts['used']} in use.",
        number=accuracy_of(after, "validation images of its own"),
        facts=shown,
        sections=[("Before and after", table + told), *quality_sections(after, wrong)],
        command=command,
    )
