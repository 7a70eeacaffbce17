"""Robust rules: medians, trimmed and clipped means, capped and validated counts, by hand; and what they are for, end to
end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from factories import train_site
from flyby.data.dataset import DataBundle, Dataset
from flyby.data.site import part_of, site_of
from flyby.data.splits import SplitSettings, make_split
from flyby.data.views import PLAIN
from flyby.errors import BadInput
from flyby.fusion import FUSIONS, Inbox, load_predictor, save_predictor
from flyby.fusion.base import Server
from flyby.fusion.ensembles.experts import ExpertsSettings, capped, expert_votes, f1_scores
from flyby.fusion.evaluation import accuracy, scores_of
from flyby.fusion.predictor import Single
from flyby.fusion.robust import EnsembleTrimmedSettings, RobustEnsemble, TrimSettings, coordinatewise, middle
from flyby.models import ModelSpec
from flyby.objectives.supervised import Supervised, SupervisedSettings
from flyby.parcels import parcel
from flyby.parcels.parcel import Parcel
from flyby.rng import generator
from flyby.runs.attacks import boasting, drawn_anew, remade
from flyby.runs.methods import METHODS
from flyby.training.settings import TrainSettings

CNN = ModelSpec(name="cnn-small", classes=3, channels=1, size=(8, 8), widths={"conv1": 4, "conv2": 5, "conv3": 6})
MLP = ModelSpec(name="mlp", classes=3, channels=1, size=(8, 8), widths={"fc1": 6, "fc2": 4})
NAMES = ("ant", "bee", "cat")


def made(sender: str, spec: ModelSpec = CNN, seed: int = 0, **changes: Any) -> Parcel:
    words: dict[str, Any] = {
        "weights": spec.build(generator(seed, "weights")).state_dict(),
        "samples": 30,
        "counts": [10, 10, 10],
    }
    return parcel.make(sender=sender, method="supervised", spec=spec, class_names=NAMES, **words | changes)


def constants(*values: float) -> Inbox:
    """Clients all of whose weights are one number; the counters count 1, 2, 3 ..."""
    return Inbox(
        made(
            f"site-{k}",
            weights={
                n: torch.full(shape, v if d.is_floating_point else k + 1, dtype=d)
                for n, (shape, d) in CNN.shapes().items()
            },
        )
        for k, v in enumerate(values)
    )


def weights_of(rule: str, inbox: Inbox, settings: Any = None) -> dict[str, Tensor]:
    fused = FUSIONS[rule](settings).fuse(inbox)
    assert isinstance(fused, Single)
    return fused.networks[0].state_dict()


# -- weights


@pytest.mark.parametrize(
    ("values", "trim", "answer"),
    [
        ([5.0, -100.0, 6.0], 0.5, 5.0),  # the median of three
        ([1.0, 4.0, 2.0, 100.0], 0.5, 3.0),  # of four: between the two in the middle
        ([1.0, 4.0, 2.0, 100.0], 0.25, 3.0),
        ([1.0, 2.0, 3.0, 4.0, 100.0], 0.2, 3.0),  # (2 + 3 + 4) / 3
        ([0.0, 1.0, 5.0, 9.0, 100.0], 0.2, 5.0),
        ([1.0, 4.0, 2.0, 100.0], 0.0, 26.75),  # the plain mean
        ([1.0, 4.0, 2.0, 100.0], 0.2, 26.75),  # a fifth of four is nobody
        ([7.0], 0.5, 7.0),
        ([1.0, 2.0], 0.5, 1.5),
    ],
)
def test_the_middle_by_hand(values: list[float], trim: float, answer: float) -> None:
    assert middle(torch.tensor(values)[:, None], trim).item() == answer


def test_a_share_of_ten_clients_is_a_whole_number() -> None:
    ten = torch.arange(10.0)[:, None]
    for trim, kept in ((0.1, 8), (0.2, 6), (0.3, 4), (0.4, 2)):  # .3 * 10 and its like must not fall short of 3
        assert middle(ten * 10**ten, trim).item() == pytest.approx(
            (ten * 10**ten)[(10 - kept) // 2 : (10 + kept) // 2].mean().item()
        )


@pytest.mark.parametrize(
    ("rule", "settings", "values", "answer"),
    [
        ("median", None, (1, 7, -50), 1.0),
        ("median", None, (1, 3, 7, 500), 5.0),
        ("trimmed", None, (1, 2, 3, 4, 1000), 3.0),
        ("trimmed", TrimSettings(trim=0), (1, 2, 3, 4, 40), 10.0),
        # Median 2, distances 2 1 0 2 98 (times the root of the tensor's size), median 2: (-2 - 1 + 0 + 2 + 2) / 5 = .2
        # beside it.
        ("clipped", None, (0, 1, 2, 4, 100), 2.2),
        ("clipped", None, (3, 3, 3), 3.0),
    ],
)
def test_weights_by_hand(rule: str, settings: Any, values: tuple[float, ...], answer: float) -> None:
    for name, value in weights_of(rule, constants(*values), settings).items():
        expected = answer if value.is_floating_point() else len(values)  # of counters the largest
        assert torch.allclose(value.double(), torch.full_like(value, expected, dtype=torch.float64), rtol=1e-5), name


@given(portion=st.sampled_from([400, 5000, 10**6]), clients=st.integers(1, 5))
def test_portions_change_nothing_but_how_often_parcels_are_read(portion: int, clients: int) -> None:
    class Counting(Inbox):
        reads = 0

        def __iter__(self) -> Iterator[Parcel]:
            self.reads += 1
            return super().__iter__()

    spec = MLP.replace(widths={"fc1": 3, "fc2": 2}) if portion == 400 else CNN
    inbox = Counting([made(f"site-{k}", spec, seed=k) for k in range(clients)])
    found = coordinatewise(inbox, lambda values: middle(values, 0.5), portion)
    everything = [item.weights for item in Inbox([made(f"site-{k}", spec, seed=k) for k in range(clients)])]
    for name, (shape, dtype) in spec.shapes().items():
        column = torch.stack([weights[name] for weights in everything])
        assert found[name].shape == shape
        assert torch.equal(found[name], middle(column, 0.5) if dtype.is_floating_point else column.amax(0))
    numbers = sum(int(np.prod(shape)) for shape, _ in spec.shapes().values())
    assert inbox.reads == -(-numbers // max(1, portion // clients // 8))


@pytest.mark.parametrize("rule", ["median", "trimmed", "clipped"])
def test_mixed_architectures_are_refused(rule: str) -> None:
    with pytest.raises(BadInput, match=f"{rule} needs one architecture, but b sent mlp"):
        FUSIONS[rule]().fuse(Inbox([made("a"), made("b", MLP)]))


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=9), st.sampled_from([-1e30, -1.0, 0.0, 7.5, 1e30]))
def test_a_minority_moves_a_median_only_within_the_others(values: list[float], wild: float) -> None:
    bad = (len(values) - 1) // 2
    attacked = torch.tensor(values)
    attacked[:bad] = wild
    honest = torch.tensor(values[bad:])
    assert honest.min() <= middle(attacked[:, None], 0.5).item() <= honest.max()


# -- answers


def speaking(sender: str, probabilities: Sequence[float]) -> Parcel:
    """A network that answers every image with these probabilities."""
    weights = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in MLP.shapes().items()}
    return made(sender, MLP, weights=weights | {"head.bias": torch.tensor(probabilities).log()})


def pictures(count: int = 4) -> Tensor:
    return torch.randint(0, 256, (count, 8, 8, 1), generator=generator("pictures"), dtype=torch.uint8)


SAID = [[0.8, 0.1, 0.1], [0.4, 0.4, 0.2], [0.1, 0.1, 0.8], [0.5, 0.3, 0.2], [0.05, 0.05, 0.9]]


@pytest.mark.parametrize(
    ("rule", "settings", "clients", "answer"),
    [
        ("ensemble-median", None, 3, [0.4, 0.1, 0.2]),
        ("ensemble-median", None, 4, [0.45, 0.2, 0.2]),
        ("ensemble-trimmed", None, 5, [1.0 / 3, 0.5 / 3, 1.2 / 3]),
        ("ensemble-trimmed", EnsembleTrimmedSettings(trim=0.4), 5, [0.4, 0.1, 0.2]),
        (
            "ensemble-trimmed",
            EnsembleTrimmedSettings(trim=0.5, mean="logits"),
            3,
            [0.4, 0.1, 0.2],
        ),  # log .4 is the median logarithm
    ],
)
def test_answers_by_hand(rule: str, settings: Any, clients: int, answer: list[float]) -> None:
    inbox = Inbox([speaking(f"site-{k}", SAID[k]) for k in range(clients)])
    with torch.no_grad():
        found = FUSIONS[rule](settings).fuse(inbox)(pictures())
    assert torch.allclose(found.exp(), torch.tensor(answer).expand(4, 3), atol=1e-6)


def test_a_robust_ensemble_mixes_architectures_and_survives_its_folder(tmp_path: Path) -> None:
    predictor = FUSIONS["ensemble-trimmed"](EnsembleTrimmedSettings(trim=0.4)).fuse(
        Inbox([made("a"), made("b", MLP), made("c", MLP, seed=3)])
    )
    with torch.no_grad():
        before = predictor(pictures())
        save_predictor(predictor, tmp_path / "model", export=False)
        loaded = load_predictor(tmp_path / "model")
        assert torch.equal(loaded(pictures()), before)
    assert isinstance(loaded, RobustEnsemble)
    assert loaded.trim == 0.4
    with pytest.raises(BadInput, match="unknown ensemble mean 'logit'"):
        RobustEnsemble([MLP], NAMES, mean="logit")


# -- counts


def test_capped_counts_by_hand() -> None:
    counts = torch.tensor([[10.0, 0.0], [0.0, 10.0], [1000.0, 1000.0]], dtype=torch.float64)
    assert capped(counts, 1).tolist() == [
        [10, 0],
        [0, 10],
        [5, 5],
    ]  # the median client has 10: the liar's 2000 become 10
    assert capped(counts, 3).tolist() == [[10, 0], [0, 10], [15, 15]]
    assert torch.allclose(
        expert_votes(capped(counts, 1), 1.0)[:, 0], torch.tensor([10 / 15, 0, 5 / 15], dtype=torch.float64)
    )
    assert capped(torch.zeros(2, 2), 1).tolist() == [[0, 0], [0, 0]]


@given(st.lists(st.lists(st.integers(0, 1000), min_size=3, max_size=3), min_size=1, max_size=8), st.floats(0.1, 10))
def test_a_cap_bounds_every_row_and_keeps_its_proportions(rows: list[list[int]], most: float) -> None:
    counts = torch.tensor(rows, dtype=torch.float64)
    found = capped(counts, most)
    assert bool((found.sum(1) <= most * counts.sum(1).quantile(0.5) * (1 + 1e-9) + 1e-9).all())
    assert bool((found <= counts).all())
    assert torch.allclose(found * counts.sum(1, keepdim=True), counts * found.sum(1, keepdim=True))


def test_f1_by_hand() -> None:
    network = speaking("a", [0.1, 0.1, 0.8]).network()  # says class 2, always
    labels = torch.tensor([0, 0, 2, 2])
    # Class 0: never named, 0. Class 1: no images, nothing known against it. Class 2: 2 right of 4 named and 2 there: 2
    # * 2 / (4 + 2).
    assert torch.allclose(f1_scores(network, pictures(), labels), torch.tensor([0.0, 1.0, 2 / 3]))
    votes = expert_votes(torch.tensor([[30.0, 0.0], [10.0, 10.0]]), 1.0, torch.tensor([[0.1, 1.0], [0.9, 0.5]]))
    assert torch.allclose(
        votes, torch.tensor([[0.25, 0.0], [0.75, 1.0]])
    )  # 3 against 9; whoever claims nothing has no voice


def test_validation_asks_for_images() -> None:
    rule = FUSIONS["experts"](ExpertsSettings(validated=True))
    with pytest.raises(BadInput, match="give them with --proxy"):
        rule.fuse(Inbox([made("a"), made("b", seed=1)]))
    proxy = Dataset(pictures().numpy(), np.array([0, 0, 2, 2]), NAMES, "proxy")
    silent = rule.fuse(Inbox([speaking("a", [0.1, 0.1, 0.8])]), Server(proxy))
    assert silent.state_dict()["votes"].tolist() == [[0, 1, 1]]


def test_settings_left_alone_change_no_byte() -> None:
    inbox = [made("a"), made("b", seed=1, counts=[28, 1, 1])]
    plain, named = (
        FUSIONS["experts"](settings).fuse(Inbox(inbox)).state_dict()
        for settings in (None, ExpertsSettings(cap_counts=None, validated=False))
    )
    assert all(torch.equal(plain[name], named[name]) for name in plain)
    assert plain["votes"][:, 0].tolist() == pytest.approx([10 / 38, 28 / 38])


def test_every_robust_rule_is_a_method() -> None:
    for rule in ("median", "trimmed", "clipped", "ensemble-median", "ensemble-trimmed"):
        assert (METHODS[rule].objective, METHODS[rule].fusion) == ("supervised", rule)


# -- what they are for


def uploads(bundle: DataBundle, alpha: float) -> list[Parcel]:
    spec = ModelSpec(name="cnn-small", classes=10, channels=1, size=(8, 8), width=0.25)
    split = make_split(bundle.train, SplitSettings(clients=5, alpha=alpha), 0)
    sites = [site_of(bundle, split, name) for name in split.shares]
    return [
        train_site(site, spec, Supervised(SupervisedSettings()), TrainSettings(epochs=12), PLAIN, 0).parcel
        for site in sites
    ]


@pytest.fixture(scope="module")
def even(digits: DataBundle) -> list[Parcel]:
    return uploads(digits, 100)


@pytest.fixture(scope="module")
def uneven(digits: DataBundle) -> list[Parcel]:
    return uploads(digits, 0.3)


def judged(rule: str, parcels: Sequence[Parcel], data: DataBundle, **settings: Any) -> float:
    kind = FUSIONS[rule]
    assert data.test is not None
    test = part_of(data.test)
    return accuracy(scores_of(kind(kind.settings_type(**settings)).fuse(Inbox(parcels)), test.images), test.labels)


def test_two_of_five_random_networks_ruin_the_mean_and_not_the_median(even: list[Parcel], digits: DataBundle) -> None:
    attacked = [
        remade(item, weights=item.weights | drawn_anew(item, 0)) if k < 2 else item for k, item in enumerate(even)
    ]
    found = {
        (rule, trim): [
            judged(rule, parcels, digits, **({"trim": trim} if trim else {})) for parcels in (even, attacked)
        ]
        for rule, trim in (
            ("fedavg", 0),
            ("median", 0),
            ("trimmed", 0.4),
            ("clipped", 0),
            ("ensemble-median", 0),
            ("ensemble-trimmed", 0.4),
        )
    }
    clean, ruined = found.pop(("fedavg", 0))
    assert clean > 0.8
    assert ruined < 0.4
    for rule, (clean, after) in found.items():
        assert clean > 0.75, rule
        assert after > max(clean - 0.25, ruined + 0.3), rule


def test_one_of_five_that_claims_everything_breaks_experts_and_not_the_capped_ones(
    uneven: list[Parcel], digits: DataBundle
) -> None:
    liar = min(
        range(5), key=lambda k: sum(n > 0 for n in uneven[k].manifest.counts or ())
    )  # who has seen the fewest classes lies the most
    attacked = [boasting(item) if k == liar else item for k, item in enumerate(uneven)]
    for rule in ("experts", "experts-calibrated"):
        clean, fallen = judged(rule, uneven, digits), judged(rule, attacked, digits)
        kept = judged(rule, attacked, digits, cap_counts=1)
        assert clean > 0.8, rule
        assert fallen < clean - 0.2, rule
        assert kept > max(clean - 0.15, fallen + 0.15), rule
