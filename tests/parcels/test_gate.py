"""The gate: every stage refuses what it is for, lets honest and very uneven sites in, and leaves a reason behind."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from factories import (
    STRIPES,
    call,
    done,
    make_stripes,
    one_line,
    random_parcel,
    renamed,
    small_spec,
    striped_site,
    train_site,
    trained,
)
from flyby.data.site import Part, Site, part_of
from flyby.data.sources import load
from flyby.data.splits import SplitSettings, make_split
from flyby.data.views import PLAIN
from flyby.errors import BadInput
from flyby.models import ModelSpec
from flyby.objectives.supervised import Supervised, SupervisedSettings
from flyby.parcels import parcel
from flyby.parcels.container import Truncated
from flyby.parcels.gate import Gate, Policy, Refused, open_gate
from flyby.parcels.ledger import Ledger
from flyby.parcels.parcel import Parcel
from flyby.parcels.plausible import Norms, judge, outliers
from flyby.training.settings import TrainSettings


@pytest.fixture(scope="module")
def honest() -> list[Parcel]:
    return [trained(striped_site(f"n{i}", seed=i + 1, count=48), epochs=4) for i in range(5)]


@pytest.fixture(scope="module")
def images() -> Part:
    site = striped_site("judge", seed=50, count=60)
    return site.train


def changed(item: Parcel, sender: str, factor: float = 1.0, only: str = "") -> Parcel:
    """The same model under another name, some of its weights multiplied."""
    weights = {n: t * factor if t.is_floating_point() and only in n else t for n, t in item.weights.items()}
    return renamed(dataclasses.replace(item, weights=weights), sender)


def settled(
    items: Sequence[Parcel | Path], validation: Part | None = None, **options: object
) -> tuple[list[str], dict[str | None, str]]:
    """(senders let in, sender -> stage of those that were not)."""
    gate = Gate(**options)  # type: ignore[arg-type]
    for item in items:
        gate.try_check(item)
    return [one.manifest.sender for one in gate.settle(validation)], {one.sender: one.stage for one in gate.refused}


# -- alone


def test_honest_parcels_come_in_and_are_counted_once(honest: list[Parcel], images: Part, tmp_path: Path) -> None:
    paths = [tmp_path / f"{item.manifest.sender}.parcel" for item in honest]
    sizes = [parcel.write(item, path) for item, path in zip(honest, paths, strict=True)]
    gate = Gate()
    for path, item in zip(paths, honest, strict=True):
        assert gate.check(path).manifest == item.manifest
    assert [one.source for one in gate.settle(images)] == paths
    assert gate.refused == []
    assert gate.ledger.bytes_up() == sum(sizes)
    assert gate.ledger.uploads() == 5
    assert gate.notes == [
        "5 of 5 parcels are not signed (n0, n1, n2, n3, n4), so anybody may have sent them; see docs/signing.md"
    ]
    gate.unchanged()
    paths[2].write_bytes(parcel.to_bytes(honest[1]))
    with pytest.raises(Refused, match=r"n2\.parcel was changed"):
        gate.unchanged()


def test_size_number_and_sum_have_limits(honest: list[Parcel]) -> None:
    size = honest[0].size
    assert settled(honest, policy=Policy(max_bytes=size - 1))[0] == []
    assert settled(honest, policy=Policy(max_bytes=size))[0] == ["n0", "n1", "n2", "n3", "n4"]
    assert settled(honest, policy=Policy(max_parcels=2)) == (["n0", "n1"], {"n2": "size", "n3": "size", "n4": "size"})
    assert settled(honest, policy=Policy(max_total=3 * size + size // 2))[0] == ["n0", "n1", "n2"]


def test_a_file_that_is_no_parcel_keeps_its_cause(honest: list[Parcel], tmp_path: Path) -> None:
    path = tmp_path / "torn.parcel"
    path.write_bytes(parcel.to_bytes(honest[0])[:-10])
    gate = Gate()
    with pytest.raises(Refused, match=r"torn\.parcel has") as caught:
        gate.check(path)
    assert isinstance(caught.value.__cause__, Truncated), "a watcher waits for the rest of it"
    assert caught.value.stage == "header"
    parcel.write(honest[0], path)
    assert gate.check(path).manifest.sender == "n0"
    assert gate.refused == [], "a file that is checked again is judged anew"
    gate.forget(path)
    assert gate.waiting == []
    for bad in (tmp_path / "none.parcel", tmp_path):
        with pytest.raises(Refused):
            gate.check(bad)


def test_one_parcel_a_sender_now_and_ever(honest: list[Parcel], tmp_path: Path) -> None:
    other = changed(honest[0], "n0", 1.01)
    assert settled([honest[0], other, honest[1]]) == (["n0", "n1"], {"n0": "replay"})
    assert settled([honest[0]], receiver="n0") == ([], {"n0": "replay"})
    paths = [tmp_path / f"{i}.parcel" for i in range(3)]
    for path, item in zip(paths, (honest[0], honest[1], other), strict=True):
        parcel.write(item, path)
    gate = Gate()
    gate.check(paths[0])
    gate.settle()
    assert settled(paths[:2], standing=gate.ledger) == (["n1"], {"n0": "replay"})
    assert settled([paths[2]], standing=gate.ledger) == ([], {"n0": "replay"})
    assert settled(paths[:2], earlier=gate.ledger)[0] == ["n0", "n1"], "a model may be made again of the same files"
    assert settled([paths[2]], earlier=gate.ledger) == ([], {"n0": "replay"})


def test_a_refused_sender_may_send_again(honest: list[Parcel], tmp_path: Path) -> None:
    path = tmp_path / "n0.parcel"
    path.write_bytes(parcel.to_bytes(honest[0])[:-1])
    gate = Gate()
    assert gate.try_check(path) is None
    assert gate.try_check(honest[0]) is not None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none(value: float, honest: list[Parcel]) -> None:
    weights = {n: t.clone() for n, t in honest[0].weights.items()}
    weights["head.weight"][0, 0] = value
    assert settled([dataclasses.replace(honest[0], weights=weights), honest[1]]) == (["n1"], {"n0": "content"})


def test_what_is_in_memory_is_held_to_its_manifest(honest: list[Parcel]) -> None:
    weights = {n: t + 1e-3 if t.is_floating_point() else t for n, t in honest[0].weights.items()}
    assert settled([dataclasses.replace(honest[0], weights=weights)]) == ([], {"n0": "content"})


def test_giant_norms_are_refused_even_alone(honest: list[Parcel]) -> None:
    assert settled([changed(honest[0], "n0", 1e9)]) == ([], {"n0": "norm"})
    giant = parcel.make(
        sender="x",
        method="supervised",
        spec=small_spec(),
        class_names=STRIPES,
        weights=honest[0].weights,
        samples=3,
        extras={"means": torch.full((4,), 1e6)},
    )
    assert settled([giant]) == ([], {"x": "norm"}), "extras too"


# -- together


def test_norms_are_compared_with_the_others(honest: list[Parcel]) -> None:
    scaled = changed(honest[4], "n4", 20.0)
    assert settled([*honest[:4], scaled]) == (["n0", "n1", "n2", "n3"], {"n4": "norm"})
    one_layer = changed(honest[4], "n4", 30.0, only="head.weight")
    assert settled([*honest[:4], one_layer])[1] == {"n4": "norm"}
    assert settled([*honest[:2], one_layer])[1] == {}, "two others are no crowd to be unlike"
    assert settled([*honest[:4], changed(honest[4], "n4", 2.0)])[1] == {}


def test_the_median_is_that_of_the_others() -> None:
    policy = Policy(total_factor=5.0)
    group = {name: Norms(total, {}) for name, total in {"a": 1.0, "b": 2.0, "c": 3.0, "d": 14.0}.items()}
    assert set(outliers(group, policy)) == {"d"}, "others 1, 2, 3: median 2, bound 10"
    assert outliers({**group, "d": Norms(10.0, {})}, policy) == {}
    assert set(outliers({**group, "e": Norms(14.0, {})}, policy)) == {
        "d",
        "e",
    }, "others 1, 2, 3, 14: median 2.5, bound 12.5"


@given(st.lists(st.floats(0.1, 10.0), min_size=4, max_size=12))
def test_within_a_factor_of_all_others_nobody_is_odd(totals: list[float]) -> None:
    found = outliers({str(i): Norms(total, {}) for i, total in enumerate(totals)}, Policy(total_factor=3.0))
    for i, total in enumerate(totals):
        bound = 3.0 * statistics.median(totals[:i] + totals[i + 1 :])
        assert (str(i) in found) == (total > bound)


def test_most_decide_what_fits(honest: list[Parcel]) -> None:
    others = [random_parcel("other-classes", names=("a", "b", "c")), random_parcel("other-size", small_spec(size=12))]
    assert settled([*others, *honest])[1] == {"other-size": "fit"}, "classes are matched by name"
    gate = Gate()
    for item in (*others, *honest[:2]):
        gate.check(item)
    assert [one.manifest.sender for one in gate.settle(like=others[1].manifest)] == ["other-size"], (
        "or the receiver does"
    )
    wide = random_parcel("wide", small_spec(width=0.5))
    gate = Gate()
    for item in (wide, *honest[:2]):
        gate.check(item)
    assert len(gate.settle(rule="fedavg")) == 2
    assert "fedavg needs one architecture, but wide sent" in gate.refused[0].reason


def test_a_copy_under_another_name_counts_once(honest: list[Parcel]) -> None:
    assert settled([*honest[:3], renamed(honest[1], "sybil")])[1] == {"sybil": "copy"}


def test_answers_must_be_finite_and_within_range(honest: list[Parcel]) -> None:
    loud = changed(honest[0], "n0", 1e3, only="head.weight")
    assert settled([loud, *honest[1:3]], policy=Policy(max_logit=50))[1] == {"n0": "answers"}


# -- what a model knows


def test_random_weights_and_flipped_labels_fail_where_there_are_labelled_images(
    honest: list[Parcel], images: Part
) -> None:
    flipped = trained(striped_site("flipped", seed=30, count=48, flip=True), epochs=4)
    bad = [random_parcel("random", seed=5), flipped]
    assert settled([*honest, *bad], images)[1] == {"random": "accuracy", "flipped": "accuracy"}
    assert settled([*honest, *bad])[1] == {}, "without such images nobody can tell"


def recall_case(
    right: Sequence[int], labels: Sequence[int], counts: Sequence[int] | None, **options: bool
) -> tuple[bool, float]:
    made = judge(torch.tensor(right, dtype=torch.bool), torch.tensor(labels), counts, 4, **options)
    return made.passes, made.recall


def test_recall_is_weighed_by_what_a_site_holds() -> None:
    labels = [0] * 10 + [1] * 10
    only_zero = [1] * 10 + [0] * 10
    assert recall_case(only_zero, labels, [99, 1, 0, 0]) == (True, pytest.approx(0.99))
    assert recall_case(only_zero, labels, [50, 50, 0, 0]) == (
        False,
        pytest.approx(0.5),
    ), "half right of two classes is chance"
    assert recall_case([0] * 20, labels, [99, 1, 0, 0]) == (False, 0.0)
    assert recall_case([1] * 20, labels, [50, 50, 0, 0]) == (True, 1.0)
    assert recall_case([0] * 7, [0] * 7, [9, 0, 0, 0])[0], "seven images judge nobody"
    assert recall_case(only_zero, labels, None)[0] is False
    assert recall_case(only_zero, labels, None, lenient=True)[0], "without counts it may be a site of one class"
    assert recall_case(only_zero, labels, [1, 1, 0, 0], lenient=True)[0], "held or not says nothing of how many"
    assert recall_case([0] * 20, labels, [5, 5, 90, 0])[0] is False
    assert recall_case([0] * 20, labels, [5, 5, 90, 0], lenient=True)[0], (
        "most of its images are of a class that is not shown"
    )


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_very_uneven_honest_sites_are_all_let_in(seed: int) -> None:
    """Ten sites of digits at alpha .05: most hold nearly one class only."""
    bundle = load("digits", holdout=0.2)
    assert bundle.test is not None
    split = make_split(bundle.train, SplitSettings(name="dirichlet", clients=10, alpha=0.05), seed)
    spec = ModelSpec(name="cnn-small", classes=10, channels=1, size=(8, 8), width=0.5)
    items, shares = [], []
    for name, share in split.shares.items():
        part = part_of(bundle.train, share.train)
        site = Site(
            name,
            part,
            Part(part.images[:0], part.labels[:0]),
            Part(part.images[:0], part.labels[:0]),
            bundle.train.class_names,
        )
        settings = TrainSettings(epochs=8, lr=0.05, batch=32, schedule="constant")
        items.append(
            train_site(site, spec, Supervised(SupervisedSettings(calibrate=False)), settings, PLAIN, seed).parcel
        )
        counts = items[-1].manifest.counts
        assert counts is not None
        shares.append(max(counts) / sum(counts))
    assert max(shares) > 0.85, "the split is as uneven as the test says"
    for validation in (None, part_of(bundle.test)):
        assert settled(items, validation)[1] == {}
    noisy = random_parcel("random", spec, counts=[12] * 10, names=bundle.train.class_names, seed=seed)
    assert settled([*items, noisy], part_of(bundle.test))[1] == {"random": "accuracy"}


def test_answers_outside_a_models_own_claims_are_remarked_on(honest: list[Parcel], images: Part) -> None:
    m = honest[4].manifest
    liar = parcel.make(
        sender="n4",
        method=m.method,
        spec=m.spec,
        class_names=m.class_names,
        weights=honest[4].weights,
        samples=48,
        counts=[48, 0, 0],
    )
    gate = Gate()
    for item in (*honest[:4], liar):
        gate.check(item)
    gate.settle(images)
    assert [one.manifest.sender for one in gate.waiting] == ["n0", "n1", "n2", "n3", "n4"], "a remark is no refusal"
    assert gate.notes[-1].startswith("n4 mostly answer with classes that they say they do not hold")


# -- the commands


@pytest.fixture
def inbox(honest: list[Parcel], tmp_path: Path) -> Path:
    folder = tmp_path / "inbox"
    for item in honest[:3]:
        parcel.write(item, folder / f"{item.manifest.sender}.parcel")
    parcel.write(random_parcel("random", seed=5), folder / "random.parcel")
    (folder / "torn.parcel").write_bytes(parcel.to_bytes(honest[3])[:-9])
    return folder


def test_fuse_stops_at_a_refused_parcel_unless_fewer_are_enough(inbox: Path, tmp_path: Path) -> None:
    data = make_stripes(tmp_path / "stripes.npz", 60, 9)
    files = sorted(inbox.iterdir())
    words = ("fuse", *files, "--fusion", "ensemble", "--out", tmp_path / "out", "--no-export")
    assert "torn.parcel has" in one_line(call(*words))
    message = one_line(call(*words, "--min-sites", 4, "--validation", data))
    assert message.startswith("3 parcels were let in, fewer than --min-sites 4, and 2 refused; the first: ")
    assert not (tmp_path / "out").exists()
    answer = done(*words, "--min-sites", 3, "--validation", data, "--json")
    assert answer.json["sites"] == 3
    assert {row["file"]: row["stage"] for row in answer.json["refused"]} == {
        "torn.parcel": "header",
        "random.parcel": "accuracy",
    }
    assert "note: refused random.parcel: " in answer.err
    assert "3 of 3 parcels are not signed (n0, n1, n2)" in answer.err
    assert sorted(files) == sorted(inbox.iterdir()), "nothing is moved unless that is asked for"
    assert json.loads((tmp_path / "out" / "ledger.json").read_text())["crossings"][0]["sender"] == "n0"


def test_refused_files_go_to_quarantine_with_the_reason(inbox: Path, tmp_path: Path) -> None:
    jail = tmp_path / "jail"
    words = ("fuse", *sorted(inbox.iterdir()), "--out", tmp_path / "out", "--no-export", "--quarantine", jail)
    one_line(call(*words))
    assert sorted(path.name for path in jail.iterdir()) == ["torn.parcel", "torn.parcel.reason.json"]
    reason = json.loads((jail / "torn.parcel.reason.json").read_text())
    assert (reason["file"], reason["stage"], reason["came_as"]) == ("torn.parcel", "header", str(inbox / "torn.parcel"))
    assert not (inbox / "torn.parcel").exists()
    (inbox / "torn.parcel").write_bytes(b"again")
    one_line(call(*words))
    assert (jail / "torn-2.parcel").read_bytes() == b"again", "an earlier prisoner is not overwritten"


def test_a_ledger_on_disk_refuses_replays(inbox: Path, tmp_path: Path) -> None:
    fuse = ("fuse", inbox / "n0.parcel", inbox / "n1.parcel", "--no-export", "--ledger", tmp_path / "ledger.json")
    done(*fuse, "--out", tmp_path / "one")
    assert "second crossing" in one_line(call(*fuse, "--out", tmp_path / "two"))
    assert not (tmp_path / "two").exists()
    done("fuse", inbox / "n2.parcel", "--no-export", "--ledger", tmp_path / "ledger.json", "--out", tmp_path / "three")
    assert [c.sender for c in Ledger.load(tmp_path / "ledger.json").crossings] == ["n0", "n1", "n2"]
    assert len(Ledger.load(tmp_path / "three" / "ledger.json").crossings) == 1, (
        "a model's own ledger says what went into it"
    )


def test_an_older_model_is_made_again_of_its_own_files_only(honest: list[Parcel], inbox: Path, tmp_path: Path) -> None:
    fuse = ("fuse", inbox / "n0.parcel", inbox / "n1.parcel", "--no-export", "--out", tmp_path / "out")
    done(*fuse)
    done(*fuse, "--fusion", "ensemble")
    parcel.write(changed(honest[0], "n0", 1.1), inbox / "n0.parcel")
    assert "each model crosses once" in one_line(call(*fuse))


def test_the_same_file_twice_and_foreign_validation_images_are_one_line(inbox: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "out", "--no-export")
    assert "named twice" in one_line(call("fuse", inbox / "n0.parcel", inbox / "n0.parcel", *out))
    assert "classes that no parcel knows" in one_line(call("fuse", inbox / "n0.parcel", *out, "--validation", "digits"))
    assert "more than the 10 allowed" in one_line(call("fuse", inbox / "n0.parcel", *out, "--max-bytes", 10))
    assert "--max-parcels" in one_line(call("fuse", inbox / "n0.parcel", inbox / "n1.parcel", *out, "--max-parcels", 1))
    assert not (tmp_path / "out").exists()
    with pytest.raises(BadInput, match=r"admission\.max_bytes"):
        open_gate("server", tmp_path, max_bytes=-1)


def test_orient_goes_through_the_same_gate(inbox: Path, tmp_path: Path) -> None:
    data = make_stripes(tmp_path / "stripes.npz", 60, 9)
    parcel.write(trained(striped_site("me", seed=9, count=48), epochs=3), tmp_path / "me.parcel")
    words = (
        "orient",
        "--own",
        tmp_path / "me.parcel",
        "--received",
        inbox,
        "--data",
        data,
        "--method",
        "fol-n",
        "--set",
        "epochs=1",
        "--no-export",
        "--device",
        "cpu",
    )
    done("keys", "new", "n0", "--out", tmp_path)
    done("keys", "trust", tmp_path / "trust.json", tmp_path / "n0.pub")
    strict = ("--trust", tmp_path / "trust.json", "--require-signed")
    facts = done(*words, "--out", tmp_path / "none", *strict, "--json").json
    assert (facts["used"], facts["received"]) == (0, 5)
    assert {row["stage"] for row in facts["refused"]} == {"signature", "header"}
    done("sign", inbox / "n0.parcel", "--key", tmp_path / "n0.key")
    facts = done(
        *words,
        "--out",
        tmp_path / "one",
        *strict,
        "--ledger",
        tmp_path / "ledger.json",
        "--quarantine",
        tmp_path / "jail",
        "--json",
    ).json
    assert facts["used"] == 1
    assert sorted(path.name for path in inbox.iterdir()) == ["n0.parcel"]
    facts = done(*words, "--out", tmp_path / "two", *strict, "--ledger", tmp_path / "ledger.json", "--json").json
    assert [row["stage"] for row in facts["refused"]] == ["replay"]
