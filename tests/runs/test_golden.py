"""Numbers that a change not meant to alter them leaves alone: hashes of runs taken before it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import golden
import pytest

from factories import done

KNOWN: dict[str, Any] = json.loads((Path(__file__).parent / "golden.json").read_text())
CLOSE = 0.1  # on a CPU that takes sums in another order; a few epochs on digits move by single images


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flyby.study.compare.write_report", lambda folder: None)  # no hash is taken of a report
        return golden.measure(tmp_path_factory.mktemp("golden"), done)


def accuracies(value: dict[str, Any], place: str = "") -> Iterator[tuple[str, float]]:
    for name, inside in value.items():
        if name == "accuracy":
            yield place, inside
        elif isinstance(inside, dict):
            yield from accuracies(inside, f"{place}/{name}")


@pytest.mark.slow
def test_the_same_commands_give_the_same_bytes(found: dict[str, Any]) -> None:
    if found["probe"] != KNOWN["probe"]:
        pytest.skip(
            f"golden.json was taken with other arithmetic ({KNOWN['probe']}), this machine has {found['probe']}"
        )
    assert found == KNOWN


@pytest.mark.slow
def test_on_any_machine_the_accuracies_agree(found: dict[str, Any]) -> None:
    known = dict(accuracies(KNOWN))
    assert len(known) > 15
    for place, value in accuracies(found):
        assert value == pytest.approx(known[place], abs=CLOSE), place
