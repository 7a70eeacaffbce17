"""A one-page report of one step at a real site or server: ``train``, ``fuse``, ``evaluate``, ``orient``.

It is written beside what the step made, for the people there. Images that a model was surest wrong about are on it, so
the page of a site stays at the site: nothing of it is in a parcel or in a model folder.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch import Tensor

from flyby.data.site import Part
from flyby.files import write_text
from flyby.fusion.quality import Quality
from flyby.report import page

WRONG = 12  # images that it was surest wrong about
SIDE = 128  # pixels a side of the largest of them
CELLS = 20  # classes up to which the confusion matrix is shown whole
PAIRS = 15  # of classes most often taken for one another, where it is not

CSS = """
.half svg{display:block;width:100%;max-width:460px;min-width:0;height:auto}
.half text{font-size:12px;fill:var(--muted);font-family:var(--face)}
.wrong{display:grid;grid-template-columns:repeat(auto-fill,minmax(132px,1fr));gap:20px 18px;padding:0;margin:0;
list-style:none}
.wrong img{display:block;width:100%;aspect-ratio:1;object-fit:contain;border-radius:4px;background:var(--rule)}
.wrong img.small{image-rendering:pixelated}
.wrong li{font-size:.85rem;line-height:1.4;color:var(--muted);overflow-wrap:anywhere}
.wrong b{color:var(--ink);font-weight:600}
.matrix{min-width:0}
.matrix td,.matrix th{padding:6px 10px;border:0}
.matrix td{min-width:44px;text-align:center}
.matrix thead th{text-align:center;border:0;overflow-wrap:anywhere}
@media(max-width:600px){.matrix td,.matrix th{padding:5px 3px}.matrix td{min-width:27px;font-size:.85rem}
.matrix thead th{writing-mode:vertical-rl;transform:rotate(180deg);white-space:nowrap;text-align:left}}
.matrix .right{outline:1px solid var(--accent);outline-offset:-2px;font-weight:600}
"""


@dataclass(frozen=True)
class Page:
    """One step: what it was (``brand``), of what (``title``), in a sentence, the one number that counts, further facts
    (number, words), warnings, sections (heading, markup), and the command."""

    brand: str
    title: str
    lead: str
    number: tuple[str, str] | None = None
    facts: Sequence[tuple[str, str]] = ()
    warnings: Sequence[str] = ()
    sections: Sequence[tuple[str, str]] = field(default_factory=list)
    command: str = ""

    def html(self) -> str:
        number = ""
        if self.number is not None:
            big, words = self.number
            number = f'<p class="number"><strong>{page.text(big)}</strong> <span>{page.text(words)}</span></p>'
        items = "".join(f"<li><b>{page.text(value)}</b> {page.text(words)}</li>" for value, words in self.facts)
        facts = f'<ul class="facts">{items}</ul>' if items else ""
        warnings = "".join(f'<p class="warn">{page.text(line)}</p>' for line in self.warnings)
        lead = f'<p class="lead">{page.text(self.lead)}</p>\n{number}\n{facts}{warnings}'
        again = ("How to do it again", page.commands([self.command]))
        shown = [(heading, content) for heading, content in (*self.sections, again) if content]
        body = "\n".join(page.section(str(i), heading, content) for i, (heading, content) in enumerate(shown))
        return page.document(self.title, self.brand, lead, body, css=CSS)

    def write(self, path: Path) -> Path:
        write_text(path, self.html())
        return path


# -- sections


def accuracy_of(found: Quality, of: str) -> tuple[str, str]:
    """The number at the top: accuracy, with its interval in words."""
    low, high = found.interval
    words = (
        f"accuracy on {found.images:,} {of}; with 95 % certainty it lies between {100 * low:.1f} and {100 * high:.1f} %"
    )
    return f"{100 * found.accuracy:.1f} %", words


def confidence_facts(found: Quality) -> list[tuple[str, str]]:
    return [
        (f"{100 * found.confidence:.1f} %", "mean confidence: how sure it says it is"),
        (f"{100 * found.calibration_error:.1f} %", "expected calibration error: how far that is from being right"),
        (f"{found.log_loss:.3f}", "log-loss: the mean surprise at the truth"),
    ]


def quality_sections(found: Quality, wrong: str = "") -> list[tuple[str, str]]:
    """The classes, what was taken for what, whether confidence can be believed, and pictures of what went wrong."""
    return [
        ("Class by class", classes_table(found)),
        ("What was taken for what", confusion_table(found)),
        ("Can its confidence be believed?", reliability(found)),
        ("What it was surest wrong about", wrong),
    ]


def classes_table(found: Quality) -> str:
    head = ["Class", "Images", "Found %", "95 % interval", "Others left alone %", "Right when said %", "AUC"]
    rows = [
        [
            one.name,
            page.count(one.images),
            page.percent(one.sensitivity),
            page.interval(one.interval),
            page.percent(one.specificity),
            page.percent(one.precision),
            page.NONE if one.auc is None else f"{one.auc:.3f}",
        ]
        for one in found.classes
        if one.images or one.precision is not None
    ]
    note = (
        '<p class="note">Found: sensitivity, the share of a class’s images that it names. Others left alone:'
        " specificity, the share of all other images that it does not call so. Right when said: precision. AUC: how"
        " often an image of the class gets a higher share for it than another image.</p>"
    )
    return page.table(head, rows, numeric=range(1, 7), label="Figures, one row per class", tall=len(rows) > 24) + note


def confusion_table(found: Quality) -> str:
    """Whole for few classes; else the pairs that are mixed up most."""
    held = [c for c, one in enumerate(found.classes) if one.images or any(row[c] for row in found.confusion)]
    names = [one.name for one in found.classes]
    if len(held) < 2:
        return ""
    if len(held) > CELLS:
        pairs = [(found.confusion[i][j], i, j) for i in held for j in held if i != j and found.confusion[i][j]]
        rows = [
            [names[i], names[j], page.count(n), page.percent(n / found.classes[i].images)]
            for n, i, j in sorted(pairs, key=lambda pair: (-pair[0], pair[1], pair[2]))[:PAIRS]
        ]
        head = ["Class", "taken for", "Images", "% of the class"]
        return page.table(head, rows, numeric=(2, 3), label="Classes most often mixed up") if rows else ""
    top = "".join(f'<th scope="col">{page.text(names[c])}</th>' for c in held)
    body = []
    for i in held:
        total = max(1, sum(found.confusion[i]))
        cells = "".join(_cell(found.confusion[i][j], total, i == j) for j in held)
        body.append(f'<tr><th scope="row">{page.text(names[i])}</th>{cells}</tr>')
    box = '<div class="scroll" role="region" tabindex="0" aria-label="Confusion matrix">'
    table = f'<table class="matrix"><thead><tr><th></th>{top}</tr></thead><tbody>{"".join(body)}</tbody></table>'
    return f'{box}{table}</div><p class="note">A row per true class, a column per answer; framed: right.</p>\n'


def _cell(count: int, total: int, right: bool) -> str:
    mark = ' class="right"' if right else ""
    tint = f' style="background:rgba(0,114,178,{0.55 * count / total:.3f})"' if count else ""
    return f"<td{mark}{tint}>{count if count else '·'}</td>"


def reliability(found: Quality) -> str:
    """Accuracy by confidence: bars on the dashed line are as right as they are sure; below it, too sure."""
    if not found.images:
        return ""
    left, top, wide, tall = 44, 12, 390, 260
    most = max(one.images for one in found.bins)
    parts, step = [], wide / len(found.bins)
    for place, one in enumerate(found.bins):
        if not one.images:
            continue
        x, high = left + place * step, tall * one.accuracy
        parts.append(
            f'<rect x="{x + 1:.1f}" y="{top + tall - high:.1f}" width="{step - 2:.1f}" height="{max(high, 1):.1f}"'
            ' style="fill:var(--accent)" opacity=".85"/>'
        )
        many = 40 * math.sqrt(one.images / most)
        parts.append(
            f'<rect x="{x + 1:.1f}" y="{top + tall + 72 - many:.1f}" width="{step - 2:.1f}" height="{max(many, 1):.1f}"'
            ' style="fill:var(--muted)" opacity=".5"/>'
        )
    ticks = "".join(
        f'<text x="{left - 6}" y="{top + tall * (1 - s) + 4:.0f}" text-anchor="end">{100 * s:.0f} %</text>'
        f'<text x="{left + wide * s:.0f}" y="{top + tall + 18}" text-anchor="middle">{100 * s:.0f} %</text>'
        f'<path d="M{left} {top + tall * (1 - s):.0f}h{wide}" style="stroke:var(--rule)" fill="none"/>'
        for s in (0, 0.25, 0.5, 0.75, 1)
    )
    look = 'style="stroke:var(--ink)" stroke-width="1.4" stroke-dasharray="5 4" fill="none"'
    line = f'<path d="M{left} {top + tall}l{wide} {-tall}" {look}/>'
    label = f"Reliability diagram: expected calibration error {100 * found.calibration_error:.1f} per cent"
    names = (
        f'<text x="{left + wide / 2:.0f}" y="{top + tall + 94}" text-anchor="middle">its confidence; below, how many'
        " answers</text>"
    )
    svg = f'<svg role="img" aria-label="{label}" viewBox="0 0 460 372">{ticks}{"".join(parts)}{line}{names}</svg>'
    caption = (
        f"Bars: how often it was right, by how sure it was. On the dashed line it is as right as it is sure; below, too"
        f" sure. On average it was {100 * found.confidence:.1f} % sure and {100 * found.accuracy:.1f} % right."
    )
    return f'<figure class="half">{svg}<figcaption>{page.text(caption)}</figcaption></figure>\n'


def surest_wrong(part: Part, chances: Tensor, names: Sequence[str], most: int = WRONG) -> str:
    """The images whose wrong answers had the largest shares, as small PNGs in the page itself."""
    sure, answer = chances.cpu().max(1)
    labels = part.labels.cpu()
    wrong = (answer != labels).nonzero()[:, 0]
    order = wrong[sure[wrong].argsort(descending=True, stable=True)][:most]
    if not len(order):
        return "<p>Nothing: every answer was right.</p>"
    items = []
    for row in order.tolist():
        shown = picture(part.images[row])
        small = ' class="small"' if max(part.images.shape[1:3]) < 64 else ""
        truth, said = names[int(labels[row])], names[int(answer[row])]
        label = f"{page.text(truth)}, taken for {page.text(said)}"
        words = f"<b>{page.text(truth)}</b>, taken for <b>{page.text(said)}</b> ({100 * float(sure[row]):.0f} % sure)"
        items.append(f'<li><img{small} src="{shown}" alt="{label}"> {words}</li>')
    note = f"{len(order)} of {len(wrong):,} wrong answers. These are this site’s own images: do not send this page on."
    return f'<ul class="wrong">{"".join(items)}</ul><p class="note">{note}</p>'


def picture(image: Tensor) -> str:
    """A data URI of a small PNG; of tiles the first three bands (or the first), each spread from its 2nd to its 98th
    percentile."""
    from PIL import Image

    pixels = image.cpu().numpy()
    pixels = pixels[..., :3] if pixels.shape[-1] >= 3 else pixels[..., :1]
    if pixels.dtype != np.uint8:
        low, high = np.percentile(pixels, (2, 98), axis=(0, 1))
        pixels = np.clip((pixels - low) / np.maximum(high - low, 1e-6) * 255, 0, 255).astype(np.uint8)
    small = Image.fromarray(pixels if pixels.shape[-1] == 3 else pixels[..., 0])
    small.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    small.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def counts_table(names: Sequence[str], columns: Sequence[tuple[str, Sequence[int | None]]]) -> str:
    """Who holds how many images of which class."""
    rows = [
        [name, *(page.NONE if (value := held[c]) is None else page.count(value) for _, held in columns)]
        for c, name in enumerate(names)
    ]
    head = ["Class", *(who for who, _ in columns)]
    return page.table(head, rows, numeric=range(1, len(head)), label="Images by class", tall=len(rows) > 24)
