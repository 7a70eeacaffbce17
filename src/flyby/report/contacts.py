"""Runs by a contact plan in the report: accuracy against the hours, and what crossed."""

from __future__ import annotations

from typing import Any

from flyby.drawing import clean
from flyby.report import page
from flyby.report.fans import Steps, fan, leads, mean_at
from flyby.report.read import RunData

MARKS = (0.0, 1.0, 2.0, 4.0, 6.0, 9.0, 12.0, 18.0, 24.0, 36.0, 48.0, 72.0, 120.0, 168.0)


def over_hours(runs: list[RunData]) -> str:
    """The section of runs that followed a plan, side by side at the nodes that all of them judged; else empty."""
    found = {run.name: run for run in runs if run.result.get("by_hour") and run.result.get("contacts")}
    series = {name: _steps(run) for name, run in found.items()}
    shared = [node for node in next(iter(series.values()), {}) if all(node in one for one in series.values())]
    if not shared:
        return ""
    groups = {name: {node: one[node] for node in shared} for name, one in series.items()}
    end = max(float(run.result["contacts"]["hours"]) for run in found.values())
    spoken = "Mean accuracy over the hours: " + "; ".join(
        f"{name} from {100 * mean_at(one, 0):.1f} to {100 * mean_at(one, end):.1f} %" for name, one in groups.items()
    )
    drawn = fan("by-hour", spoken, groups, end, "accuracy on common images, as each node’s classes", percent=True)
    caption = (
        f"Mean over {len(shared)} nodes (line), and the middle half of them (band). Hour 0: every node’s own model."
    )
    return f"<p>{_said(groups, end)}</p>" + page.figure(drawn, caption) + _marks(groups, end) + _crossed(found)


def _steps(run: RunData) -> dict[str, Steps]:
    table = run.result["by_hour"]
    return {str(node): [(float(h), float(v)) for h, v in steps] for node, steps in table.items() if steps}


def _said(groups: dict[str, dict[str, Steps]], end: float) -> str:
    if len(groups) < 2:
        ((name, one),) = groups.items()
        gain = 100 * (mean_at(one, end) - mean_at(one, 0))
        return f"{page.strong(name)} moves the mean by {gain:+.1f} points in {end:g} hours."
    found = leads(groups, end)
    words = [f"{page.strong(name)} from hour {hour:.1f}" if hour else page.strong(name) for hour, name in found]
    return f"Which is ahead: {', then '.join(words)}." if words else "None is ahead of the others at any hour."


def marks(end: float) -> list[float]:
    """Some hours of a plan, for a table."""
    return [hour for hour in MARKS if hour < end] + [end]


def _marks(groups: dict[str, dict[str, Steps]], end: float) -> str:
    hours = marks(end)
    rows = [[name, *(page.percent(mean_at(one, hour)) for hour in hours)] for name, one in groups.items()]
    head = ["Mean accuracy % at hour", *(f"{hour:g}" for hour in hours)]
    return page.table(head, rows, numeric=range(1, len(head)), label="Mean accuracy at some hours")


def _crossed(found: dict[str, RunData]) -> str:
    """What the plan let through, and who was left out."""
    notes = []
    for name, run in found.items():
        facts: dict[str, Any] = run.result["contacts"]
        codecs = ", ".join(f"{count} in {page.text(codec)}" for codec, count in (facts.get("codecs") or {}).items())
        if "delivered" in facts:
            said = f"{page.plural(len(facts['delivered']), 'upload')} reached a ground station"
        else:
            oriented = [count for count in facts["rounds"].values() if count]
            said = (
                f"{page.plural(facts['exchanges'], 'pair')} exchanged models; {len(oriented)} of"
                f" {len(facts['rounds'])} nodes oriented, {sum(oriented)} times in all"
            )
            if (age := page.number(facts.get("age_hours"))) is not None:
                said += f", on models {age:.1f} hours old in the mean"
        left = [clean(one) for key in ("unmet", "unfilled", "missing") for one in facts.get(key) or ()]
        said += f" ({codecs})" if codecs else ""
        said += f". Left with their own models: {page.text(', '.join(left))}" if left and "rounds" in facts else ""
        said += f". Too late for the server: {page.text(', '.join(left))}" if left and "delivered" in facts else ""
        notes.append(f'<p class="note">{page.strong(name)}: {said}.</p>')
    return "".join(notes)
