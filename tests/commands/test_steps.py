"""What a real site is told: how long it will take, what its model is worth, and what not to believe; and the pages."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import pytest

from factories import STRIPES, call, done, make_npz, make_stripes, one_line, stripes
from flyby.data.arrays import bundle_from
from flyby.data.site import whole_site
from flyby.fusion.predictor import load_predictor
from flyby.parcels import parcel
from flyby.runs import estimate as estimates
from flyby.runs import progress
from flyby.runs.config import RunConfig, make_config, plan
from flyby.runs.estimate import affordable, duration, estimate, seconds_per_image, small_network
from flyby.runs.quality import concerns

QUICK = ("--model", "mlp", "--epochs", 3, "--quiet")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sites that trained alike, a third with another seed, and the model of the first two."""
    folder = tmp_path_factory.mktemp("steps")
    make_stripes(folder / "a.npz")
    images, labels = stripes(200, seed=5)
    make_npz(folder / "b.npz", images=images, labels=labels, class_names=np.array(STRIPES))
    done("train", "--data", folder / "a.npz", "--out", folder / "a.parcel", *QUICK)
    done("train", "--data", folder / "b.npz", "--out", folder / "b.parcel", "--like", folder / "a.parcel", "-q")
    done("train", "--data", folder / "b.npz", "--out", folder / "c.parcel", "--seed", 7, *QUICK)
    done("fuse", folder / "a.parcel", folder / "b.parcel", "--out", folder / "global", "--no-export")
    return folder


# -- quality


def test_train_holds_images_out_and_says_what_the_model_is_worth(shelf: Path) -> None:
    answer = done("train", "--data", shelf / "a.npz", "--out", shelf / "again.parcel", *QUICK, "--json").json
    held = answer["held_out"]
    assert (answer["samples"], held["images"], sum(answer["counts"])) == (204, 36, 204), "0.15 of 240, by class"
    assert [sum(row) for row in held["confusion"]] == [12, 12, 12]
    assert held["interval"][0] < held["accuracy"] <= held["interval"][1]
    assert parcel.read_manifest(shelf / "again.parcel").meta["temperature"] == answer["temperature"]
    text = done("train", "--data", shelf / "a.npz", "--out", shelf / "again.parcel", *QUICK, "--force").out
    assert "on held-out images: accuracy" in text
    assert "<- taken for" in text
    assert "--like" in text
    whole = done("train", "--data", shelf / "a.npz", "--out", shelf / "all.parcel", *QUICK, "--holdout", 0, "--json")
    assert (whole.json["samples"], whole.json["held_out"], whole.json["temperature"]) == (240, None, None)
    assert "temperature" not in parcel.read_manifest(shelf / "all.parcel").meta


def test_a_parcel_is_not_written_over(shelf: Path) -> None:
    before = (shelf / "a.parcel").read_bytes()
    words = ("train", "--data", shelf / "a.npz", "--out", shelf / "a.parcel")
    assert "--force" in one_line(call(*words, *QUICK))
    assert (shelf / "a.parcel").read_bytes() == before
    done(*words, *QUICK, "--force")
    assert (shelf / "a.parcel").read_bytes() == before, "same data, seed and settings"


def test_private_training_sends_no_temperature(shelf: Path) -> None:
    words = ("--method", "ridge", "--dp-epsilon", 8, "--dp-delta", 1e-5, "--model", "mlp", "--quiet")
    answer = done("train", "--data", shelf / "a.npz", "--out", shelf / "dp.parcel", *words, "--json").json
    assert answer["held_out"]["images"] == 36
    assert "temperature" not in parcel.read_manifest(shelf / "dp.parcel").meta


def test_what_a_method_that_trains_nothing_does_not_hear_is_said(shelf: Path) -> None:
    words = ("train", "--data", shelf / "a.npz", "--out", shelf / "idle.parcel", "--model", "mlp", "--json")
    idle, network = done(*words, "--method", "ridge", "--epochs", 5, "--set", "train.lr=0.1").json["notes"]
    assert idle.startswith("ridge trains nothing, so train.epochs, train.lr have no effect")
    assert "mlp has learned nothing yet" in network
    assert "--backbone efficientnet-lite0" in network
    like = (
        "train",
        "--data",
        shelf / "b.npz",
        "--out",
        shelf / "like.parcel",
        "--like",
        shelf / "idle.parcel",
        "--json",
    )
    assert done(*like).json["notes"] == [], "the first site was told"
    assert done(*words, "--method", "fedavg", "--epochs", 1, "--force").json["notes"] == []


def test_few_images_and_one_class_are_said() -> None:
    images, labels = stripes(30)
    site = whole_site(bundle_from(images, labels, STRIPES), "me")
    assert "rows 10, columns 10, checks 10" in concerns(site)[0]
    one = whole_site(bundle_from(images[labels == 0], labels[labels == 0], STRIPES), "me")
    assert "of one class (rows)" in concerns(one)[0]
    many, of_many = stripes(120)
    assert concerns(whole_site(bundle_from(many, of_many, STRIPES), "me")) == []


# -- alike


def test_like_takes_all_that_decides_a_training(shelf: Path) -> None:
    a, b = (parcel.read_manifest(shelf / f"{name}.parcel") for name in "ab")
    assert (b.spec, b.class_names, b.method) == (a.spec, a.class_names, a.method)
    assert {k: v for k, v in b.provenance.items() if k != "versions"} == {
        k: v for k, v in a.provenance.items() if k != "versions"
    }
    words = ("train", "--data", shelf / "b.npz", "--out", shelf / "d.parcel", "-q")
    changed = ("--epochs", 1, "--set", "train.lr=0.01")
    done(*words, "--like", shelf / "a.parcel", *changed)
    told = parcel.read_manifest(shelf / "d.parcel").provenance["train"]
    assert isinstance(told, dict)
    assert (told["epochs"], told["lr"]) == (1, 0.01)


def test_like_takes_a_backbone_and_a_closed_model(shelf: Path) -> None:
    out, words = shelf / "r.parcel", ("--method", "ridge", "--backbone", shelf / "a.parcel", "--quiet")
    done("train", "--data", shelf / "a.npz", "--out", out, *words)
    done("fuse", out, "--out", shelf / "ridge", "--no-export")
    words = ("train", "--data", shelf / "b.npz", "--out", shelf / "s.parcel", "--like", shelf / "ridge", "-q")
    assert "with --backbone as well" in one_line(call(*words))
    assert "another than that of r" in one_line(call(*words, "--backbone", shelf / "c.parcel"))
    done(*words, "--backbone", shelf / "a.parcel")
    assert parcel.read_manifest(shelf / "s.parcel").spec == parcel.read_manifest(out).spec


def test_like_in_one_line(shelf: Path, tmp_path: Path) -> None:
    words = ("train", "--data", shelf / "b.npz", "--out", tmp_path / "x.parcel", "--like")
    for option, value in (("--model", "mlp"), ("--method", "aurora"), ("--seed", 1), ("--size", 8)):
        assert f"leave {option} out" in one_line(call(*words, shelf / "a.parcel", option, value))
    assert "there is no" in one_line(call(*words, tmp_path / "nobody.parcel"))
    assert "name one of their parcels" in one_line(call(*words, shelf / "global"))


# -- at the server


def test_temperatures_are_fused_and_applied_by_the_same_rule_only(shelf: Path, tmp_path: Path) -> None:
    a, b = (parcel.read_manifest(shelf / f"{name}.parcel") for name in "ab")
    ta, tb = (float(str(m.meta["temperature"])) for m in (a, b))
    expected = np.exp((a.samples * np.log(ta) + b.samples * np.log(tb)) / (a.samples + b.samples))
    assert load_predictor(shelf / "global").temperature == pytest.approx(expected, rel=1e-5)
    both = (shelf / "a.parcel", shelf / "b.parcel")
    done("fuse", *both, "--fusion", "ensemble", "--out", tmp_path / "e", "--no-export")
    assert load_predictor(tmp_path / "e").temperature == 1, "nobody measured it for an ensemble"


def test_weights_that_began_apart_are_not_averaged_in_silence(shelf: Path, tmp_path: Path) -> None:
    apart = (shelf / "a.parcel", shelf / "c.parcel")
    said = done("fuse", *apart, "--out", tmp_path / "m", "--no-export").err
    assert "a was trained with --seed 0 and c with --seed 7" in said
    assert "--like" in said
    assert "--seed" not in done("fuse", *apart, "--fusion", "ensemble", "--out", tmp_path / "e", "--no-export").err
    done("train", "--data", shelf / "b.npz", "--out", tmp_path / "d.parcel", "--epochs", 1, "-q")
    assert "--like" in one_line(call("fuse", apart[0], tmp_path / "d.parcel", "--out", tmp_path / "x")), "cnn-small"


def test_evaluate_says_all_figures_and_whether_the_images_are_known(shelf: Path) -> None:
    answer = done("evaluate", shelf / "global", "--data", shelf / "b.npz", "--json")
    facts = answer.json
    assert facts["trained_on"] == 170, "b learned from 170 of its 200"
    assert "trained on 170 of these 200 images" in answer.err
    assert facts["temperature"] == load_predictor(shelf / "global").temperature
    assert len(facts["reliability"]) == 15
    assert set(facts["classes"]["rows"]) == {"images", "sensitivity", "specificity", "precision", "auc", "interval"}
    assert facts["per_class"] == {name: one["sensitivity"] for name, one in facts["classes"].items()}
    assert sum(map(sum, facts["confusion"])) == facts["images"] == 200
    new = done("evaluate", shelf / "global", "--data", shelf / "a.npz")
    assert "note: the model was trained" not in new.err, "a test split"
    for word in ("95 % interval", "expected calibration error", "log-loss", "sensitivity", "specificity", "AUC"):
        assert word in new.out


def test_a_parcel_of_sums_is_judged_by_the_head_that_they_give(shelf: Path) -> None:
    """The network in it has learned nothing."""
    out = shelf / "sums.parcel"
    told = done("train", "--data", shelf / "a.npz", "--method", "ridge", "--model", "mlp", "--out", out, "-q", "--json")
    facts = done("evaluate", out, "--data", shelf / "a.npz", "--json", "--no-report").json
    assert facts["accuracy"] > 0.8
    assert facts["temperature"] == told.json["temperature"]


# -- pages


def test_each_step_writes_a_page_and_images_stay_at_the_site(shelf: Path, tmp_path: Path) -> None:
    done("evaluate", shelf / "global", "--data", shelf / "a.npz")
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    (inbox / "b.parcel").write_bytes((shelf / "b.parcel").read_bytes())
    quick = ("--set", "epochs=1", "--set", "distill_epochs=1", "--set", "distill_steps=0", "--method", "fol-n")
    told = done(
        *("orient", "--own", shelf / "a.parcel", "--received", inbox, "--data", shelf / "a.npz"),
        *("--out", tmp_path / "me", "--no-export", *quick),
    )
    assert "accuracy" in told.out
    assert "95 % interval" in told.out
    pages = {
        "train": shelf / "a.report.html",
        "fuse": shelf / "global" / "report.html",
        "evaluate": shelf / "global.evaluate.html",
        "orient": tmp_path / "me.report.html",
    }
    for step, path in pages.items():
        text = path.read_text()
        assert f"flyby {step}" in text
        assert "<script" not in text
        assert "How to do it again" in text
    assert not list((tmp_path / "me").glob("*.html")), "the model folder may be passed on"
    assert "data:image" not in pages["fuse"].read_text()
    done("fuse", shelf / "a.parcel", shelf / "b.parcel", "--out", shelf / "global", "--no-export")
    strange = make_npz(tmp_path / "odd.npz", images=stripes(9)[0], labels=np.arange(9) % 2, class_names=["<i>", "&"])
    done("train", "--data", strange, "--out", tmp_path / "odd.parcel", *QUICK, "--holdout", 0.3)
    text = (tmp_path / "odd.report.html").read_text()
    assert "<i>" not in text
    assert "&lt;i&gt;" in text
    assert "data:image/png;base64," in text or "every answer was right" in text


# -- time


def config_at(side: int, **words: object) -> tuple[RunConfig, object]:
    images = np.zeros((40, side, side, 3), dtype=np.uint8)
    bundle = bundle_from(images, np.arange(40) % 2, ("x", "y"))
    return make_config("fedavg", data={"name": "digits"}, **words), bundle  # type: ignore[arg-type]


def test_a_machine_without_a_gpu_takes_a_small_network_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(estimates, "seconds_per_image", lambda *_, **__: 0.1)
    for side, expected in ((16, None), (32, None), (64, "vgg-wildfire")):
        config, bundle = config_at(side)
        assert affordable(config, bundle, "cpu").model.name == expected
    monkeypatch.setattr(estimates, "seconds_per_image", lambda *_, **__: 1.0)  # 40 images, 20 epochs: 800 s
    config, bundle = config_at(32)
    with caplog.at_level(logging.WARNING, "flyby"):
        chosen = affordable(config, bundle, "cpu")
    assert chosen.model.name == "vgg-wildfire"
    assert plan(chosen, bundle).recipe.spec.width == 0.5
    assert "resnet18 would take about 13 minutes; --model resnet18 chooses it" in caplog.text
    assert "--backbone efficientnet-lite0" in caplog.text
    assert affordable(config, bundle, "cuda") is config
    for words in ({"model": "resnet18"}, {"assignments": ["model.width=0.25"]}):
        asked, bundle = config_at(64, **words)
        assert affordable(asked, bundle, "cpu") is asked
    assert small_network(100)["width"] == 0.25


def test_the_estimate_is_images_times_epochs_times_views(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "seconds_per_image", lambda *_, **__: 0.01)
    images, labels = stripes(60)
    bundle = bundle_from(images, labels, STRIPES)
    recipe = plan(make_config("fedavg", epochs=20), bundle).recipe
    found = estimate(recipe, 380, "cpu")
    assert found.seconds == pytest.approx(76)
    assert str(found).startswith("about 76 seconds: 20 epochs of 380 images at 8x8 with cnn-small on ")
    salt = plan(make_config("fafi", epochs=20), bundle).recipe
    assert estimate(salt, 380, "cpu").seconds == pytest.approx(76 * salt.views.views)
    closed = plan(make_config("ridge"), bundle).recipe
    assert estimate(closed, 380, "cpu").seconds == pytest.approx(3.8)
    assert "one look at 380 images" in str(estimate(closed, 380, "cpu"))
    assert [duration(s) for s in (0.2, 8, 89, 90, 720, 5400)] == [
        *("1 second", "8 seconds", "89 seconds", "2 minutes", "12 minutes", "1.5 hours"),
    ]


def test_steps_are_measured() -> None:
    recipe = plan(make_config("fedavg", model="mlp"), bundle_from(*stripes(20), STRIPES)).recipe
    assert 0 < seconds_per_image(recipe.spec, "cpu") < 1
    assert 0 < seconds_per_image(recipe.spec, "cpu", learns=False) < 1


def test_a_training_that_goes_on_counts_what_was_done_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(progress.time, "perf_counter", lambda: float(next(clock)))
    bar = progress.Progress("training", 6, 2)
    row = {"site": "a", "epoch": 5, "loss": 0.5, "samples_per_second": 10.0}
    with caplog.at_level(logging.INFO, "flyby"):
        for site, epoch in (("a", 5), ("a", 6), ("b", 5), ("b", 6)):
            bar.on_epoch({**row, "site": site, "epoch": epoch})
    told = [record.getMessage().rpartition("img/s, ")[2] for record in caplog.records]
    assert [line.partition("%")[0] for line in told] == ["42", "50", "92", "100"]
    assert told[-1] == "100%, about 0 s left"


def test_there_is_never_a_silent_minute(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(progress, "SILENT", 0.05)
    with caplog.at_level(logging.INFO, "flyby"), progress.Progress("training a", 4, 1, images=100) as bar:
        assert "looking at 100 images" in bar.standing()
        bar.on_batch(50)
        time.sleep(0.7)  # nothing ends, and still something is said
        assert "epoch 1/4" in caplog.text
        assert "12%" in caplog.text
        for _ in range(3):
            bar.on_batch(100)
        bar.on_batch(50)
        assert "trained, now measuring" in bar.standing()
    said = len(caplog.records)
    time.sleep(0.7)
    assert len(caplog.records) == said, "it ends with the work"
