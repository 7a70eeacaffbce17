"""``flyby methods`` and ``flyby explain``: every name has a sentence, every key that --set takes has one too."""

from __future__ import annotations

import json

import pytest

from factories import call, done, one_line
from flyby.fusion import FUSIONS
from flyby.models import ARCHITECTURES
from flyby.objectives import OBJECTIVES
from flyby.runs.config import SECTIONS, make_config
from flyby.runs.explain import GROUPS, everything, explain
from flyby.runs.methods import METHODS

KEYS = everything()


def test_every_key_has_a_sentence() -> None:
    assert len(KEYS) > 400
    assert [row["key"] for row in KEYS if len(row["about"]) < 6] == []
    assert [row["key"] for row in KEYS if not row["takes"] or "value" in row["takes"].split(" | ")] == []


def test_every_name_has_a_sentence_and_stands_in_the_list() -> None:
    text = done("methods").out
    for known in (METHODS, FUSIONS, OBJECTIVES, ARCHITECTURES):
        for name, one in known.items():
            assert one.about, f"{name} says nothing of itself"  # type: ignore[attr-defined]
            assert f"  {name} " in text
    assert "\\" not in text


def test_one_section_alone() -> None:
    assert [row["rule"] for row in done("methods", "--rules", "--json").json] == list(FUSIONS)
    assert [row["model"] for row in done("methods", "--models", "--json").json] == list(ARCHITECTURES)
    text = done("methods", "--objectives").out
    assert "  bearings " in text
    assert "experts-calibrated" not in text


def test_a_method_in_full() -> None:
    card, own = explain("aurora")
    assert (card["kind"], card["objective"], card["fusion"]) == ("method", "aurora", "experts-calibrated")
    assert {"iffi", "experts", "fedavg"} <= set(card["fits"])
    assert "fedlpa" not in card["fits"], "it needs K-FAC factors, which nobody asked the sites for"
    keys = {row["key"]: row for row in card["keys"]}
    assert keys["objective.lambda_max"]["default"] == 50.0
    assert keys["objective.lambda_max"]["takes"] == "number, above 0"
    assert keys["fusion.cap_counts"]["takes"] == "number | null, above 0"
    assert own["kind"] == "objective"
    text = done("explain", "aurora").out
    assert text.count("objective.lambda_max=50.0") == 1, "the objective of the same name does not say it again"
    assert "schedule=cosine" in text


def test_a_methods_own_defaults_are_shown() -> None:
    best = {row["key"]: row["default"] for row in explain("best")[0]["keys"]}
    assert (best["objective.shift"], best["objective.most_classes"]) == ("turns", 10)
    plus = {row["key"]: row["default"] for row in explain("fol-plus")[0]["keys"]}
    assert (plus["orient.members"], plus["orient.threshold"], plus["orient.top"]) == ("all", None, 10)


def test_a_rule_says_whom_it_fits_and_what_to_ask_for() -> None:
    _, rule = explain("fedlpa")
    assert rule["objectives"] == []
    assert "supervised" in rule["when_asked"]
    assert rule["ask"] == "--set objective.send=[kfac]"
    assert explain("kfac")[0]["rules"] == ["fedlpa"]
    assert {"salt", "aurora", "bearings"} <= set(explain("iffi")[0]["objectives"])


def test_a_key_of_several_rules_is_said_for_each() -> None:
    text = done("explain", "fusion.lr").out
    assert "\n\n\n" not in text
    for card in explain("fusion.lr"):
        assert f"(of {', '.join(card['keys'][0]['of'])})" in " ".join(text.split()), card


def test_groups_models_and_single_keys() -> None:
    assert {row["key"] for row in explain("train")[0]["keys"]} >= {"train.lr", "train.epochs", "train.dp_epsilon"}
    assert explain("resnet18")[0]["parameters"] == 11_173_962
    (pool,) = explain("orient.pool")
    assert pool["keys"][0]["default"] == 0
    assert {one["name"] for one in explain("lr")} == {"train.lr", "orient.lr", "fusion.lr"}
    assert explain("proxy")[0]["name"] == "proxy"
    assert "orient.pool=0" in done("explain", "orient.pool").out


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_is_explained_with_its_keys(group: str) -> None:
    text = done("explain", group).out
    assert all(f"{row['key']}=" in text for row in explain(group)[0]["keys"])


def test_every_section_and_every_split_is_explained() -> None:
    assert SECTIONS.keys() <= GROUPS.keys()
    assert explain("contacts.chunk")[0]["keys"][0]["default"] == 65536
    assert "split.name=by-label" in done("explain", "by-label").out
    assert "flyby backbones" in one_line(call("explain", "efficientnet-lite0"))


def test_a_key_that_is_shown_can_be_set() -> None:
    """To its own default, by the command line's own reader."""
    rows = [row for row in explain("aurora")[0]["keys"] if row["default"] is not None]
    said = [f"{row['key']}={json.dumps(row['default'])}" for row in rows]
    config = make_config("aurora", assignments=said)
    assert config.objective["lambda_max"] == 50.0
    assert len(config.objective) + len(config.fusion) == len(rows)


@pytest.mark.parametrize(
    ("name", "near"),
    [("auroro", "aurora"), ("resnet", "resnet18"), ("train.lrr", "train.lr"), ("orient.pol", "orient.pool")],
)
def test_an_unknown_name_gets_the_nearest(name: str, near: str) -> None:
    assert f"'{near}'" in one_line(call("explain", name))


def test_settings_of_no_one_in_particular() -> None:
    assert "explain one by its name: fedavg" in one_line(call("explain", "fusion"))
