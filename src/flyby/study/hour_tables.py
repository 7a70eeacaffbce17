"""Rows of runs by a contact plan as a table: accuracy against hours, a line per method and variant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flyby.report.contacts import marks
from flyby.report.fans import mean_at
from flyby.study.sheet import Entry, Table, plain

Row = dict[str, Any]


def by_plan(row: Row) -> bool:
    return bool(row.get("by_hour")) and bool(row.get("contacts"))


def hour_tables(rows: list[Row], names: dict[str, str], facts: Mapping[str, Any] | None = None) -> list[Table]:
    """``names`` says what the line of a row's key is called. Seeds of one line are averaged; nodes are those that every
    line has."""
    shared = set.intersection(*(set(row["by_hour"]) for row in rows))
    hours = marks(max(float(row["contacts"]["hours"]) for row in rows))
    lead = (
        f"Mean accuracy in % over the {len(shared)} nodes that all lines judge, on the common images weighted as each"
        " node's classes, at some hours of the plan. Hour 0 is every node's own model."
    )
    lines = []
    for name in dict.fromkeys(names[row["key"]] for row in rows):
        mine = [row for row in rows if names[row["key"]] == name]
        means = [
            100 * sum(mean_at({node: row["by_hour"][node] for node in shared}, hour) for row in mine) / len(mine)
            for hour in hours
        ]
        crossed = sum(_crossed(row["contacts"]) for row in mine) / len(mine)
        told = {"method": name, "n": len(mine), "measure": "accuracy"}
        each = [
            Entry(f"{mean:.1f}", facts={**told, "mean": mean, "hour": hour})
            for mean, hour in zip(means, hours, strict=True)
        ]
        lines.append([*plain(name, f"{len(mine)}", f"{crossed:g}"), *each])
    heads = ["method", "n", "crossed", *(f"{hour:g} h" for hour in hours)]
    return [Table(heads, "l" + "r" * (len(heads) - 1), lines, lead=lead, facts=facts or {})]


def _crossed(facts: Row) -> int:
    """Pairs that exchanged, or uploads that came down."""
    return len(facts["delivered"]) if "delivered" in facts else int(facts["exchanges"])
