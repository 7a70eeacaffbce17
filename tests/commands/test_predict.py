"""``flyby predict`` on files and folders: tables, shares, and one bad file that does not end the batch; ``export`` and
the card, by command."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from factories import NAMES, call, done, make_images, make_npz, make_stripes, one_line, small_spec, stripes
from flyby.commands import predict as command
from flyby.fusion.ensembles.standardised import StandardisedPredictor
from flyby.fusion.predictor import Single, save_predictor

SPEC = small_spec()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and a folder of images of several kinds and sizes, with one that is none."""
    root = tmp_path_factory.mktemp("predict")
    save_predictor(Single([SPEC], NAMES, [SPEC.build()]), root / "model", {"fusion": "fedavg"}, export=False)
    pictures = root / "pictures"
    (pictures / "deep" / "er").mkdir(parents=True)
    for name, size in (("b.png", (30, 20)), ("deep/a.jpg", (8, 8)), ("deep/er/c.webp", (9, 70))):
        Image.fromarray(make_images(1, size, seed=size[0])[0]).save(pictures / name)
    (pictures / "deep" / "bad.png").write_bytes(b"junk")
    (pictures / "notes.txt").write_text("no image, and nobody said so")
    (pictures / ".hidden.png").write_bytes(b"junk")
    return root


def names(rows: list[dict[str, object]], root: Path) -> list[str]:
    return [Path(str(row["image"])).relative_to(root / "pictures").as_posix() for row in rows]


def test_a_folder_is_looked_through_and_a_bad_file_is_named(place: Path) -> None:
    answer = done("predict", place / "model", place / "pictures", "--json")
    assert names(answer.json, place) == ["b.png", "deep/a.jpg", "deep/bad.png", "deep/er/c.webp"]
    good = [row for row in answer.json if "error" not in row]
    assert [set(row) for row in good] == [{"image", "class", "probability"}] * 3
    assert "cannot be decoded" in answer.json[2]["error"]
    assert "note: 1 of 4 could not be used\nnote: " in answer.err
    assert "bad.png cannot be decoded" in answer.err
    lines = done("predict", place / "model", place / "pictures").out.splitlines()
    assert lines == [f"{row['image']}: {row['class']} ({row['probability']:.2f})" for row in good]


def test_an_answer_does_not_depend_on_the_company(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = done("predict", place / "model", place / "pictures", "--json", "--all").json
    monkeypatch.setattr(command, "AT_ONCE", 1)
    one_by_one = done("predict", place / "model", place / "pictures", "--json", "--all").json
    alone = done("predict", place / "model", place / "pictures" / "b.png", "--json", "--all").json
    assert alone == one_by_one[:1]
    assert len(one_by_one) == len(together) == 4
    for row, beside_others in zip(one_by_one, together, strict=True):
        said, with_others = row.pop("probabilities", {}), beside_others.pop("probabilities", {})
        # The last bit is a kernel's: oneDNN takes another for another number of images.
        assert said == pytest.approx(with_others, rel=1e-6)
        assert row.pop("probability", 0) == pytest.approx(beside_others.pop("probability", 0), rel=1e-6)
        assert row == beside_others


def test_top_and_all(place: Path) -> None:
    image = place / "pictures" / "b.png"
    (row,) = done("predict", place / "model", image, "--top", 2, "--all", "--json").json
    assert list(row["probabilities"]) == list(NAMES)
    assert sum(row["probabilities"].values()) == pytest.approx(1, abs=1e-5)
    order = sorted(NAMES, key=lambda name: -row["probabilities"][name])
    assert [one["class"] for one in row["top"]] == order[:2]
    assert (row["class"], row["probability"]) == (order[0], row["probabilities"][order[0]])
    shown = ", ".join(f"{name} ({row['probabilities'][name]:.2f})" for name in order)
    assert done("predict", place / "model", image, "--all").out == f"{image}: {shown}\n"
    assert done("predict", place / "model", image, "--top", 99).out == f"{image}: {shown}\n"


def test_a_table(place: Path, tmp_path: Path) -> None:
    words = ("predict", place / "model", place / "pictures", "--csv", tmp_path / "t.csv")
    assert done(*words, "--top", 2, "--all").out == f"{tmp_path / 't.csv'}: 3 images\n"
    with (tmp_path / "t.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    heads = ["image", "class", "probability", "class_2", "probability_2", *NAMES, "error"]
    assert list(rows[0]) == heads
    assert names(list(rows), place) == ["b.png", "deep/a.jpg", "deep/bad.png", "deep/er/c.webp"]
    bad = rows.pop(2)
    assert "cannot be decoded" in bad["error"]
    assert {bad[head] for head in heads[1:-1]} == {""}
    for row in rows:
        assert float(row[row["class"]]) == float(row["probability"]) >= float(row["probability_2"])
        assert row["error"] == ""
    told = done(*words, "--json").json
    with (tmp_path / "t.csv").open(newline="") as file:
        assert [row["class"] for row in csv.DictReader(file)] == [row.get("class", "") for row in told]


def test_nothing_usable_is_one_line(place: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no images" in one_line(call("predict", place / "model", tmp_path / "empty"))
    bad = (place / "pictures" / "deep" / "bad.png", tmp_path / "nowhere.png")
    assert one_line(call("predict", place / "model", *bad)).endswith("(and 1 more that cannot be used)")
    answer = done("predict", place / "model", place / "pictures" / "b.png", tmp_path / "empty", tmp_path / "x.png")
    assert answer.err.count("note: ") == 3


def test_a_rule_that_must_see_all_images_together_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = small_spec(head="prototype")
    rule = StandardisedPredictor([spec], NAMES, [spec.build()], moments="batch")
    save_predictor(rule, tmp_path / "model", export=False)
    for k, picture in enumerate(stripes(5)[0]):
        Image.fromarray(picture[:, :, 0]).save(tmp_path / f"{k}.png")
    monkeypatch.setattr(command, "AT_ONCE", 2)
    assert len(done("predict", tmp_path / "model", *tmp_path.glob("*.png"), "--json").json) == 5
    assert "one image has none" in one_line(call("predict", tmp_path / "model", tmp_path / "0.png"))


# -- the card, by command


def test_evaluate_puts_its_result_onto_the_card_where_asked(place: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_predictor(Single([SPEC], NAMES, [SPEC.build()]), model, {"fusion": "fedavg"}, export=False)
    images, labels = stripes(30)
    data = make_npz(tmp_path / "new.npz", images=images, labels=labels, class_names=np.array(NAMES))
    before = (model / "README.md").read_bytes()
    facts = done("evaluate", model, "--data", data, "--json").json
    assert (model / "README.md").read_bytes() == before
    done("evaluate", model, "--data", data, "--card")
    (noted,) = json.loads((model / "model.json").read_text())["card"]["evaluated"]
    assert (noted["data"], noted["images"], noted["accuracy"]) == ("new.npz", 30, facts["accuracy"])
    assert noted["interval"] == facts["interval"]
    assert f"| new.npz | 30 | {facts['accuracy']:.1%} |" in (model / "README.md").read_text()


def test_export_by_command(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the export itself, which ``tests/deploy/test_onnx.py`` looks at."""
    monkeypatch.setattr("flyby.deploy.onnx.write_onnx", lambda predictor, path: path.write_bytes(b"x"))
    words = ("export", place / "model", "--out", tmp_path / "m", "--license", "MIT")
    facts = done(*words, "--json").json
    assert facts["files"] == ["README.md", "classes.json", "model.onnx", "run.py"]
    assert facts["bytes"] == sum(path.stat().st_size for path in (tmp_path / "m").iterdir())
    card = (tmp_path / "m" / "README.md").read_text()
    assert "license: mit" in card
    assert "- fusion: fedavg" in card
    assert "try it: python" in done(*words).out, "an older one is replaced"


def test_an_upload_of_sums_answers_by_what_they_give(tmp_path: Path) -> None:
    """Its network has learned nothing; its sums have."""
    data = make_stripes(tmp_path / "stripes.npz")
    done(
        "train",
        "--data",
        data,
        "--method",
        "ridge",
        "--model",
        "mlp",
        "--out",
        tmp_path / "a.parcel",
        "-q",
        "--no-report",
    )
    images = []
    for place, image in enumerate(stripes(6, seed=5)[0]):
        images.append(tmp_path / f"{place}.png")
        Image.fromarray(image[:, :, 0]).save(images[-1])
    rows = json.loads(done("predict", tmp_path / "a.parcel", *images, "--json").out)
    assert [row["class"] for row in rows] == ["rows", "columns", "checks"] * 2
