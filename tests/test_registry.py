"""Registries: names with suggestions, and what installed packages bring under entry points."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from factories import random_parcel, striped_site
from flyby.data.sources import SOURCES, catalogue, load
from flyby.errors import BadInput
from flyby.fusion import FUSIONS
from flyby.fusion.predictor import PREDICTORS
from flyby.meeting import VARIANTS, orient
from flyby.meeting.pipeline import STAGES
from flyby.models import ARCHITECTURES, HEADS, ModelSpec
from flyby.objectives import OBJECTIVES
from flyby.registry import Registry
from flyby.runs import methods
from flyby.runs.methods import METHODS, rule_for

Install = Callable[..., None]
GROUP = "flyby.tests"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a package with entry points on the path, as pip would; its module is gone from this process afterwards."""
    modules: list[str] = []

    def put(package: str, code: str, **groups: dict[str, str]) -> None:
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [
            f"[{group.replace('_', '.')}]\n" + "".join(f"{k} = {v}\n" for k, v in g.items())
            for group, g in groups.items()
        ]
        (info / "entry_points.txt").write_text("\n".join(lines))
        module = package.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(code)
        modules.append(module)

    monkeypatch.syspath_prepend(tmp_path)
    yield put
    for module in modules:
        sys.modules.pop(module, None)


@pytest.fixture
def fresh() -> Iterator[None]:
    """The registries of flyby, as if it had just been imported, before and after."""
    every: tuple[Registry[Any], ...] = (
        OBJECTIVES,
        FUSIONS,
        PREDICTORS,
        ARCHITECTURES,
        SOURCES,
        STAGES,
        VARIANTS,
        METHODS,
    )

    def forget() -> None:
        for registry in every:
            vars(registry).pop("offered", None)
            registry._loaded.clear()

    forget()
    yield
    forget()


def numbers(group: str = "") -> Registry[int]:
    return Registry("number", {"one": 1, "two": 2}, group)


def test_a_registry_is_a_mapping_whose_unknown_names_are_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = numbers()
    assert (list(registry), len(registry), dict(registry)) == (["one", "two"], 2, {"one": 1, "two": 2})
    assert "one" in registry
    assert "three" not in registry
    assert 1 not in registry
    assert (registry["two"], registry.get("two"), registry.get("three"), registry.get("three", 3)) == (2, 2, None, 3)
    with pytest.raises(BadInput, match=r"^unknown number 'oen'; did you mean 'one'\?$"):
        registry["oen"]
    with monkeypatch.context() as patch:
        patch.setitem(registry, "three", 3)  # type: ignore[arg-type]
        patch.setitem(registry, "one", -1)  # type: ignore[arg-type]
        assert list(registry.items()) == [("one", -1), ("two", 2), ("three", 3)]
    assert dict(registry) == {"one": 1, "two": 2}


def test_a_package_is_imported_only_when_its_name_or_the_list_is_asked_for(install: Install) -> None:
    install("my-plug", "three = 3", flyby_tests={"three": "my_plug:three"})
    registry = numbers(GROUP)
    assert (registry["one"], "two" in registry, "three" in registry) == (1, True, True)
    with pytest.raises(BadInput, match="did you mean 'three'"):
        registry["thre"]
    assert "my_plug" not in sys.modules
    assert registry["three"] == 3
    assert list(registry.items()) == [("one", 1), ("two", 2), ("three", 3)]
    assert registry.built_in == {"one": 1, "two": 2}
    assert list(numbers(GROUP)) == ["one", "two", "three"]


def test_a_package_that_does_not_work_is_named_and_the_list_goes_on(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("broken-plug", "raise OSError('no\\nluck')", flyby_tests={"three": "broken_plug:three"})
    install("empty-plug", "", flyby_tests={"four": "empty_plug:four"})
    registry = numbers(GROUP)
    expected = "the number 'three' of the package broken-plug cannot be loaded (OSError: no luck); mend or uninstall"
    with pytest.raises(BadInput) as error:
        registry["three"]
    assert str(error.value).startswith(expected)
    with pytest.raises(BadInput, match=r"'four' of the package empty-plug cannot be loaded \(AttributeError"):
        registry["four"]
    with caplog.at_level(logging.WARNING):
        assert list(registry.values()) == [1, 2]
    assert expected in caplog.text
    assert "empty-plug" in caplog.text


def test_a_package_replaces_nothing(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install("greedy-plug", "one = three = -1", flyby_tests={"one": "greedy_plug:one", "three": "greedy_plug:three"})
    install("other-plug", "three = 3", flyby_tests={"three": "other_plug:three"})
    registry = numbers(GROUP)
    with caplog.at_level(logging.WARNING):
        assert dict(registry) == {"one": 1, "two": 2, "three": -1}
    assert "the number 'one' of greedy-plug is not used: flyby has that name" in caplog.text
    assert "the number 'three' of other-plug is not used: greedy-plug has that name" in caplog.text


def test_what_says_its_name_must_be_offered_under_it(install: Install) -> None:
    install("odd-plug", "class three: name = 'four'", flyby_tests={"three": "odd_plug:three"})
    with pytest.raises(BadInput, match="'three' of the package odd-plug calls itself 'four'"):
        numbers(GROUP)["three"]


PLUG = '''
import numpy as np
from torch import nn

from flyby.data.cache import Contents, SourceSplit
from flyby.data.sources import Source
from flyby.fusion import Fusion
from flyby.fusion.predictor import Single
from flyby.models.networks import Architecture
from flyby.objectives import Supervised
from flyby.meeting.settings import Variant
from flyby.runs.methods import Method


class Other(Supervised):
    name = "other"


class First(Fusion):
    name = "first"

    def combine(self, parcels, server):
        sent = next(iter(parcels))
        return Alone([sent.manifest.spec], parcels.class_names, [sent.network()])


class Alone(Single):
    kind = "alone"


def build(shape, widths):
    pixels = shape.channels * shape.size[0] * shape.size[1]
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, widths["only"])), widths["only"]


def noise(size, column):
    """three classes of nothing"""
    images, labels = np.zeros((6, 4, 4, 1), np.uint8), np.arange(6) % 3
    part = SourceSplit("train", labels, lambda: iter([list(images)]), str)
    return Source({}, {"kind": "noise"}, lambda: Contents([part], ["a", "b", "c"]), size)


def shout(work):
    work.log.append("heard " + ", ".join(c.sender for c in work.peers))


LINEAR = Architecture(build, {"only": 5})
LISTEN = Variant("hears of its neighbours", ("admit", "company", "shout"))
MINE = Method("mine", "other", "first", "mine alone")
MEET = Method("meet", "supervised", None, "only meets", orient="listen")
LOST = Method("lost", "nowhere", "first", "its objective is not installed")
'''


@pytest.fixture
def plug(install: Install, fresh: None) -> None:
    install(
        "all-plug",
        PLUG,
        flyby_objectives={"other": "all_plug:Other"},
        flyby_fusions={"first": "all_plug:First"},
        flyby_predictors={"alone": "all_plug:Alone"},
        flyby_models={"linear": "all_plug:LINEAR"},
        flyby_data={"noise": "all_plug:noise"},
        flyby_stages={"shout": "all_plug:shout"},
        flyby_variants={"listen": "all_plug:LISTEN"},
        flyby_methods={"mine": "all_plug:MINE", "meet": "all_plug:MEET", "lost": "all_plug:LOST"},
    )


def test_every_seam_takes_a_package(plug: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = ModelSpec(name="linear", classes=3, channels=1, size=(4, 4), width=2.0)
    assert spec.shapes()["head.weight"][0] == (3, 10)
    with pytest.raises(BadInput, match="unknown width of linear 'onyl'; did you mean 'only'"):
        spec.replace(widths={"onyl": 3})
    data = load("noise", cache=tmp_path / "cache")
    assert (len(data.train), data.train.class_names) == (6, ("a", "b", "c"))
    assert {"name": "noise", "form": "noise", "note": "three classes of nothing"} in catalogue()
    assert rule_for(["mine", "other"]) == "first"
    with caplog.at_level(logging.WARNING):
        rows = {row["method"]: row for row in methods.catalogue()}
    assert (rows["mine"]["objective"], rows["meet"]["exchanges"]) == ("other", "one model per meeting")
    assert "lost" not in rows
    assert "the method 'lost': unknown objective 'nowhere'" in caplog.text


def test_a_predictor_of_a_package_is_saved_and_loaded(plug: None, tmp_path: Path) -> None:
    from flyby.fusion import Inbox, load_predictor, save_predictor

    sites = [striped_site(f"n{i}", seed=i + 1, count=24) for i in range(2)]
    parcels = [random_parcel(site.id, seed=i) for i, site in enumerate(sites)]
    model = FUSIONS["first"]().fuse(Inbox(parcels))
    same = load_predictor(save_predictor(model, tmp_path / "model", export=False))
    assert same.kind == "alone"
    assert torch.equal(same(sites[0].val.images), model(sites[0].val.images))
    made = orient(parcels[0], parcels[1:], sites[0], variant="listen")
    assert made.log == ["heard n1"]
    assert list(made.facts["seconds"]) == ["admit", "company", "shout"]


def test_a_registry_is_light() -> None:
    code = "import sys, flyby.registry; print([m for m in ('torch', 'numpy', 'pydantic') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_built_in_things_are_looked_up_by_the_names_they_give_themselves() -> None:
    for registry in (OBJECTIVES, FUSIONS, METHODS):
        assert all(value.name == name for name, value in registry.items())
    assert all(value.kind == name for name, value in PREDICTORS.items())
    with pytest.raises(BadInput, match="unknown head 'linaer'; did you mean 'linear'"):
        HEADS["linaer"]


# -- what the methods make of the registries


def test_the_variants_of_fol_are_one_list() -> None:
    assert {m.orient for m in METHODS.values() if m.orient} == set(VARIANTS)
    assert all(METHODS[name].orient == name for name in VARIANTS)
    assert {stage for variant in VARIANTS.values() for stage in variant.stages} == set(STAGES)
    assert [name for name, variant in VARIANTS.items() if not variant.chooses] == ["gossip"]


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["fafi"], "experts-calibrated"),
        (["aurora", "aurora-no-decouple"], "experts-calibrated"),
        (["supervised", "fedavg"], "fedavg"),
        (["salt", "fafi"], "experts-calibrated"),
        (["dense"], "dense"),
        (["etf"], "fedavg"),
        (["cvae"], "fedcvae"),
    ],
)
def test_parcels_are_fused_by_the_rule_of_their_method_or_objective(words: list[str], rule: str) -> None:
    assert rule_for(words) == rule


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["fafi", "supervised"],
            r"\(experts-calibrated for 'fafi', fedavg for 'supervised'\); choose one with --fusion",
        ),
        (["fedavg", "mystery"], "name 'mystery', for which there is no server rule; choose one with --fusion"),
        (["local"], "name 'local'"),
        (["fol-n"], "name 'fol-n'"),
    ],
)
def test_parcels_without_one_rule_ask_for_it(words: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        rule_for(words)
