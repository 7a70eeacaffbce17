"""docs/studies.md says what a study file can hold, and its example is one."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from flyby.study.catalogue import Study
from flyby.study.grid import cells

PAGE = (Path(__file__).parents[2] / "docs" / "studies.md").read_text()


def test_every_key_of_a_study_stands_on_the_page_with_its_sentence() -> None:
    table = dict(re.findall(r"^\| `(\w+)` \| .*? \| (.*) \|$", PAGE, flags=re.M))
    assert table == {name: field.description for name, field in Study.model_fields.items()}


def test_the_example_is_a_study_of_24_cells_on_8_sets_of_uploads() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.S)
    found = list(cells(Study.model_validate(yaml.safe_load(text))))
    trained = {(c.config.method, c.config.split.alpha, c.config.seed) for c in found}
    assert (len(found), len(trained)) == (24, 8)
