"""``import flyby`` is the contract: lazy, quick, every name documented with an example that is run; and the README's
notebook word for word."""

from __future__ import annotations

import ast
import doctest
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flyby
from factories import make_images
from flyby.data.dataset import DataBundle
from flyby.data.federation import Sites
from flyby.errors import BadInput
from flyby.parcels import parcel

ROOT = Path(__file__).parents[1]
IMAGES = make_images(2, (8, 8), 1)
HERE = Path(flyby.__file__).parent


# -- the contract


def test_every_name_is_there_documented_and_typed() -> None:
    stub = {
        alias.asname
        for node in ast.walk(ast.parse((HERE / "__init__.pyi").read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert stub | {"__version__"} == set(flyby.__all__)
    for name in stub:
        value = getattr(flyby, str(name))
        assert value.__doc__, name
        assert value.__doc__.strip(), name
    assert set(flyby.__all__) <= set(dir(flyby))
    with pytest.raises(AttributeError, match="no attribute 'fues'"):
        flyby.fues  # type: ignore[attr-defined]  # noqa: B018


def test_importing_flyby_imports_nothing_heavy() -> None:
    code = "import sys, flyby; print([m for m in ('torch', 'numpy', 'pydantic', 'typer') if m in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "[]"


def test_a_function_and_a_room_of_one_name_do_not_hide_each_other() -> None:
    code = "import flyby; flyby.fuse; import flyby.runs.node; print(callable(flyby.orient), callable(flyby.run))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "True True"


def test_the_examples_of_the_docstrings_run(tmp_path: Path, digits: DataBundle) -> None:
    from flyby import api

    site = flyby.load("digits").split(clients=2, alpha=1.0)[0]
    made = flyby.train(site, "fedavg", epochs=1)
    flyby.write_parcel(made, tmp_path / "a.parcel")
    flyby.fuse([made]).save(tmp_path / "model")
    images = digits.train.images[:2]
    run = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    places = {"folder": tmp_path / "run", "model_folder": tmp_path / "model", "path": tmp_path / "a.parcel"}
    names = {"flyby": flyby, "images": images, **places}
    tried = set()
    for test in doctest.DocTestFinder(exclude_empty=True).find(api, "flyby.api", globs=names):
        run.run(test)
        tried |= {test.name.removeprefix("flyby.api.")} if test.examples else set()
    assert tried == {name for name, home in flyby._HOMES.items() if home == "api"}
    assert run.summarize(verbose=False).failed == 0


# -- the README's notebook


def notebook() -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    (found,) = [block for block in blocks if "flyby.load(" in block]
    return str(found)


def test_the_readme_s_notebook_runs_word_for_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(notebook(), "README.md", "exec"), names)
    assert names["model"].evaluate(names["data"].test).accuracy > 0.9
    assert names["result"].accuracy > 0.9
    assert json.loads((tmp_path / "runs" / "a" / "result.json").read_text())["schema_version"] == 1


# -- values that show themselves


@pytest.fixture(scope="module")
def sites() -> Sites:
    return flyby.load("digits").split(clients=3, alpha=0.5, seed=1, val=0.2)


@pytest.fixture(scope="module")
def parcels(sites: Sites) -> list[parcel.Parcel]:
    return [flyby.train(site, "fedavg", epochs=2) for site in sites]


def test_values_print_themselves(sites: Sites, parcels: list[parcel.Parcel], tmp_path: Path) -> None:
    model = flyby.fuse(parcels)
    judged = model.evaluate(flyby.load("digits"))
    assert repr(model) == "<Model single of 1 x cnn-small, 10 classes>"
    assert repr(judged) == f"accuracy {judged.accuracy:.4f} on 359 images"
    assert int(judged.confusion.sum()) == judged.images
    assert judged.accuracy == pytest.approx(np.trace(judged.confusion) / judged.images)
    assert "site-2" in sites.table()
    for value in (sites, sites.split, parcels[0], judged):
        assert "<table" in value._repr_html_()  # type: ignore[attr-defined]
        assert "<script" not in value._repr_html_()  # type: ignore[attr-defined]
    sites.plot(tmp_path / "split.svg")
    assert (tmp_path / "split.svg").read_text().count("<svg") == 1


def test_a_result_is_typed_and_has_rows(tmp_path: Path) -> None:
    result = flyby.run("fedavg", "digits", tmp_path / "run", clients=2, alpha=1.0, epochs=1)
    assert isinstance(result, flyby.Result)
    assert [row["client"] for row in result.rows()] == ["site-0", "site-1"]
    assert flyby.Run(tmp_path / "run").result() == result
    assert "<table" in result._repr_html_()
    again = flyby.run(
        "fedavg", "digits", tmp_path / "run", options=flyby.Options(resume=True), clients=2, alpha=1.0, epochs=1
    )
    assert again == result


# -- the same as the command line


def test_all_ways_to_train_give_the_same_bytes(sites: Sites, parcels: list[parcel.Parcel]) -> None:
    at_once = flyby.train_all(sites, "fedavg", engine="processes", epochs=2)
    assert [parcel.to_bytes(p) for p in at_once] == [parcel.to_bytes(p) for p in parcels]


@pytest.mark.parametrize(("method", "kind"), [("ensemble", "ensemble"), ("fedavg", "single"), ("best", "best")])
def test_parcels_are_fused_by_the_rule_of_their_method(sites: Sites, method: str, kind: str) -> None:
    """Though a run's methods share the uploads of one objective."""
    for made in (
        [flyby.train(site, method, epochs=1) for site in sites],
        flyby.train_all(sites, method, engine="inline", epochs=1),
    ):
        assert {one.manifest.method for one in made} == {method}
        assert flyby.fuse(made).predictor.kind == kind


def test_a_script_needs_no_guard_for_worker_processes(tmp_path: Path) -> None:
    lines = (
        "import flyby",
        "print('once')",
        "sites = flyby.load('digits').split(clients=2, alpha=1.0)",
        "print(len(flyby.train_all(sites, 'fedavg', epochs=1, engine='processes')), __file__ is not None)",
    )
    (tmp_path / "script.py").write_text("\n".join(lines))
    ended = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.returncode) == ("once\n2 True\n", 0), ended.stderr


def test_own_arrays_tensors_and_datasets_are_data() -> None:
    images, labels = make_images(40, (8, 8), 1), np.arange(40) % 2
    from_arrays = flyby.load(images, labels, class_names=["cat", "dog"])
    from_tensors = flyby.load(torch.from_numpy(images), torch.from_numpy(labels), class_names=["cat", "dog"])
    pairs = torch.utils.data.TensorDataset(torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(labels))
    from_dataset = flyby.load(pairs, class_names=["cat", "dog"])
    assert {len(d.train) for d in (from_arrays, from_tensors, from_dataset)} == {32}
    assert from_arrays.train.digest == from_tensors.train.digest == from_dataset.train.digest
    sites = from_arrays.split(clients=2, name="iid")
    made = flyby.train_all(sites, "ensemble", engine="inline", epochs=1)
    model = flyby.fuse(made, "ensemble")
    assert model.predict(images[:3]).shape == (3,)
    assert model.probabilities(torch.from_numpy(images[:3])).sum(1) == pytest.approx(1)


def test_a_model_saved_and_loaded_answers_the_same(parcels: list[parcel.Parcel], tmp_path: Path) -> None:
    model = flyby.fuse(parcels, "ensemble", settings={"mean": "logits"})
    model.save(tmp_path / "global")
    images = make_images(5, (8, 8), 1)
    assert torch.equal(flyby.load_model(tmp_path / "global").scores(images), model.scores(images))


def test_a_model_is_saved_in_place_of_nothing_but_a_model(parcels: list[parcel.Parcel], tmp_path: Path) -> None:
    model, images = flyby.fuse(parcels), tmp_path / "images"
    images.mkdir()
    (images / "cat.jpg").write_bytes(b"years of work")
    with pytest.raises(BadInput, match="something else than a model"):
        model.save(images)
    assert (images / "cat.jpg").read_bytes() == b"years of work"
    assert model.save(tmp_path / "global") == model.save(tmp_path / "global")


def test_parcels_go_through_files(parcels: list[parcel.Parcel], tmp_path: Path) -> None:
    flyby.write_parcel(parcels[0], tmp_path / "a.parcel")
    assert parcel.to_bytes(flyby.read_parcel(tmp_path / "a.parcel")) == parcel.to_bytes(parcels[0])
    assert repr(flyby.fuse([tmp_path / "a.parcel", parcels[1]])) == "<Model single of 1 x cnn-small, 10 classes>"


def test_a_node_personalises(sites: Sites, parcels: list[parcel.Parcel]) -> None:
    personal = flyby.orient(
        parcels[0], parcels[1:], sites[0], settings={"epochs": 1, "distill_epochs": 1, "distill_steps": 0}
    )
    assert personal.predict(sites[0].val.images).shape == (len(sites[0].val),)


def test_a_node_takes_paths_and_settings_take_numbers_of_numpy(
    sites: Sites, parcels: list[parcel.Parcel], tmp_path: Path
) -> None:
    flyby.write_parcel(parcels[1], tmp_path / "b.parcel")
    assert flyby.orient(parcels[0], [tmp_path / "b.parcel"], sites[0], "fol-n", settings={"epochs": 1})
    assert flyby.recipe_for(sites[0], "fedavg", settings={"train.lr": np.float32(0.5)}).train.lr == 0.5


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda s, p: flyby.train(s[0], "arora"), "did you mean 'aurora'"),
        (lambda s, p: flyby.train(s[0], epoch=3), "did you mean 'epochs'"),
        (lambda s, p: flyby.train(s[0], settings={"train.lrr": 1}), "did you mean 'lr'"),
        (lambda s, p: flyby.fuse(p, "expert"), "did you mean 'experts"),
        (lambda s, p: flyby.fuse([]), "no parcels"),
        (lambda s, p: flyby.run("fedavg", client=3), "did you mean 'clients'"),
        (lambda s, p: flyby.load("no-such-data"), "no-such-data"),
        (lambda s, p: flyby.load("digits").split(clients=0), "clients"),
        (lambda s, p: flyby.orient(p[0], p[1:], s[0], "foll"), "did you mean 'fol"),
        (lambda s, p: flyby.train(s), "one site, such as .* of type Sites"),
        (lambda s, p: flyby.train(s[0], None), "unknown method None"),
        (lambda s, p: flyby.train(s[0], settings=["train.lr=1"]), "settings are a dict"),
        (lambda s, p: flyby.orient(p[0], p[1:], s[0], settings=["top=1"]), "settings are a dict"),
        (lambda s, p: flyby.train(s[0], settings={"train.lr": object()}), "a setting is a number"),
        (lambda s, p: flyby.train_all(list(s)), "that data.split"),
        (lambda s, p: flyby.fuse(p[0]), "as a list"),
        (lambda s, p: flyby.fuse("a.parcel"), "as a list"),
        (lambda s, p: flyby.fuse([None]), "path of a .parcel"),
        (lambda s, p: flyby.orient(p[0], p[1], s[0]), "as a list"),
        (lambda s, p: flyby.orient(p[0], p[1:], s.data), "a node's images are a site"),
        (lambda s, p: flyby.fuse(p).predict("cat.jpg"), "an array or a tensor"),
        (lambda s, p: flyby.fuse(p).evaluate((s.data.test.images, s.data.test.labels)), "judged on data"),
        (lambda s, p: flyby.fuse(p).evaluate(s[0].val), "judged on data"),
        (lambda s, p: flyby.fuse(p).evaluate(None), "no test images"),
        (lambda s, p: flyby.run("fedavg", s.data), "run reads its data itself"),
        (lambda s, p: flyby.run(["fedavg"]), "run takes one method"),
        (lambda s, p: flyby.fuse(p, "feddf", proxy=s.data), "proxy images are a Dataset"),
        (lambda s, p: flyby.load(None), "None is no data"),
        (lambda s, p: flyby.load(IMAGES, [0, 1], size=8), "unknown word .* 'size'"),
        (lambda s, p: flyby.load(IMAGES, [0, 1], test=IMAGES), "a pair of images"),
        (lambda s, p: flyby.load(IMAGES, [0, 1], holdout="some"), "a share such as"),
        (lambda s, p: flyby.load(IMAGES, [0, 1], class_names="ab"), "a list with one name"),
        (lambda s, p: flyby.load(IMAGES, [0, -1]), "a label -1; number the classes from 0"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(
    sites: Sites, parcels: list[parcel.Parcel], wrong: Any, said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        wrong(sites, parcels)
