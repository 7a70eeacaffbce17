"""The card of a model: YAML that the Hugging Face hub reads, who held what, results as they come, nobody's markup."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from factories import done, random_parcel, small_spec
from flyby.errors import BadInput
from flyby.fusion import load_predictor, save_predictor
from flyby.fusion.card import card_of, check_licence, facts_of, held_by, noted
from flyby.fusion.predictor import Predictor, Single, card_in
from flyby.parcels import parcel, signing

NAMES = ("rows", "columns", "checks")


def model() -> Predictor:
    return Single([small_spec()], NAMES, [small_spec().build()])


def front(text: str) -> dict[str, Any]:
    """The YAML before the page."""
    _, facts, page = text.split("---\n", 2)
    assert page.startswith("\n# ")
    loaded: dict[str, Any] = yaml.safe_load(facts)
    return loaded


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, (name, counts) in enumerate({"north": (20, 20, 20), "south": (0, 7, 0)}.items()):
        parcel.write(random_parcel(name, counts=counts, seed=seed), tmp_path / f"{name}.parcel")
    words = ("fuse", *tmp_path.glob("*.parcel"), "--fusion", "fedavg", "--no-export", "--license", "CC-BY-4.0")
    done(*words, "--out", tmp_path / "model")
    return tmp_path / "model"


def test_fuse_writes_a_card_as_the_hub_wants_it(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    facts = front(text)
    assert (facts["library_name"], facts["pipeline_tag"]) == ("flyby", "image-classification")
    assert (facts["license"], facts["metrics"]) == ("cc-by-4.0", ["accuracy"])
    assert "model-index" not in facts, "nobody has evaluated it"
    assert {"federated-learning", "safetensors"} <= set(facts["tags"])
    assert "| north | 60 | rows: 20, columns: 20, checks: 20 |" in text
    assert "| south | 7 | columns: 7 |" in text
    assert "rows, columns, checks" in text
    assert "- fusion: fedavg" in text
    assert "not calibrated" in text
    assert "Not known: nobody has evaluated it yet" in text
    assert text.rstrip().splitlines()[-1].startswith("Made with flyby ")
    assert card_in(folder)["held"][1] == {"site": "south", "images": 7, "counts": {"columns": 7}}


def test_an_evaluation_is_noted_and_replaced_by_a_later_one_on_the_same_data(folder: Path) -> None:
    noted(folder, {"data": "night", "images": 50, "accuracy": 0.5})
    noted(folder, {"data": "new|x", "images": 100, "accuracy": 0.1})
    noted(
        folder, {"data": "new|x", "images": 200, "accuracy": 0.9, "interval": [0.85, 0.94], "calibration_error": 0.02}
    )
    text = (folder / "README.md").read_text()
    assert "| night | 50 | 50.0% | not given |" in text
    assert "| new\\|x | 200 | 90.0% | 85.0% to 94.0% |" in text
    assert "10.0%" not in text
    assert "2.0% away from its accuracy" in text
    (index,) = front(text)["model-index"]
    assert [one["metrics"] for one in index["results"]] == [
        *([{"type": "accuracy", "value": 0.5}], [{"type": "accuracy", "value": 0.9}]),
    ]
    assert all({"task", "dataset", "metrics"} == set(one) and one["dataset"]["type"] for one in index["results"])
    assert load_predictor(folder).class_names == NAMES, "it is still a model"


def test_the_hub_s_own_reader_understands_it(folder: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    noted(folder, {"data": "new", "images": 200, "accuracy": 0.9})
    data = hub.ModelCard((folder / "README.md").read_text()).data
    assert (data.license, data.library_name) == ("cc-by-4.0", "flyby")
    assert (data.eval_results[0].metric_type, data.eval_results[0].metric_value) == ("accuracy", 0.9)


def test_a_signed_card_stays_as_it_is(folder: Path, tmp_path: Path) -> None:
    signing.new_key("lab", tmp_path)
    signing.sign_folder(folder, signing.read_private(tmp_path / "lab.key"))
    before = (folder / "README.md").read_bytes()
    with pytest.raises(BadInput, match="is signed, so its card stays as it is; evaluate first, then sign it"):
        noted(folder, {"data": "new", "images": 1, "accuracy": 1.0})
    assert (folder / "README.md").read_bytes() == before


def test_who_held_what_is_told_as_exactly_as_the_sites_told_it() -> None:
    plain = random_parcel("a").manifest
    binary = plain.model_copy(update={"counts": (1, 0, 1), "counts_kind": "binary", "samples": 9})
    noisy = plain.model_copy(update={"counts": (3, 4, 5), "counts_kind": "noisy"})
    secret = plain.model_copy(update={"counts": None})
    config = {"kind": "single", "specs": [small_spec().model_dump(mode="json")], "class_names": NAMES}
    text = card_of({**config, "card": {"held": held_by([binary, noisy, secret])}})
    assert "| a | 9 | rows, checks |" in text
    assert "| a | 60 | rows: 3, columns: 4, checks: 5 (noisy) |" in text
    assert "| a | 60 | not shared |" in text
    assert len(held_by([plain] * 80)) == 50


def test_a_name_is_no_markup(tmp_path: Path) -> None:
    names = ("<b>", "a|b", "`x`\\")
    spec = small_spec()
    save_predictor(
        Single([spec], names, [spec.build()]), tmp_path / "m", {"method": "x\n---\nlicense: mit"}, export=False
    )
    text = (tmp_path / "m" / "README.md").read_text()
    assert r"\<b\>, a\|b, \`x\`\\" in text
    assert "- method: x --- license: mit" in text
    assert "license" not in front(text)


def test_facts_of_a_stranger_are_taken_only_in_their_form(tmp_path: Path) -> None:
    judged = {"data": "x", "images": 3, "accuracy": 0.5}
    for card in (
        *([1], None, "x", {"evaluated": 3}, {"evaluated": [{"data": "x"}]}, {"held": [{"images": "many"}]}),
        *({"license": 3}, {"license": "<b>"}, {"versions": [1]}, {"held": [{"images": 1, "counts": {"a": "b"}}]}),
        *({"evaluated": [judged | {"interval": "ab"}]}, {"evaluated": [judged | {"trained_on": "x"}]}),
    ):
        assert facts_of({"card": card}) == {}
    config = {"kind": "single", "specs": [small_spec().model_dump(mode="json")], "class_names": NAMES}
    card_of({**config, "card": {"evaluated": [{"images": 1, "accuracy": 1}], "held": [{"images": 2}], "name": [1]}})
    save_predictor(model(), tmp_path / "m", export=False)
    config = json.loads((tmp_path / "m" / "model.json").read_text())
    (tmp_path / "m" / "model.json").write_text(json.dumps(config | {"card": [1]}))
    assert card_in(tmp_path / "m") == {}
    noted(tmp_path / "m", {"data": "new", "images": 10, "accuracy": 0.5})
    assert "50.0%" in (tmp_path / "m" / "README.md").read_text()


def test_a_temperature_is_said() -> None:
    config = {"kind": "single", "specs": [small_spec().model_dump(mode="json")], "class_names": NAMES, "card": {}}
    assert "calibrated at the sites (temperature 1.7)" in card_of({**config, "temperature": 1.7, "measured": True})
    assert "usual for its rule, which no site has measured" in card_of({**config, "temperature": 0.1})
    assert "no chances to be right" in card_of(config)


@pytest.mark.parametrize("name", ["", "my licence", "-x", "a" * 80, "<b>"])
def test_a_licence_has_a_name_of_the_hub(name: str) -> None:
    with pytest.raises(BadInput, match="is no name of a licence"):
        check_licence(name)
