"""Splits: who holds what. Properties of every rule, pinned hashes, and an error for every impossible wish."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flyby.data.dataset import DataBundle, Dataset
from flyby.data.site import site_of, whole_site
from flyby.data.splits import MAX_REDRAWS, SPLITS, Split, SplitSettings, hold_out, make_split
from flyby.errors import BadInput
from flyby.rng import legacy_numpy

NAMES = sorted(SPLITS)
DISJOINT = [name for name in NAMES if name != "dirichlet-overlap"]


def dataset(labels: Any, classes: int | None = None, groups: Any = None) -> Dataset:
    """Images of one pixel that hold their own number (modulo 256), so that a sample can be followed."""
    labels = np.asarray(labels, dtype=np.int64)
    names = tuple(f"class {c}" for c in range(classes or int(labels.max(initial=0)) + 1))
    images = (np.arange(len(labels)) % 256).astype(np.uint8).reshape(-1, 1, 1, 1)
    row = np.arange(len(labels))  # twenty tiles a row, about a kilometre apart
    places = np.column_stack([-73 + 0.014 * (row % 20), 45 + 0.009 * (row // 20)])
    groups = None if groups is None else tuple(groups)
    return Dataset(images, labels, names, digest=f"toy-{len(labels)}", groups=groups, places=places)


def balanced(samples: int, classes: int) -> Dataset:
    return dataset(np.arange(samples) % classes, classes, groups=[f"user-{i % 7}" for i in range(samples)])


def split_of(data: Dataset, seed: int = 0, **settings: Any) -> Split:
    return make_split(data, SplitSettings(**settings), seed)


def everything(split: Split) -> list[int]:
    return [int(i) for s in split.shares.values() for part in (s.train, s.val, s.test) for i in part]


def sizes(split: Split) -> list[int]:
    return [len(s.train) + len(s.val) + len(s.test) for s in split.shares.values()]


# -- what every split promises

labels_lists = st.integers(2, 6).flatmap(
    lambda classes: st.lists(st.integers(0, classes - 1), min_size=40, max_size=300).filter(
        lambda labels: len(set(labels)) > 1
    )
)


@pytest.mark.parametrize("name", NAMES)
@given(
    labels=labels_lists,
    clients=st.integers(1, 6),
    alpha=st.sampled_from([0.3, 1.0, 100.0]),
    seed=st.integers(0, 2**40),
    val=st.sampled_from([0.0, 0.1, 0.3]),
    test=st.sampled_from([0.0, 0.25]),
)
def test_every_split_keeps_its_promises(
    name: str, labels: list[int], clients: int, alpha: float, seed: int, val: float, test: float
) -> None:
    data = dataset(labels, groups=[f"user {i % clients}" for i in range(len(labels))])
    present = len(set(labels))
    each = max(2, -(-present // clients)) if name == "by-label" else 2
    if name == "by-label" and (each > present or min(np.bincount(labels)[np.unique(labels)]) < clients):
        return
    more = {"labels": each, "patches": 3, "val": val, "test": test}
    split = split_of(data, seed, name=name, clients=clients, alpha=alpha, min_size=1, **more)
    assert len(split.shares) == clients
    assert min(sizes(split)) >= 1
    for share in split.shares.values():
        parts = [share.train, share.val, share.test]
        assert all(part.dtype == np.int64 for part in parts)
        assert all(np.array_equal(part, np.unique(part)) for part in parts), "sorted, no index twice"
        assert len(set(np.concatenate(parts).tolist())) == sum(map(len, parts)), "the parts of a site are disjoint"
        assert len(share.train) > 0
    if name in DISJOINT:
        assert sorted(everything(split)) == list(range(len(labels))), "every sample belongs to exactly one site"
    assert split.counts == {
        site: np.bincount(data.labels[s.train], minlength=data.classes).tolist() for site, s in split.shares.items()
    }
    assert split_of(data, seed, **split.settings.model_dump(exclude={"seed"})).hash == split.hash


@pytest.mark.parametrize("name", ["dirichlet", "dirichlet-plain", "dirichlet-overlap", "fol"])
@given(seed=st.integers(0, 10_000), floor=st.integers(0, 40))
def test_min_size_holds(name: str, seed: int, floor: int) -> None:
    assert min(sizes(split_of(balanced(600, 5), seed, name=name, clients=4, alpha=0.5, min_size=floor))) >= floor


def test_default_min_sizes() -> None:
    data = balanced(600, 6)
    for seed in range(20):
        assert min(sizes(split_of(data, seed, name="dirichlet", clients=8, alpha=0.1))) >= 10
        assert min(sizes(split_of(data, seed, name="dirichlet-plain", clients=8, alpha=0.1))) >= 1
        assert min(sizes(split_of(data, seed, name="fol", clients=5, alpha=0.1))) >= 100


def test_a_site_keeps_its_parts_whatever_the_others_do() -> None:
    one = hold_out(np.arange(40), balanced(40, 4).labels, 0.25, 0.25, legacy_numpy(3, "site-1", "hold-out"))
    two = hold_out(np.arange(40), balanced(40, 4).labels, 0.25, 0.25, legacy_numpy(3, "site-2", "hold-out"))
    assert one.val.tolist() != two.val.tolist()


# -- hashes

# Pinned: a change here means that every published split changes. Numpy's RandomState streams are frozen (NEP 19); ours
# are too.
GOLDEN = {
    "by-column": "2c830d3e69ea08d3",
    "by-label": "fbd1a57cfa056be4",
    "by-place": "be7648099a19db31",
    "dirichlet": "a276e483cb6a70bd",
    "dirichlet-client": "3977feffd23d7db9",
    "dirichlet-overlap": "0a1a05a1de232aea",
    "dirichlet-plain": "3ced8026227dda22",
    "fol": "ae9e85c26c747a2e",
    "iid": "7b91cf44b0ea290f",
}


def golden(name: str, seed: int = 7) -> Split:
    return split_of(balanced(240, 6), seed, name=name, clients=4, alpha=0.5, min_size=10, labels=3, val=0.1, test=0.2)


@pytest.mark.parametrize("name", NAMES)
def test_hashes_are_pinned(name: str) -> None:
    assert golden(name).hash == GOLDEN[name]


def test_a_hand_readable_split_is_pinned() -> None:
    split = split_of(dataset([0, 1] * 5), 0, name="dirichlet-plain", clients=2, alpha=1.0)
    assert {site: share.train.tolist() for site, share in split.shares.items()} == {
        "site-0": [5],
        "site-1": [0, 1, 2, 3, 4, 6, 7, 8, 9],
    }


def test_another_process_makes_the_same_splits() -> None:
    code = "import json, test_splits as t; print(json.dumps({n: t.golden(n).hash for n in t.NAMES}))"
    env = {**os.environ, "PYTHONHASHSEED": "4242", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {name: golden(name).hash for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_other_seeds_give_other_splits(name: str) -> None:
    assert len({golden(name, seed).hash for seed in range(5)}) == 5, "by-column differs in what it holds out"


def test_the_hash_names_the_data_the_shares_and_the_copies() -> None:
    data = balanced(60, 3)
    plain = split_of(data, name="iid", clients=3)
    assert split_of(data, name="iid", clients=3, replicas=1).hash != plain.hash
    other = Dataset(data.images, data.labels, data.class_names, digest="other")
    assert split_of(other, name="iid", clients=3).hash != plain.hash
    assert split_of(data, 99, name="iid", clients=3).hash != plain.hash
    assert make_split(data, SplitSettings(name="iid", clients=3, seed=0), 99).hash == plain.hash, (
        "split.seed wins over the run's seed"
    )


# -- each rule


@given(
    labels=labels_lists,
    clients=st.integers(2, 8),
    alpha=st.sampled_from([1e-300, 0.01, 0.1, 1.0, 1e6]),
    seed=st.integers(0, 1000),
)
def test_dirichlet_gives_nothing_to_a_full_client(labels: list[int], clients: int, alpha: float, seed: int) -> None:
    data = dataset(labels)
    split = split_of(data, seed, name="dirichlet", clients=clients, alpha=alpha, min_size=0)
    cap = len(data) / clients
    for share in split.shares.values():
        # In class order, all that a client held before the last class it got must be under N/K.
        counts = data.counts(share.train)
        last = max((c for c, n in enumerate(counts) if n), default=0)
        assert sum(counts[:last]) < cap
        assert len(share.train) < cap + max(data.counts())


def test_dirichlet_balances_sizes_where_plain_does_not() -> None:
    data = balanced(5000, 10)
    spread = {
        name: np.mean([np.std(sizes(split_of(data, seed, name=name, clients=5, alpha=0.1))) for seed in range(10)])
        for name in ("dirichlet", "dirichlet-plain")
    }
    assert spread["dirichlet"] < 0.6 * spread["dirichlet-plain"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", [n for n in NAMES if n != "by-column"])
def test_a_class_without_samples_is_nobodys(name: str) -> None:
    data = dataset([0, 1] * 50, classes=4)  # two names at the end that no image has
    split = split_of(data, name=name, clients=2, min_size=1)
    assert all(counts[2:] == [0, 0] for counts in split.counts.values())
    assert sum(sizes(split_of(data, name=name, clients=1, min_size=1))) == 100


@pytest.mark.parametrize(("alpha", "few", "many"), [(0.05, 1.0, 1.8), (100.0, 9.9, 10.0)])
def test_small_alpha_means_few_classes_a_client(alpha: float, few: float, many: float) -> None:
    data = balanced(2000, 10)
    held = [
        np.count_nonzero(np.array(counts) > 0.9 * max(counts)) if alpha < 1 else np.count_nonzero(counts)
        for seed in range(10)
        for counts in split_of(data, seed, name="dirichlet-plain", clients=5, alpha=alpha).counts.values()
    ]
    assert few <= float(np.mean(held)) <= many


@pytest.mark.parametrize(("alpha", "total"), [(0.05, 77_000), (0.5, 173_000)])
def test_dirichlet_overlap_holds_as_much_as_the_released_code(alpha: float, total: int) -> None:
    data = balanced(50_000, 10)
    found = [sum(sizes(split_of(data, seed, name="dirichlet-overlap", clients=5, alpha=alpha))) for seed in range(20)]
    assert np.mean(found) == pytest.approx(total, rel=0.1)


def test_dirichlet_overlap_shares_samples_but_never_repeats_one_at_a_client() -> None:
    split = split_of(balanced(500, 5), name="dirichlet-overlap", clients=5, alpha=0.5)
    assert len(set(everything(split))) < len(everything(split))
    assert all(len(set(s.train.tolist())) == len(s.train) for s in split.shares.values())


@given(
    labels=labels_lists,
    clients=st.integers(1, 9),
    seed=st.integers(0, 1000),
    alpha=st.sampled_from([1e-300, 0.05, 1.0]),
)
def test_dirichlet_client_sizes_are_equal(labels: list[int], clients: int, seed: int, alpha: float) -> None:
    found = sizes(split_of(dataset(labels), seed, name="dirichlet-client", clients=clients, alpha=alpha))
    assert sum(found) == len(labels)
    assert max(found) - min(found) <= 1


def test_dirichlet_client_priors_are_skewed_for_small_alpha_only() -> None:
    data = balanced(5000, 10)

    def largest_share(alpha: float) -> float:
        splits = [split_of(data, seed, name="dirichlet-client", clients=5, alpha=alpha) for seed in range(5)]
        return float(np.mean([max(counts) / sum(counts) for s in splits for counts in s.counts.values()]))

    assert largest_share(0.05) > 0.35
    assert largest_share(100.0) < 0.15


@given(seed=st.integers(0, 1000), psi=st.sampled_from([0.05, 0.1, 0.5, 1e-300]))
def test_fol_repairs_and_divides_70_15_15(seed: int, psi: float) -> None:
    data = balanced(1500, 4)
    split = split_of(data, seed, name="fol", clients=10, alpha=psi)
    assert sorted(everything(split)) == list(range(1500))
    for share in split.shares.values():
        n = len(share.train) + len(share.val) + len(share.test)
        assert n >= 100
        for part, want in ((share.train, 0.7), (share.val, 0.15), (share.test, 0.15)):
            assert abs(len(part) - want * n) < 1.01


def test_fol_repairs_even_where_nothing_is_to_spare() -> None:
    assert sizes(split_of(balanced(400, 2), name="fol", clients=4, alpha=0.01)) == [100] * 4


def test_iid_is_even_in_every_class() -> None:
    split = split_of(balanced(103, 5), name="iid", clients=4)
    assert max(sizes(split)) - min(sizes(split)) <= 1
    for c in range(5):
        held = [counts[c] for counts in split.counts.values()]
        assert max(held) - min(held) <= 1


@given(classes=st.integers(2, 8), clients=st.integers(1, 12), each=st.integers(1, 8), seed=st.integers(0, 100))
def test_by_label_gives_exactly_that_many_labels(classes: int, clients: int, each: int, seed: int) -> None:
    data = balanced(classes * 15, classes)
    if each > classes or clients * each < classes:
        with pytest.raises(BadInput, match=r"labels each cannot hold|labels a client needs"):
            split_of(data, seed, name="by-label", clients=clients, labels=each)
        return
    split = split_of(data, seed, name="by-label", clients=clients, labels=each)
    assert all(np.count_nonzero(counts) == each for counts in split.counts.values())
    held = np.array(list(split.counts.values()))
    assert (held.sum(0) == 15).all(), "every class is covered, whole"
    holders = np.count_nonzero(held, axis=0)
    assert holders.max() - holders.min() <= 1
    for c in range(classes):
        pieces = held[held[:, c] > 0, c]
        assert pieces.max() - pieces.min() <= 1, "a class is divided evenly"


def test_by_column_follows_the_column() -> None:
    data = dataset([0, 1, 0, 1, 0], groups=["b", "a", "b", "c", "a"])
    split = split_of(data, name="by-column")
    assert {site: s.train.tolist() for site, s in split.shares.items()} == {"a": [1, 4], "b": [0, 2], "c": [3]}
    assert list(split_of(data, name="by-column", min_size=2).shares) == ["a", "b"]


def test_by_column_names_fit_files_and_parcels() -> None:
    from flyby.parcels.ledger import Crossing

    data = dataset([0, 1, 0, 1], groups=["St. Mary's / north", "../../etc", "Malmö", ""])
    split = split_of(data, name="by-column")
    assert set(split.shares) == {"St.-Mary-s---north", "-.-..-etc", "Malm-", "-"}
    for site in split.shares:
        Crossing(site, "server", 1, "d")  # the ledger takes the name
    with pytest.raises(BadInput, match="both be named 'a-b'"):
        split_of(dataset([0, 1], groups=["a b", "a/b"]), name="by-column")


# -- train, val and test of a site


@given(
    counts=st.lists(st.integers(0, 60), min_size=1, max_size=8).filter(lambda c: sum(c) > 0),
    val=st.sampled_from([0.0, 0.1, 0.15, 0.5]),
    test=st.sampled_from([0.0, 0.15, 0.3, 0.49]),
    seed=st.integers(0, 1000),
)
def test_hold_out_is_stratified_within_rounding(counts: list[int], val: float, test: float, seed: int) -> None:
    labels = np.repeat(np.arange(len(counts)), counts)
    share = hold_out(np.arange(len(labels)), labels, val, test, legacy_numpy(seed))
    assert sorted([*share.train, *share.val, *share.test]) == list(range(len(labels)))
    for c, n in enumerate(counts):
        kept, *held = (int((labels[part] == c).sum()) for part in (share.train, share.val, share.test))
        assert kept >= 1 or n == 0, "every class keeps something to train on"
        for got, want in zip(held, (val * n, test * n), strict=True):
            assert want - 2 < got <= want + 1, (c, n, got, want)


def test_hold_out_by_hand() -> None:
    # val of 10, 10, 10: 1.5 -> 2 (owes .5), 1.5 - .5 -> 1, 1.5 -> 2: five of thirty is the nearest to 4.5 that halves
    # round up to.
    labels = np.repeat([0, 1, 2], 10)
    share = hold_out(np.arange(30), labels, 0.15, 0.0, legacy_numpy(0))
    assert [int((labels[share.val] == c).sum()) for c in range(3)] == [2, 1, 2]
    assert len(share.test) == 0


def test_many_tiny_classes_do_not_empty_the_next_one() -> None:
    labels = np.array([*range(30), *[30] * 10])  # thirty classes of one image can hold nothing out
    share = hold_out(np.arange(40), labels, 0.15, 0.15, legacy_numpy(0))
    assert int((labels[share.train] == 30).sum()) >= 6
    assert set(labels[share.train]) == set(range(31))


def test_nothing_held_out_is_nothing_changed() -> None:
    share = hold_out(np.arange(5), np.array([0, 1, 0, 1, 0]), 0.0, 0.0, legacy_numpy(0))
    assert share.train.tolist() == [0, 1, 2, 3, 4]
    assert len(share.val) == len(share.test) == 0


def test_of_nothing_nothing_is_held_out() -> None:
    """Where min_size is 0 a site may be empty."""
    share = hold_out(np.arange(0), np.array([0, 1]), 0.2, 0.1, legacy_numpy(0))
    assert len(share.train) == len(share.val) == len(share.test) == 0


# -- sites and their copies


def stripes(count: int) -> Dataset:
    """Images of one grey level each, which no crop or flip changes (jitter may): sample i has level
    3 i, class i % 2."""
    images = np.repeat(np.arange(count, dtype=np.uint8) * 3, 64).reshape(count, 8, 8, 1)
    return Dataset(images, np.arange(count) % 2, ("even", "odd"), "stripes")


@pytest.mark.parametrize("copies", [0, 1, 3])
def test_replicas_are_of_training_images_only(copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from flyby.data import site as module

    monkeypatch.setattr(
        module, "REPLICA_VIEWS", module.REPLICA_VIEWS.model_copy(update={"jitter": (0.0, 0.0, 0.0, 0.0)})
    )
    data = stripes(60)
    split = split_of(data, name="iid", clients=3, val=0.2, test=0.2, replicas=copies)
    seen: dict[int, tuple[str, str]] = {}
    for name, share in split.shares.items():
        site = site_of(DataBundle("toy", data), split, name)
        for part, indices in (("train", share.train), ("val", share.val), ("test", share.test)):
            images, labels = getattr(site, part).images, getattr(site, part).labels
            assert images.dtype == torch.uint8
            assert images.shape == ((copies * (part == "train") + 1) * len(indices), 8, 8, 1)
            assert torch.equal(images[: len(indices)], torch.from_numpy(data.images[indices])), (
                "the originals come first"
            )
            samples = (images[:, 4, 4, 0].long() // 3).tolist()
            assert labels.tolist() == [s % 2 for s in samples], "a copy has its original's label"
            for sample in samples:
                assert seen.setdefault(sample, (name, part)) == (name, part), "a copy crossed into another part"
        assert site.counts == [(copies + 1) * n for n in split.counts[name]]
    assert len(seen) == 60


def test_replicas_are_changed_copies_and_the_same_ones_each_time() -> None:
    rng = np.random.RandomState(0)
    data = Dataset(rng.randint(0, 256, (20, 8, 8, 3)).astype(np.uint8), np.arange(20) % 2, ("a", "b"), "noise")
    split = split_of(data, name="iid", clients=2, replicas=2)
    first, again = (site_of(DataBundle("noise", data), split, "site-0").train.images for _ in range(2))
    assert torch.equal(first, again)
    original, one, two = first.chunk(3)
    assert not torch.equal(original, one)
    assert not torch.equal(one, two)


def test_replicas_do_not_mirror_what_must_not_be() -> None:
    ramp = np.broadcast_to(np.arange(0, 240, 30, dtype=np.uint8)[None, None, :, None], (40, 8, 8, 1))
    data = Dataset(np.array(ramp), np.arange(40) % 2, ("a", "b"), "ramp")
    split = split_of(data, name="iid", clients=1, replicas=1)
    for mirror, everywhere in ((False, True), (True, False)):
        copies = site_of(DataBundle("ramp", data, mirror=mirror), split, "site-0").train.images[40:].float()
        assert bool((copies[:, 0, 7, 0] > copies[:, 0, 0, 0]).all()) is everywhere


def test_a_whole_site_uses_the_validation_images_there_are() -> None:
    data, extra = balanced(40, 4), balanced(8, 4)
    assert len(whole_site(DataBundle("toy", data, validation=extra), "me", val=0.5).val) == 8
    held = whole_site(DataBundle("toy", data, test=extra), "me", val=0.25)
    assert (len(held.train), len(held.val), len(held.test)) == (30, 10, 8)
    bare = whole_site(DataBundle("toy", data), "me")
    assert (len(bare.train), len(bare.val), len(bare.test)) == (40, 0, 0)


# -- files


@pytest.mark.parametrize("name", NAMES)
def test_a_split_survives_its_file(tmp_path: Path, name: str) -> None:
    split = golden(name)
    split.save(tmp_path / "split.json")
    loaded = Split.load(tmp_path / "split.json")
    assert loaded.hash == split.hash
    assert loaded.to_json() == split.to_json()
    assert loaded.settings == split.settings
    for site, share in split.shares.items():
        for part in ("train", "val", "test"):
            found: npt.NDArray[np.int64] = getattr(loaded.shares[site], part)
            assert found.dtype == np.int64
            assert np.array_equal(found, getattr(share, part))


def move(raw: dict[str, Any]) -> None:
    raw["sites"]["site-0"]["test"].append(raw["sites"]["site-0"]["train"].pop())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (move, "changed after"),
        (lambda raw: raw.update(data="other"), "changed after"),
        (lambda raw: raw.update(seed=1), "changed after"),
        (lambda raw: raw["settings"].update(alpha=9.0), "changed after"),
        (lambda raw: raw["counts"].update({"site-0": [1, 2, 3, 4, 5, 6]}), "changed after"),
        (lambda raw: raw["class_names"].reverse(), "changed after"),
        (lambda raw: raw.pop("hash"), "changed after"),
        (lambda raw: raw.pop("seal"), "changed after"),
        (lambda raw: raw.pop("sites"), "not a split file"),
        (lambda raw: raw["sites"].update({"site-0": [1, 2]}), "not a split file"),
        (lambda raw: raw["settings"].update(colour="blue"), "not a split file"),
        (lambda raw: raw["sites"]["site-0"].update(train=["x"]), "not a split file"),
    ],
)
def test_a_changed_file_is_refused(tmp_path: Path, change: Any, says: str) -> None:
    raw = golden("dirichlet").to_json()
    change(raw)
    path = tmp_path / "split.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(BadInput, match=says) as caught:
        Split.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[1, 2", "[1, 2]", "null", "\x00"])
def test_a_file_that_is_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "split.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=r"not a split file|not readable"):
        Split.load(path)
    with pytest.raises(BadInput, match="does not exist"):
        Split.load(tmp_path / "nothing.json")


# -- errors


@pytest.mark.parametrize("name", ["dirichlet", "dirichlet-plain", "dirichlet-overlap", "dirichlet-client", "fol"])
@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_alpha_must_be_a_positive_number(name: str, alpha: float) -> None:
    with pytest.raises(BadInput, match="alpha must be above 0"):
        split_of(balanced(1000, 4), name=name, alpha=alpha)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"clients": 61}, "61 clients cannot share 60 samples"),
        ({"name": "iid", "clients": 61}, "61 clients cannot share 60 samples"),
        ({"name": "dirichlett"}, "unknown split 'dirichlett'; did you mean 'dirichlet'"),
        ({"name": "fol", "clients": 2}, "need 200, the data has 60"),
        ({"name": "by-label", "labels": 4}, "needs at least 4 classes, the data has 3"),
        ({"name": "by-label", "labels": 1, "clients": 2}, "cannot hold all 3 classes"),
        ({"name": "iid", "val": 0.5, "test": 0.5}, "leave nothing to train on"),
        ({"name": "iid", "val": 0.99, "test": 0.5}, "leave nothing to train on"),
        ({"name": "iid", "clients": 4, "min_size": 16}, "leaves site-0 15 samples, under min_size 16"),
        ({"name": "dirichlet-client", "clients": 7, "min_size": 9}, "8 samples, under min_size 9"),
        ({"name": "by-column", "min_size": 50}, "has 50 samples or more"),
    ],
)
def test_what_cannot_be_is_said(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput) as caught:
        split_of(balanced(60, 3), **settings)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["dirichlet", "dirichlet-plain", "dirichlet-overlap"])
def test_an_impossible_min_size_ends_and_names_what_to_change(name: str) -> None:
    with pytest.raises(BadInput) as caught:
        split_of(balanced(60, 3), name=name, clients=4, alpha=0.25, min_size=61)
    for part in (name, "alpha 0.25", "4 clients", "min_size 61", f"{MAX_REDRAWS} draws"):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_one_class_is_not_a_task(name: str) -> None:
    with pytest.raises(BadInput, match="one class only"):
        split_of(dataset([1] * 30, classes=3, groups=["a"] * 30), name=name, clients=2)


def test_by_column_needs_the_column() -> None:
    with pytest.raises(BadInput, match=r"data\.column"):
        split_of(dataset([0, 1] * 10), name="by-column")


@pytest.mark.parametrize(
    "settings",
    [{"clients": 0}, {"val": 1.0}, {"test": -0.1}, {"labels": 0}, {"replicas": -1}, {"min_size": -1}, {"what": 1}],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        SplitSettings(**settings)


# -- how a split shows itself


def small_split(val: float = 0.0) -> Split:
    data = Dataset(np.zeros((6, 1, 1, 1), np.uint8), np.array([0, 0, 0, 1, 1, 2]), ("<b>", "dog", "owl"), "toy")
    return split_of(data, name="iid", clients=2, val=val)


def test_rows_and_table_by_hand() -> None:
    split = small_split()
    (head, *rows, last), counts = split.rows(), split.counts
    assert head == ["site", "<b>", "dog", "owl", "total"]
    assert rows == [[name, *row, sum(row)] for name, row in counts.items()]
    assert last == ["all", 3, 2, 1, 6]
    lines = split.table().splitlines()
    assert lines[0].split() == ["site", "<b>", "dog", "owl", "total"]
    assert lines[-1].split() == ["all", "3", "2", "1", "6"]
    assert len({len(line) for line in lines}) == 1, "columns stand in line"
    assert lines[1].split()[1:-1] == [str(n or "·") for n in counts["site-0"]]


def test_parts_of_their_own_are_counted() -> None:
    head, *rows, last = split_of(balanced(200, 4), name="fol", clients=2, min_size=20).rows()
    assert head[-3:] == ["total", "val", "test"]
    assert sum(int(n) for n in last[-3:]) == 200
    assert all(row[-3] > row[-2] > 0 for row in rows)  # type: ignore[operator]


def test_a_split_is_one_short_line() -> None:
    split = split_of(balanced(200, 4), clients=5, alpha=0.5)
    assert repr(split) == str(split)
    assert repr(split) == (
        f"Split(dirichlet, alpha 0.5, seed 0: 5 sites hold 200 training images of 4 classes; {split.hash})"
    )
    assert "alpha" not in repr(small_split())


def test_a_notebook_shows_names_as_text() -> None:
    page = small_split()._repr_html_()
    assert "<b>" not in page
    assert "&lt;b&gt;" in page
    assert page.count("<tr>") == 4
    many = split_of(balanced(2500, 25), name="iid", clients=30)._repr_html_()
    assert "… 10 more" in many
    assert "<td>classes</td>" in many
    assert many.count("<tr>") == 1 + 20 + 1 + 1


def test_the_plot_is_a_figure_and_a_file(tmp_path: Path) -> None:
    split = split_of(balanced(200, 4), clients=5, alpha=0.5)
    drawn = split.plot(tmp_path / "split.svg")
    assert (tmp_path / "split.svg").read_text().count("site-") == 5
    assert [tick.get_text() for tick in drawn.axes[0].get_yticklabels()] == list(split.shares)
    assert drawn._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    with pytest.raises(BadInput, match=r"end its name with \.png"):
        split.plot(tmp_path / "split.xyz")
    with pytest.raises(BadInput, match="cannot write"):
        split.plot(tmp_path / "nowhere" / "split.png")


def test_a_site_knows_where_its_data_came_from() -> None:
    data = stripes(40)
    split = split_of(data, clients=2, name="iid")
    bundle = DataBundle("stripes", data)
    simulated, real = site_of(bundle, split, "site-0"), whole_site(bundle, "hospital")
    assert (simulated.origin, simulated.real) == (split.hash, False)
    assert (real.origin, real.real) == (data.digest, True)
    assert (real.to("cpu").origin, real.to("cpu").real) == (data.digest, True)
