"""``flyby data``: how to name data, and where some comes from."""

from __future__ import annotations

from factories import done
from flyby.data.sources import catalogue, load
from flyby.data.splits import SPLITS


def test_it_says_how_to_get_a_set_and_names_no_place_of_this_machine() -> None:
    said = done("data", "--json").json
    assert [row["name"] for row in said["sources"]] == [row["name"] for row in catalogue()]
    assert [row["split"] for row in said["splits"]] == list(SPLITS)
    assert all("\n" not in row["rule"] and row["rule"] for row in said["splits"])
    sets = {row["set"]: row["how to get it"] for row in said["public"]}
    assert {"your own images", "digits", "CIFAR-10", "CIFAR-100", "SVHN", "Hurricane", "Wildfire"} == set(sets)
    assert all("--data" in how for how in sets.values())
    digits = load("digits").train
    assert f"{len(digits):,} images of 8x8" in next(row["what"] for row in said["public"] if row["set"] == "digits")
    text = done("data").out
    assert "hf:uoft-cs/cifar10" in text
    assert "/work" not in text + str(said)
    assert "/home" not in text + str(said)
