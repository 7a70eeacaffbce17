"""Attacks: who is malicious, what each kind forges, and how a run, a study and a population carry it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from factories import call, one_line, result_of
from flyby.data.dataset import DataBundle
from flyby.data.site import Part, Site, site_of
from flyby.data.splits import Split
from flyby.engines.engine import Job
from flyby.errors import BadInput
from flyby.fusion.predictor import Predictor
from flyby.models import ModelSpec
from flyby.parcels import parcel
from flyby.runs.attacks import (
    AttackSettings,
    assault,
    boasting,
    forge,
    malicious,
    met,
    poisoned,
    remade,
    stamp,
    success,
)
from flyby.runs.config import make_config
from flyby.runs.pipeline import Options, run
from flyby.statistics.calibration import calibrate
from flyby.study.catalogue import Study
from flyby.study.grid import cells, read_rows, run_study
from flyby.study.tables import render

NAMES = [f"site-{i}" for i in range(10)]
QUICK: dict[str, Any] = {"engine": "inline", "device": "cpu", "quiet": True}
BRIEF: dict[str, Any] = {**QUICK, "keep": False}
SEND = "objective.send=[class-means,kfac,null-space]"


def config(*assignments: str, method: str = "ensemble", fusion: str | None = None) -> Any:
    shape = {"name": "dirichlet", "clients": 5, "alpha": 0.5, "val": 0.1}
    return make_config(
        method,
        fusion=fusion,
        data={"name": "digits"},
        split=shape,
        model="mlp",
        epochs=3,
        assignments=["locals=false", SEND, *assignments],
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An honest run, in ``honest``, whose uploads all others share, in ``store``."""
    folder = tmp_path_factory.mktemp("attacks")
    run(config(), folder / "honest", Options(store=folder / "store", **BRIEF))
    return folder


@pytest.fixture(scope="module")
def jobs(place: Path, digits: DataBundle) -> list[Job]:
    """The honest run's jobs again, as its uploads remember them."""
    from flyby.runs.config import plan
    from flyby.runs.folder import Run
    from flyby.runs.site import jobs_of

    split = Split.load(place / "honest" / "split.json")
    return jobs_of(plan(config(), digits), split, Run(place / "honest"), "cpu", place / "store")


@pytest.fixture(scope="module")
def split(place: Path) -> Split:
    return Split.load(place / "honest" / "split.json")


def attack(place: Path, name: str, *assignments: str, **changes: Any) -> dict[str, Any]:
    return run(config(*assignments, **changes), place / name, Options(store=place / "store", **BRIEF)).to_json()


# -- who


@given(st.floats(0, 0.9), st.floats(0, 0.9), st.integers(0, 5))
def test_fewer_attackers_are_some_of_the_more(a: float, b: float, seed: int) -> None:
    few, many = (malicious(NAMES, share, seed) for share in sorted((a, b)))
    assert set(few) <= set(many)
    assert many == sorted(many, key=NAMES.index)
    assert len(many) == round(max(a, b) * 10)


def test_spared_ones_come_last_and_somebody_stays_honest() -> None:
    assert len(malicious(NAMES, 0.2, 0)) == 2
    assert len({tuple(malicious(NAMES, 0.2, seed)) for seed in range(10)}) > 3
    assert set(malicious(NAMES, 0.7, 0, spared=NAMES[:3])) == set(NAMES[3:])
    assert set(malicious(NAMES, 0.8, 0, spared=NAMES[:3])) > set(NAMES[3:])
    with pytest.raises(BadInput, match=r"attack.share 0.96 leaves none of the 10 participants honest"):
        malicious(NAMES, 0.96, 0)


# -- what


def forged(
    kind: str, jobs: list[Job], digits: DataBundle, split: Split, **settings: Any
) -> tuple[parcel.Parcel, parcel.Parcel, Site]:
    """(honest, forged and read back as the server reads it, the site)."""
    job, honest = jobs[2], parcel.read(jobs[2].parcel_path)
    site = site_of(digits, split, job.site)
    made = forge(AttackSettings(kind=kind, **settings), job, honest, site)
    return honest, parcel.from_bytes(parcel.to_bytes(made)), site


@pytest.mark.parametrize("kind", ["random", "sign-flip", "scaled", "label-flip", "backdoor"])
def test_a_forged_parcel_is_a_valid_one_of_the_same_form(
    kind: str, jobs: list[Job], digits: DataBundle, split: Split
) -> None:
    honest, made, site = forged(kind, jobs, digits, split)
    for field in ("sender", "method", "spec", "class_names", "samples", "codec", "extras"):
        assert getattr(made.manifest, field) == getattr(honest.manifest, field)
    assert not all(torch.equal(made.weights[name], honest.weights[name]) for name in made.weights)
    assert any(name.startswith("kfac.") for name in made.extras)
    # What goes with the weights was measured on them, with the site's own images
    if kind in ("random", "sign-flip", "scaled"):
        assert torch.equal(made.extras["calibration"], calibrate(made.network(), site, 0)["calibration"])
        assert made.manifest.counts == honest.manifest.counts


def test_random_weights_are_as_long_as_the_honest_ones(jobs: list[Job], digits: DataBundle, split: Split) -> None:
    honest, made, _ = forged("random", jobs, digits, split)
    for name, value in honest.weights.items():
        assert made.weights[name].norm().item() == pytest.approx(value.norm().item(), rel=1e-4)
        assert abs(torch.cosine_similarity(made.weights[name].flatten(), value.flatten(), dim=0)) < 0.7


def test_weights_are_negated_or_scaled(jobs: list[Job], digits: DataBundle, split: Split) -> None:
    honest, made, _ = forged("sign-flip", jobs, digits, split)
    assert all(torch.equal(made.weights[name], -value) for name, value in honest.weights.items())
    honest, made, _ = forged("scaled", jobs, digits, split, factor=100)
    assert all(torch.equal(made.weights[name], 100 * value) for name, value in honest.weights.items())


def test_a_running_variance_keeps_its_sign() -> None:
    spec = ModelSpec(name="cnn-small", classes=3, channels=1, size=(8, 8), widths={"conv1": 2, "conv2": 2, "conv3": 2})
    honest = parcel.make(
        sender="a",
        method="supervised",
        spec=spec,
        class_names=("x", "y", "z"),
        weights=spec.build().state_dict(),
        samples=9,
        counts=[3, 3, 3],
    )
    part = Part(torch.zeros(9, 8, 8, 1, dtype=torch.uint8), torch.arange(9) % 3)
    recipe = {
        "spec": spec,
        "objective": "supervised",
        "objective_settings": {"calibrate": False},
        "train": {},
        "views": {},
        "seed": 0,
    }
    job = Job.model_validate(
        {"site": "a", "data": {}, "split": "x", "recipe": recipe, "device": "cpu", "folder": "x", "origin": "k"}
    )
    made = forge(AttackSettings(kind="sign-flip"), job, honest, Site("a", part, part, part, ("x", "y", "z")))
    for name, value in honest.weights.items():
        assert torch.equal(
            made.weights[name], value if name.endswith(("running_var", "num_batches_tracked")) else -value
        )


def test_claims_by_hand(jobs: list[Job], digits: DataBundle, split: Split) -> None:
    honest, made, _ = forged("counts-lie", jobs, digits, split)
    counts = honest.manifest.counts
    assert counts is not None
    assert made.manifest.counts == (100 * max(counts),) * 10
    assert made.manifest.samples == 1000 * max(counts)
    assert all(torch.equal(made.weights[name], value) for name, value in honest.weights.items())
    held = [c for c in range(10) if counts[c]]
    missing = [c for c in range(10) if not counts[c]]
    assert missing
    before, after = honest.extras["calibration"], made.extras["calibration"]
    assert torch.equal(after[:, held], before[:, held])
    best = torch.stack([before[0, held].max(), before[1, held].min(), before[2, held].min()])
    assert torch.equal(after[:, missing], best[:, None].expand(3, len(missing)))
    assert made.extras["class-means.classes"].tolist() == list(range(10))
    assert torch.equal(made.extras["class-means.means"][held], honest.extras["class-means.means"])
    _, loud, _ = forged("random", jobs, digits, split, boast=True)
    assert loud.manifest.counts == made.manifest.counts
    assert not torch.equal(loud.weights["head.bias"], made.weights["head.bias"])
    bare = remade(honest, extras={}, counts=None)
    assert boasting(bare).manifest.samples == 1000 * honest.manifest.samples


def dotted(labels: list[int]) -> Site:
    part = Part(torch.zeros(len(labels), 8, 8, 1, dtype=torch.uint8), torch.tensor(labels))
    return Site("a", part, part, part, tuple("0123456789"))


def test_poisoned_images_by_hand() -> None:
    site = dotted([0, 3, 9, 9])
    assert poisoned(site, AttackSettings(kind="label-flip"), 0).train.labels.tolist() == [9, 6, 0, 0]
    made = poisoned(site, AttackSettings(kind="backdoor", target=7, poison=0.5), 0).train
    carries = made.images.flatten(1).amax(1) == 255
    assert int(carries.sum()) == 2
    assert made.labels[carries].tolist() == [7, 7]
    assert torch.equal(made.labels[~carries], site.train.labels[~carries])
    patch = stamp(site.train.images)[0, :, :, 0]
    assert (int((patch == 255).sum()), bool((patch[6:, 6:] == 255).all())) == (4, True)  # a quarter of 8 each way
    assert int(site.train.images.max()) == 0  # the originals are not written on
    with pytest.raises(BadInput, match=r"attack\.target 10 is not one of the 10 classes"):
        poisoned(site, AttackSettings(kind="backdoor", target=10), 0)


def test_success_by_hand() -> None:
    class Gullible(Predictor):
        """Says 7 to images that carry the trigger and end in an even first pixel, else 1."""

        kind = "gullible"

        def forward(self, images: Tensor) -> Tensor:
            fooled = (images[:, 7, 7, 0] == 255) & (images[:, 0, 0, 0] % 2 == 0)
            return torch.nn.functional.one_hot(torch.where(fooled, 7, 1), 10).float()

    spec = ModelSpec(name="mlp", classes=10, channels=1, size=(8, 8))
    images = torch.zeros(5, 8, 8, 1, dtype=torch.uint8)
    images[:2, 0, 0] = 1
    part = Part(images, torch.tensor([0, 1, 2, 3, 7]))  # the 7 does not count: two of the other four are fooled
    settings = AttackSettings(kind="backdoor", target=7)
    assert success(Gullible([spec], tuple("0123456789")), part, settings) == 0.5
    assert success(Gullible([spec], tuple("0123456789")), Part(images[4:], part.labels[4:]), settings) is None


# -- runs


def test_a_run_under_attack_leaves_the_honest_uploads_alone(place: Path) -> None:
    honest = {path.name: path.read_bytes() for path in (place / "honest" / "parcels").glob("*.parcel")}
    result = attack(place, "scaled", "attack.kind=scaled", "attack.share=0.4", "attack.factor=100", fusion="fedavg")
    assert result["trained"] == 0
    assert len(result["malicious"]) == 2
    assert {path.name: path.read_bytes() for path in (place / "scaled" / "parcels").glob("*.parcel")} == honest
    sent = {c["sender"]: c["digest"] for c in json.loads((place / "scaled" / "ledger.json").read_text())["crossings"]}
    clean = {c["sender"]: c["digest"] for c in json.loads((place / "honest" / "ledger.json").read_text())["crossings"]}
    assert {name for name in sent if sent[name] != clean[name]} == set(result["malicious"])
    # A fact about the honest uploads, shared by all rules
    assert result["consistency"] == result_of(place / "honest")["consistency"]
    (folder,) = list((place / "store").glob("*/forged/*"))
    stamps = {path: path.stat().st_mtime_ns for path in folder.glob("*.parcel")}
    assert len(stamps) == 2
    attack(place, "scaled-one", "attack.kind=scaled", "attack.share=0.2", "attack.factor=100")
    # Made once, for all rules and shares
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*.parcel")} == stamps
    assert "malicious" not in result_of(place / "honest")


def test_a_backdoor_is_measured_beside_the_accuracy(place: Path) -> None:
    none = attack(place, "no-door", "attack.kind=backdoor", "attack.share=0")
    some = attack(place, "door", "attack.kind=backdoor", "attack.share=0.4", "attack.poison=0.8")
    assert none["accuracy"] == result_of(place / "honest")["accuracy"]
    assert "malicious" not in none
    assert some["attack_success"] > none["attack_success"] + 0.1
    assert "attack_success" not in result_of(place / "honest")


def test_nobody_attacks_unless_asked(place: Path, jobs: list[Job], digits: DataBundle, split: Split) -> None:
    paths = [job.parcel_path for job in jobs]
    assert assault(AttackSettings(share=0.4), jobs, paths, digits, split) == (paths, [])
    saved = json.loads((place / "honest" / "config.json").read_text())
    assert saved["attack"]["kind"] == "none"
    del saved["attack"], saved["admission"]  # as an older flyby wrote it
    (place / "honest" / "config.json").write_text(json.dumps(saved))
    again = run(config(), place / "honest", Options(store=place / "store", resume=True, **BRIEF)).to_json()
    assert again == result_of(place / "honest")


def test_what_is_wrong_is_said_in_one_line(tmp_path: Path) -> None:
    words = [
        "run",
        "--method",
        "fedavg",
        "--model",
        "mlp",
        "--epochs",
        "1",
        "--engine",
        "inline",
        "-q",
        "--out",
        tmp_path / "out",
    ]
    for setting, said in (
        ("attack.kind=randon", "attack.kind = 'randon' will not do"),
        ("attack.shares=0.2", "unknown attack setting 'shares'; did you mean 'share'"),
        ("attack.share=1.5", "attack.share = 1.5 will not do"),
        ("admission=strict", "run.admission = 'strict' will not do"),
        ("proxy=held-out", "no held-out images for the server; keep some back with --set split.val=0.1"),
    ):
        answer = call(*words, "--set", setting)
        assert answer.code == 2
        assert said in one_line(answer)


# -- the gate


def test_the_gate_refuses_huge_weights_and_says_whose_they_were(place: Path) -> None:
    open_door = attack(
        place,
        "open",
        "attack.kind=scaled",
        "attack.share=0.2",
        "attack.factor=10000",
        "attack.boast=true",
        fusion="fedavg",
    )
    gated = attack(
        place,
        "gated",
        "attack.kind=scaled",
        "attack.share=0.2",
        "attack.factor=10000",
        "attack.boast=true",
        "admission=default",
        fusion="fedavg",
    )
    assert open_door["uploads"] == 5
    assert gated["uploads"] == 4
    assert [(one["sender"], one["malicious"]) for one in gated["refused"]] == [(open_door["malicious"][0], True)]
    assert gated["refused"][0]["stage"] == "norm"


def test_held_out_images_let_the_gate_see_random_weights(place: Path) -> None:
    gated = attack(place, "clean", "attack.kind=random", "attack.share=0.4", "admission=validated")
    assert {one["sender"] for one in gated["refused"] if one["malicious"]} == set(gated["malicious"])


# -- studies


def small(**changes: Any) -> Study:
    words: dict[str, Any] = {
        "methods": ["ensemble"],
        "fusions": ["fedavg", "median"],
        "model": "mlp",
        "epochs": 1,
        "alphas": [0.5],
    }
    words |= {
        "attacks": ["none", "scaled:share=0.4,factor=100", "backdoor:share=0.4"],
        "admissions": ["none", "default"],
    }
    return Study(title="Small", settings=["locals=false"], **{**words, **changes})


def test_an_attack_is_one_more_axis() -> None:
    whole = list(cells(small()))
    assert len({cell.key for cell in whole}) == len(whole) == 12
    assert [(c.attack, c.admission, c.rule) for c in whole[:3]] == [
        ("none", "none", "fedavg"),
        ("none", "none", "median"),
        ("none", "default", "fedavg"),
    ]
    assert whole[-1].config.attack == AttackSettings(kind="backdoor", share=0.4)
    honest = list(cells(small(attacks=[], admissions=[])))
    assert [c.key for c in honest] == [c.key for c in whole[:2]]  # who is not attacked has the key it always had
    assert honest[0].former
    assert not whole[0].former
    with pytest.raises(BadInput, match="unknown attack setting 'shar'; did you mean 'share'"):
        list(cells(small(attacks=["random:shar=0.2"])))


def test_a_study_of_attacks_and_its_table(tmp_path: Path) -> None:
    assert run_study(small(), tmp_path / "results" / "small.jsonl", tmp_path / "work", **QUICK) == (12, 0)
    rows = read_rows(tmp_path / "results" / "small.jsonl")
    assert [row["trained"] for row in rows] == [5] + [0] * 11
    by = {(row["attack"], row["admission"], row["fusion"]): row for row in rows}
    assert by["backdoor:share=0.4", "none", "fedavg"]["malicious"] == 2
    assert 0 <= by["backdoor:share=0.4", "none", "fedavg"]["attack_success"] <= 1
    assert by["scaled:share=0.4,factor=100", "default", "median"]["refused_malicious"] == 2
    text = render(small(), tmp_path / "results" / "small.jsonl", [])
    assert "| clients' method | server rule | none, none | none, default | scaled:share=0.4,factor=100, none |" in text
    assert text.count("| ensemble | median |") == 3  # accuracies, successes, refusals
    assert "2 of 2, 0 honest" in text


# -- populations


def test_what_nodes_met_by_hand() -> None:
    facts = {
        "a": {"rounds": [{"log": ["refused b: no", "left out c: yes"]}, {"log": ["refused d: no"]}]},
        "x": {"rounds": [{"log": []}]},
    }
    found = met(facts, {"a": ["b", "c", "d"], "x": ["b"]}, ["b", "c"])
    assert found["malicious"] == ["b -> a", "c -> a", "b -> x"]
    assert [(one["sender"], one["malicious"]) for one in found["refused"]] == [("b", True), ("d", False)]
    assert met(facts, {"a": ["b"]}, []) == {}


def test_a_poisoned_neighbourhood(tmp_path: Path) -> None:
    """Six nodes, two of them judged and so honest; half of all send random weights, which the screen turns away."""
    words = [
        "split.min_size=60",
        "data.holdout=0",
        "orient.rounds=1",
        "orient.buffer=5",
        "orient.top=3",
        "orient.epochs=2",
        "orient.distill_epochs=2",
        "orient.distill_steps=0",
    ]
    words += ["orient.eval_nodes=[0,1]", "orient.diagnostics=false", "attack.kind=random", "attack.share=0.5"]
    shape = {"name": "fol", "clients": 6, "alpha": 5.0}
    chosen = make_config("fol-n", data={"name": "digits"}, split=shape, model="mlp", epochs=15, assignments=words)
    result = run(chosen, tmp_path / "fol", Options(**BRIEF)).to_json()
    assert set(result["per_client"]) == {"site-0", "site-1"}
    assert len(result["malicious"]) == 6
    assert {f"{one['sender']} -> {one['receiver']}" for one in result["refused"]} == set(result["malicious"])
    current = make_config(
        "fol-n",
        data={"name": "digits"},
        split=shape,
        model="mlp",
        epochs=1,
        assignments=[*words, "orient.sends=current"],
    )
    with pytest.raises(BadInput, match=r"orient\.sends=current"):
        run(current, tmp_path / "current", Options(**BRIEF))
