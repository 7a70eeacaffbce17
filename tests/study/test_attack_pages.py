"""docs/attacks.md, held to the rows it was written from: every range is the least and the most of at least four
seeds."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "attacks.md").read_text()
COLUMNS = {
    "none": ("none",),
    "random": ("random:share=0.2", "random:share=0.4"),
    "sign-flip": ("sign-flip:share=0.2", "sign-flip:share=0.4"),
    "scaled ×10": ("scaled:share=0.2", "scaled:share=0.4"),
    "scaled ×100": ("scaled:share=0.4,factor=100",),
    "label-flip": ("label-flip:share=0.2", "label-flip:share=0.4"),
    "counts-lie": ("counts-lie:share=0.2", "counts-lie:share=0.4"),
    "random + boast": ("random:share=0.2,boast=true", "random:share=0.4,boast=true"),
}
BACKDOOR = ("backdoor:share=0", "backdoor:share=0.2", "backdoor:share=0.4")
Table = list[list[str]]


def rows(study: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "results" / f"{study}.jsonl").read_text().splitlines()]


def tables(page: str) -> list[Table]:
    found = re.findall(r"(?:^\|.*\|\n)+", page, flags=re.M)
    return [[[cell.strip() for cell in row.split("|")[1:-1]] for row in one.splitlines()] for one in found]


def spread(values: dict[int, float]) -> str:
    assert len(values) >= 4, "a range is one of four seeds at least"
    low, high = round(100 * min(values.values())), round(100 * max(values.values()))
    return f"{low}" if low == high else f"{low}–{high}"


def by_seed(study: str, field: str, *keys: str) -> dict[tuple[Any, ...], dict[int, float]]:
    found: dict[tuple[Any, ...], dict[int, float]] = defaultdict(dict)
    for row in rows(study):
        if row.get(field) is not None:
            found[tuple(row[key] for key in keys)][row["seed"]] = row[field]
    return found


def table(first: str) -> Table:
    (one,) = [one for one in tables(PAGE) if one[0][:2] == ["rule", first] and len(one) > 10]
    return one


def test_every_range_of_the_rules_is_that_of_the_rows() -> None:
    found, shown = by_seed("attacks-digits", "accuracy", "fusion", "attack"), table("none")
    assert shown[0][1:] == list(COLUMNS)
    assert len(shown) == 2 + len({rule for rule, _ in found})
    for rule, *cells in shown[2:]:
        for cell, attacks in zip(cells, COLUMNS.values(), strict=True):
            assert cell == " / ".join(spread(found[rule.strip("`"), attack]) for attack in attacks), (rule, attacks)


def test_every_range_of_the_backdoor_is_that_of_the_rows() -> None:
    accuracy = by_seed("attacks-digits", "accuracy", "fusion", "attack")
    success = by_seed("attacks-digits", "attack_success", "fusion", "attack")
    for rule, *cells in table("accuracy, 0 / 20 / 40 %")[2:]:
        for cell, found in zip(cells, (accuracy, success), strict=True):
            assert cell == " / ".join(spread(found[rule.strip("`"), attack]) for attack in BACKDOOR), rule


GATE = {
    "none": "none",
    **{
        f"{name} {share} %": f"{attack}:share=0.{share // 10}{more}"
        for share in (20, 40)
        for name, attack, more in (
            *(("random", "random", ""), ("sign-flip", "sign-flip", ""), ("scaled ×10,", "scaled", "")),
            *(("label-flip", "label-flip", ""), ("counts-lie", "counts-lie", ""), ("backdoor", "backdoor", "")),
            *(("random + boast", "random", ",boast=true"), ("scaled ×100,", "scaled", ",factor=100")),
        )
    },
}


def test_every_line_of_the_gate_is_that_of_the_rows() -> None:
    found = by_seed("attacks-gate-digits", "accuracy", "fusion", "attack", "admission")
    (shown,) = [one for one in tables(PAGE) if one[0][:2] == ["attack", "refused, default"]]
    rules = [cell.strip("`") for cell in shown[0][3:]]
    assert len(shown) == 2 + len({attack for _, attack, _ in found})
    for label, default, validated, *cells in shown[2:]:
        attack = GATE[label]
        for cell, admission in ((default, "default"), (validated, "validated")):
            told = {
                r["seed"]: r
                for r in rows("attacks-gate-digits")
                if (r["attack"], r["admission"]) == (attack, admission)
            }
            refused, all_of = (sum(r[key] for r in told.values()) for key in ("refused_malicious", "malicious"))
            assert cell == (f"{refused} of {all_of}" if attack != "none" else "")
            assert not any(r["refused_honest"] for r in told.values())
        for cell, rule in zip(cells, rules, strict=True):
            assert cell == " / ".join(spread(found[rule, attack, one]) for one in ("default", "validated")), label
