"""FOL and ground stations on a contact plan: twenty nodes on a random shell, and a small world whose every event is
known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from factories import make_stripes
from flyby.contacts.journal import Journal
from flyby.contacts.plan import Plan, meet
from flyby.contacts.walker import random_shell
from flyby.contacts.windows import Rules, find
from flyby.errors import BadInput
from flyby.parcels import parcel
from flyby.parcels.ledger import Ledger
from flyby.runs import population
from flyby.runs.config import RunConfig, make_config
from flyby.runs.folder import Result, Run
from flyby.runs.pipeline import Options, run
from flyby.study.compare import compare

ALONE = Options(engine="inline", device="cpu", quiet=True, keep=False)


def facts(path: Path) -> Any:
    """A JSON file without what a stopwatch says."""
    return json.loads(path.read_text(), object_hook=lambda d: {k: v for k, v in d.items() if k != "seconds"})


# -- digits, twenty nodes


def digits(plan: Path, **contacts: Any) -> RunConfig:
    quick = ["epochs=2", "distill_epochs=6", "distill_steps=60", "diagnostics=false", "rounds=1", "buffer=4", "top=4"]
    return make_config(
        "fol-plus",
        model="mlp",
        epochs=10,
        data={"name": "digits"},
        split={"name": "fol", "clients": 20, "alpha": 0.7, "min_size": 40},
        contacts={"plan": str(plan), **contacts},
        assignments=[f"orient.{one}" for one in (*quick, "eval_nodes=quantiles:7")],
    )


def test_fol_on_a_random_shell(tmp_path: Path) -> None:
    orbits = random_shell(20, (500, 600), (50, 98), 0)
    windows, _ = find(orbits, 12 * 3600, Rules(max_range=3000, least=15, step=30))
    windows.plan(orbits.names, (), 4000.0, orbits.epoch, 12 * 3600).write(tmp_path / "plan.csv")
    options = replace(ALONE, store=tmp_path / "store")
    result = run(digits(tmp_path / "plan.csv"), tmp_path / "run", options)
    made = Run(tmp_path / "run")

    hours = result.by_hour or {}
    assert len(hours) == 7
    local = sum(steps[0][1] for steps in hours.values()) / 7
    last = sum(steps[-1][1] for steps in hours.values()) / 7
    assert last == pytest.approx(result.accuracy_common)
    assert last > local + 0.015, "neighbours teach something"
    assert all(steps[0][0] == 0 and 0 < steps[-1][0] <= 12 for steps in hours.values())
    assert len(made.hours.read_text().splitlines()) == 1 + sum(map(len, hours.values()))

    journal, crossings = Journal.read(made.journal), Ledger.load(made.ledger).crossings
    pairs = [(c.sender, c.receiver) for c in crossings]
    assert len(pairs) == len(set(pairs)) == sum(v is not None for e in journal.of("exchange") for v in e["versions"])
    assert result.contacts is not None
    assert len(journal.of("exchange")) == result.contacts["exchanges"] > 30
    planned = {(e["a"], e["b"]): e for e in journal.of("exchange")}
    assert all(set(pair) <= set(orbits.names) for pair in planned)

    again = digits(tmp_path / "plan.csv", journal=str(made.journal))
    again = again.model_copy(update={"orient": {**again.orient, "eval_nodes": list(hours)[:2]}})
    run(again, tmp_path / "again", options)
    replayed = Run(tmp_path / "again")
    assert replayed.journal.read_bytes() == made.journal.read_bytes()
    assert replayed.ledger.read_bytes() == made.ledger.read_bytes()
    for name in list(hours)[:2]:
        assert facts(replayed.node(name)) == facts(made.node(name))


# -- a small world: four nodes, whose parcels are of some 2 kB


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stripes(tmp_path_factory.mktemp("stripes") / "stripes.npz", 240)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


def windows(path: Path, *pairs: str, stations: tuple[str, ...] = (), nodes: str = "abcd", rate: float = 1e5) -> Path:
    """A minute for each pair, one after another, every half hour: ``ab`` or ``a:kiel``."""
    contacts = []
    for i, pair in enumerate(pairs):
        one, other = pair.split(":") if ":" in pair else tuple(pair)
        contacts.append(meet(1800.0 * i, 1800.0 * i + 60, one, other, rate))
    Plan(tuple(nodes), tuple(contacts), 12 * 3600.0, stations).write(path)
    return path


def small(data: Path, plan: Path, *assignments: str, method: str = "fol-n", clients: int = 4) -> RunConfig:
    orient = ["epochs=1", "distill_epochs=1", "distill_steps=0", "diagnostics=false", "buffer=2", "top=2", "rounds=2"]
    orient += ["screen=false"]  # these networks know next to nothing
    chosen = [f"orient.{one}" for one in orient if method.startswith("fol")]
    return make_config(
        method,
        model="mlp",
        epochs=1,
        data={"name": str(data)},
        split={"name": "fol", "clients": clients, "alpha": 5.0, "min_size": 20},
        contacts={"plan": str(plan)},
        assignments=["model.width=0.05", *chosen, *assignments],
    )


def go(config: RunConfig, out: Path, store: Path, **changes: Any) -> Result:
    return run(config, out, replace(ALONE, store=store, **changes))


def crossed(out: Path) -> dict[tuple[str, str], int]:
    return {(c.sender[-1], c.receiver[-1]): c.round for c in Ledger.load(Run(out).ledger).crossings}


def test_who_meets_too_few_keeps_its_model_and_is_named(tmp_path: Path, data: Path, store: Path) -> None:
    plan = windows(tmp_path / "plan.csv", "ab", "ac", nodes="abcd")
    found = go(small(data, plan), tmp_path / "run", store)
    assert found.contacts is not None
    assert found.contacts["rounds"] == {"site-0": 1, "site-1": 0, "site-2": 0, "site-3": 0}
    assert (found.contacts["unmet"], found.contacts["unfilled"]) == (["site-3"], ["site-1", "site-2"])
    assert found.local_per_client is not None
    assert found.per_client["site-3"] == found.local_per_client["site-3"]
    assert [len(steps) for steps in (found.by_hour or {}).values()] == [2, 1, 1, 1]
    assert found.rounds == 1
    assert {name: len(one["student"]) for name, one in (found.by_round or {}).items()} == dict.fromkeys(
        found.per_client, 1
    ), "tables have as many columns for all"
    assert crossed(tmp_path / "run") == {("1", "0"): 1, ("0", "1"): 1, ("2", "0"): 1, ("0", "2"): 1}


def test_newest_models_travel_and_an_interrupted_run_goes_on(
    tmp_path: Path, data: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = windows(tmp_path / "plan.csv", "ab", "ac", "bc", "ad", "bd", "cd")
    config = small(data, plan, "orient.sends=current", "contacts.codecs=[fp16]")
    whole = go(config, tmp_path / "whole", store)
    # Q = 2, K = 2: a orients on b and c, then c and b; each keeps one and orients again on d, whose first is on a, b.
    rounds = [(e["node"], [(m["origin"], m["version"]) for m in e["models"]]) for e in _journal(tmp_path / "whole")]
    assert rounds[:3] == [("a", [("b", 0), ("c", 0)]), ("b", [("a", 0), ("c", 0)]), ("c", [("a", 0), ("b", 0)])]
    assert ("d", [("a", 1), ("b", 1)]) in rounds
    assert ("c", [("d", 1)]) in rounds, "d gives c what its own round made"
    sent = {(c.sender, c.receiver): c for c in Ledger.load(Run(tmp_path / "whole").ledger).crossings}
    sizes = Journal.read(Run(tmp_path / "whole").journal).head["sizes"]
    assert all(c.bytes <= sizes["fp16"] for c in sent.values()), "no more bytes than the plan had room for"
    assert sent["site-0", "site-1"].digest != sent["site-0", "site-3"].digest

    plain, calls = population.Population.round, list[int]()

    def interrupted(self: Any, *words: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return plain(self, *words, **more)

    monkeypatch.setattr(population.Population, "round", interrupted)
    with pytest.raises(KeyboardInterrupt):
        go(config, tmp_path / "cut", store)
    assert sorted(p.name for p in Run(tmp_path / "cut").memory.iterdir())
    done = len(calls) - 1
    found = go(config, tmp_path / "cut", store, resume=True)
    assert len(calls) == 1 + sum((whole.contacts or {})["rounds"].values()), f"{done} rounds were not done again"
    assert found.per_client == whole.per_client
    assert found.by_hour == whole.by_hour
    assert Run(tmp_path / "cut").ledger.read_bytes() == Run(tmp_path / "whole").ledger.read_bytes()
    assert not Run(tmp_path / "cut").memory.exists()


def _journal(out: Path) -> list[dict[str, Any]]:
    return Journal.read(Run(out).journal).of("round")


def test_a_node_goes_on_after_its_last_whole_round(
    tmp_path: Path, data: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = windows(tmp_path / "plan.csv", "ab", "ac", "ad")
    config = small(data, plan, "orient.eval_nodes=0")
    whole = go(config, tmp_path / "whole", store)
    assert (whole.contacts or {})["rounds"]["site-0"] == 2
    plain, calls = population.Population.round, list[int]()

    def interrupted(self: Any, node: Any, inbox: Any, number: int, judged: bool) -> Any:
        calls.append(number)
        if calls == [1, 2]:
            raise KeyboardInterrupt
        return plain(self, node, inbox, number, judged)

    monkeypatch.setattr(population.Population, "round", interrupted)
    with pytest.raises(KeyboardInterrupt):
        go(config, tmp_path / "cut", store)
    go(config, tmp_path / "cut", store, resume=True)
    assert calls == [1, 2, 2], "round 1 was remembered"
    assert facts(Run(tmp_path / "cut").node("site-0")) == facts(Run(tmp_path / "whole").node("site-0"))


def test_carried_models_are_counted_from_maker_to_taker(tmp_path: Path, data: Path, store: Path) -> None:
    plan = windows(tmp_path / "plan.csv", "ab", "bc", "cd")
    go(small(data, plan, "contacts.carry=true", "contacts.codecs=[int8]"), tmp_path / "run", store)
    journal = Journal.read(Run(tmp_path / "run").journal)
    carried = {(e["origin"], e["a"], e["b"]) for e in journal.of("carry")}
    assert carried == {("a", "b", "c"), ("a", "c", "d"), ("b", "c", "d")}
    sent = crossed(tmp_path / "run")
    assert len(sent) == 6 + 3
    assert ("0", "3") in sent
    file = Run(tmp_path / "run").crossed / "int8" / "site-0.parcel"
    digests = {c.digest for c in Ledger.load(Run(tmp_path / "run").ledger).crossings if c.sender == "site-0"}
    assert len(digests) == 1, "the very file of its maker, at every taker"
    assert parcel.read(file).manifest.codec == "int8"


def test_dropping_by_score_looks_at_the_models(tmp_path: Path, data: Path, store: Path) -> None:
    plan = windows(tmp_path / "plan.csv", "ab", "ac", "ad")
    words = ("contacts.carry=true", "contacts.storage=1", "contacts.evict=score", "orient.eval_nodes=1")
    go(small(data, plan, *words), tmp_path / "run", store)
    assert {e["by"] for e in Journal.read(Run(tmp_path / "run").journal).of("evict")} == {"score"}


def test_stations_collect_and_the_server_fuses_by_the_hour(tmp_path: Path, data: Path, store: Path) -> None:
    plan = windows(tmp_path / "plan.csv", "a:kiel", "ab", "b:rome", "ac", "bc", "b:kiel", stations=("kiel", "rome"))
    both = {name: small(data, plan, method=name) for name in ("fol-n", "fedavg")}
    options = replace(ALONE, store=store)
    results = compare(both, tmp_path / "runs", options)
    fused, found = results["fedavg"], results["fedavg"].contacts or {}
    assert list(found["delivered"]) == ["site-0", "site-1"]
    assert found["missing"] == ["site-2", "site-3"]
    assert [(one["hour"], one["uploads"]) for one in found["fused"]] == [(1.0, 1), (2.0, 2)]
    assert found["fused"][-1]["accuracy"] == fused.accuracy
    assert (fused.uploads, fused.bytes_up) == (
        2,
        sum(c.bytes for c in Ledger.load(Run(tmp_path / "runs/fedavg").ledger).crossings),
    )
    steps = (fused.by_hour or {})["site-3"]
    assert [hour for hour, _ in steps] == [0, 1, 2], "its own model, then the server's"
    text = Run(tmp_path / "runs").report.read_text()
    assert 'id="s-hours"' in text
    assert "Which is ahead" in text or "None is ahead" in text
    assert "Too late for the server: site-2, site-3" in text
    assert set(results["fol-n"].by_hour or {}) == set(fused.by_hour or {})


@pytest.mark.parametrize(
    ("method", "clients", "words", "message"),
    [
        ("fol-n", 5, (), "has 4 nodes and this run 5 sites"),
        ("fol-n", 4, ("codec=int8",), "a window decides the codec"),
        ("fol-n", 4, ("contacts.codecs=[fp8]",), "unknown codec 'fp8'"),
        ("fol-n", 4, ("contacts.policy=wait",), "orient.sends=current"),
        ("fol-n", 4, ("contacts.evict=score", "orient.sends=current"), "use contacts.evict=age or diversity"),
        ("fol-n", 4, ("orient.meetings=x.json",), "both say who meets whom"),
        ("fedavg", 4, (), "has no ground stations"),
        ("local", 4, (), "exchanges nothing"),
    ],
)
def test_bad_plans(tmp_path: Path, data: Path, method: str, clients: int, words: tuple[str, ...], message: str) -> None:
    plan = windows(tmp_path / "plan.csv", "ab")
    with pytest.raises(BadInput, match=message) as caught:
        run(small(data, plan, *words, method=method, clients=clients), tmp_path / "run", ALONE)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "parcels").exists(), "before anything is trained"


def test_other_files_are_refused(tmp_path: Path, data: Path, store: Path) -> None:
    plan = windows(tmp_path / "plan.csv", "ab", "ac")
    config = small(data, plan, "orient.eval_nodes=3")
    go(config, tmp_path / "run", store)
    journal = Run(tmp_path / "run").journal
    other = windows(tmp_path / "other.csv", "ab", "ad")
    with pytest.raises(BadInput, match="a journal of another plan"):
        go(small(data, other, f"contacts.journal={journal}"), tmp_path / "b", store)
    with pytest.raises(BadInput, match="models of other sizes"):
        go(small(data, plan, f"contacts.journal={journal}", "model.width=0.1"), tmp_path / "c", store)
    Run(tmp_path / "run").result_path.unlink()
    windows(tmp_path / "plan.csv", "ab", "ad")
    with pytest.raises(BadInput, match="the contact plan changed since"):
        go(config, tmp_path / "run", store, resume=True)
    with pytest.raises(BadInput, match="there is none; name one with --contacts"):
        make_config("fol", assignments=["contacts.carry=true"])
