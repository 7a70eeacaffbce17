"""The report's curves over epochs: training, AURORA's lambda and what lies behind it, and what stopping earlier would
have given."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from flyby.names import natural
from flyby.report import figures, page
from flyby.report.figures import Panel
from flyby.report.read import RunData

OPEN_RUNS = 6  # beyond so many, each run's own curves are folded away
MANUAL = 18.0  # where FAFI with annealing by hand begins
EXPLODED = 20  # times the median: beyond it a linear axis would show one line and a floor

Value = Callable[[dict[str, Any]], float | None]


def training(runs: list[RunData]) -> str:
    """Loss and accuracy of every site while it trained."""
    return _curves(runs, "training", training_panels)


def alignment(runs: list[RunData]) -> str:
    """Lambda of every site over the manual line, what it adds to the loss, and (for one run) the losses that lambda
    follows."""
    return _curves(runs, "lambda", lambda_panels) + (_curves(runs, "terms", term_panels) if len(runs) == 1 else "")


def stopped_earlier(runs: list[RunData]) -> str:
    """Accuracy of the snapshots that the sites kept, fused offline by the run's own rule."""
    lines = {run.name: points for run in runs if (points := _checkpoints(run))}
    if not lines:
        return ""
    spoken = "Accuracy if the sites had stopped earlier: " + "; ".join(
        f"{name} " + ", ".join(f"{accuracy:.1f} % at epoch {epoch:g}" for epoch, accuracy in points)
        for name, points in lines.items()
    )
    caption = (
        "Accuracy if the sites had stopped earlier (offline; nothing was sent): the same rule on weights each site kept"
        " for itself."
    )
    if len(lines) == 1:
        points = next(iter(lines.values()))
        caption += " " + ", ".join(f"{accuracy:.1f} % after epoch {epoch:g}" for epoch, accuracy in points[-8:]) + "."
    least = min(accuracy for points in lines.values() for _, accuracy in points)
    panel = Panel(
        "Test accuracy by epoch of the snapshot", lines, percent=True, low=80 if least > 82 else 50 if least > 55 else 0
    )
    return page.figure(figures.curves.both("checkpoints", spoken, [panel], 170), caption)


def _checkpoints(run: RunData) -> list[tuple[float, float]]:
    kept = run.result.get("checkpoints")
    pairs = (
        [(page.number(c.get("epoch")), page.number(c.get("accuracy"))) for c in kept if isinstance(c, dict)]
        if isinstance(kept, list)
        else []
    )
    return sorted((epoch, 100 * share) for epoch, share in pairs if epoch is not None and share is not None)


def training_panels(run: RunData) -> list[Panel]:
    accuracy = _lines(
        run, lambda row: None if (share := page.number(row.get("train_accuracy"))) is None else 100 * share
    )
    panels = [
        Panel("Training loss", _lines(run, _key("loss"))),
        Panel("Validation loss", _lines(run, _key("val_loss"))),
    ]
    return [panel for panel in (*panels, Panel("Training accuracy", accuracy, percent=True)) if panel.lines]


def lambda_panels(run: RunData) -> list[Panel]:
    weight, term = _lines(run, _key("lambda")), _lines(run, _weighted_alignment)
    if not weight:
        return []
    epochs = [epoch for line in weight.values() for epoch, _ in line]
    guide = [(0.0, MANUAL), (max(epochs), 0.0)] if max(epochs) > min(epochs) else []
    panels = [
        Panel(
            "λ, the weight of alignment",
            weight,
            guide=guide,
            guide_label="a manual schedule, 18 → 0",
            log=_exploded(weight),
        ),
        Panel("λ · L_align, what alignment adds to the loss", term, log=_exploded(term)),
    ]
    return [panel for panel in panels if panel.lines]


def term_panels(run: RunData) -> list[Panel]:
    """What lambda follows (the two losses) and what it moves (the prototypes)."""
    panels = [
        Panel("L_local", _lines(run, _key("loss_local"))),
        Panel("L_align", _lines(run, _key("loss_align"))),
        Panel("Prototype norm, mean over classes", _lines(run, _key("proto_norm")), from_zero=False),
    ]
    return [panel for panel in panels if panel.lines] if _lines(run, _key("lambda")) else []


def _key(name: str) -> Value:
    return lambda row: page.number(row.get(name))


def _weighted_alignment(row: dict[str, Any]) -> float | None:
    weight, loss, stated = (page.number(row.get(name)) for name in ("lambda", "loss_align", "lambda_align"))
    return stated if stated is not None else weight * loss if weight is not None and loss is not None else None


def _lines(run: RunData, value: Value) -> dict[str, list[tuple[float, float]]]:
    """One named line a site; a row written twice (a resumed run) counts once, the later one."""
    points: dict[str, dict[float, float]] = {}
    for row in run.metrics:
        epoch, number = page.number(row.get("epoch")), value(row)
        if epoch is not None and number is not None:
            points.setdefault(str(row.get("site", "")), {})[epoch] = number
    return {site: sorted(points[site].items()) for site in sorted(points, key=natural)}


def _exploded(lines: dict[str, list[tuple[float, float]]]) -> bool:
    values = [value for line in lines.values() for _, value in line if value > 0]
    return bool(values) and max(values) > EXPLODED * max(1.0, median(values))


def _curves(runs: list[RunData], key: str, panels_of: Callable[[RunData], list[Panel]]) -> str:
    """One figure for each set of curves; runs that share their uploads share theirs."""
    shown: list[tuple[list[str], list[Panel]]] = []
    for run in runs:
        if not (panels := panels_of(run)):
            continue
        for names, same in shown:
            if same == panels:
                names.append(run.name)
                break
        else:
            shown.append(([run.name], panels))
    parts = []
    for i, (names, panels) in enumerate(shown):
        sites = len({name for panel in panels for name in panel.lines})
        title = page.listed(names) + (" (one training for all)" if len(names) > 1 else "")
        titles = page.listed([panel.title.split(",")[0] for panel in panels])
        spoken = f"{titles} by epoch for {page.plural(sites, 'site')}, {page.listed(names)}"
        bundle = f"Each faint line is one of {sites} sites; the bold line is their median."
        caption = bundle if sites > figures.LEGEND_LIMIT else ""
        body = page.figure(figures.curves.both(f"{key}{i}", spoken, panels, 220 if len(runs) == 1 else 160), caption)
        if len(shown) > OPEN_RUNS:
            body = f"<details><summary>{page.text(title)}</summary>\n{body}</details>"
        elif len(runs) > 1:
            body = f"<h3>{page.text(title)}</h3>\n{body}"
        parts.append(body)
    return "\n".join(parts)
