"""The figures of docs/findings.md say what the rows say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from flyby.study.catalogue import packaged, read_study
from flyby.study.tables import render

ROOT = Path(__file__).parents[2]
LABEL = re.compile(r'aria-label="([^"]*)"')


def test_figures_are_those_of_the_rows() -> None:
    """Their labels, which hold every number; how letters are drawn may differ between machines."""
    made = runpy.run_path(str(ROOT / "benchmarks" / "findings_figures.py"))["drawings"]()
    kept = {name: (ROOT / "docs" / "images" / f"findings-{name}.svg").read_text() for name in made}
    assert {n: LABEL.findall(svg) for n, svg in kept.items()} == {n: LABEL.findall(svg) for n, svg in made.items()}
    assert all(len(LABEL.findall(svg)) == 1 for svg in made.values())


def test_the_page_shows_every_figure() -> None:
    page = (ROOT / "docs" / "findings.md").read_text()
    shown = set(re.findall(r"images/(findings-\w+\.svg)", page))
    assert shown == {path.name for path in (ROOT / "docs" / "images").glob("findings-*.svg")}
    for name, study in (("lambda", "aurora-lambda"), ("learned", "aurora-table3a")):
        lent = (ROOT / "results" / f"{study}.lambda.svg").read_text()
        assert (ROOT / "docs" / "images" / f"findings-{name}.svg").read_text() == lent


def test_a_table_that_takes_in_rows_of_others_says_what_they_say_now() -> None:
    """New rows of one study can make the table of another wrong."""
    results = ROOT / "results"
    tables = [name for name in packaged() if (results / f"{name}.md").exists() and read_study(name)[1].rows]
    assert len(tables) > 5
    said = {name: render(read_study(name)[1], results / f"{name}.jsonl").strip() for name in tables}
    stale = [name for name in tables if (results / f"{name}.md").read_text().strip() != said[name]]
    assert not stale, f"flyby study {' '.join(stale)} --render"
