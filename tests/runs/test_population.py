"""FOL from the command line: a whole population, and one real node with an inbox."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from factories import call, done, make_stripes, one_line, result_of
from flyby.fusion import load_predictor
from flyby.meeting import Schedule
from flyby.meeting.pipeline import neighbours
from flyby.parcels import parcel
from flyby.parcels.ledger import Ledger
from flyby.report.nodes import sections_of, slope_chart
from flyby.report.read import RunData

QUICK = (
    "--model",
    "mlp",
    "--epochs",
    3,
    "--engine",
    "inline",
    "--device",
    "cpu",
    "--set",
    "orient.epochs=2",
    "--set",
    "orient.distill_epochs=2",
    "--set",
    "orient.distill_steps=0",
)
FLEET = (
    "--split",
    "fol",
    "--min-size",
    20,
    "--clients",
    8,
    "--alpha",
    5,
    "--rounds",
    2,
    "--buffer",
    3,
    "--top",
    2,
    "--quiet",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stripes(tmp_path_factory.mktemp("stripes") / "stripes.npz", 400)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_a_population_run(tmp_path: Path, data: Path) -> None:
    out = tmp_path / "run"
    done("run", "--method", "fol", "--data", data, *FLEET, *QUICK, "--eval-nodes", "1,site-4", "--out", out)
    result = result_of(out)
    assert result["method"] == "fol"
    assert set(result["per_client"]) == {"site-1", "site-4"}
    assert result["accuracy"] == pytest.approx(sum(result["per_client"].values()) / 2)
    assert result["clients"] == 8
    assert len(list((out / "parcels").glob("*.parcel"))) == 8, "all pretrain, two work"

    schedule, ledger = Schedule.load(out / "schedule.json"), Ledger.load(out / "ledger.json")
    assert [len(schedule.senders("site-1", e)) for e in (1, 2)] == [3, 2]
    assert result["uploads"] == len(ledger.crossings) == 8 * 5
    assert {c.round for c in ledger.crossings} == {1, 2}
    assert ledger.crossings[0].bytes == (out / "parcels" / f"{ledger.crossings[0].sender}.parcel").stat().st_size

    node = read(out / "nodes" / "site-1.json")
    assert [r["round"] for r in node["rounds"]] == [1, 2]
    assert result["per_client"]["site-1"] == node["rounds"][-1]["student"] == node["answer"]
    assert result["local_per_client"]["site-1"] == node["local"]
    assert load_predictor(out / "personal" / "site-1").kind == "single"
    sections = sections_of(RunData.read(out))
    common = ["On common images", "More than accuracy"]
    assert [s["title"] for s in sections] == [
        "Node by node",
        *common,
        "How the students learned",
        "What the theorems say",
        "Pruning",
        "Meetings",
    ]
    assert sections[0]["table"]["columns"][-4:] == ["FOL E=1 %", "FOL E=2 %", "FOL-A E=1 %", "FOL-A E=2 %"]
    page = (out / "report.html").read_text()
    assert 'aria-label="Node by node"' in page, "the slope chart"
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids)), "two charts of one run do not share names"

    # The same schedule replayed from its file, the same uploads, another variant: only the end differs.
    before = (out / "schedule.json").read_bytes()
    again = tmp_path / "again"
    done(
        "run",
        "--method",
        "fol",
        "--data",
        data,
        *FLEET,
        *QUICK,
        "--eval-nodes",
        "1,4",
        "--set",
        f"meetings={out / 'schedule.json'}",
        "--out",
        again,
    )
    assert (again / "schedule.json").read_bytes() == before
    assert result_of(again)["per_client"] == result["per_client"]

    # A node that is finished is not done again.
    (out / "result.json").unlink()
    stamp = (out / "nodes" / "site-1.json").stat().st_mtime_ns
    done("run", "--method", "fol", "--data", data, *FLEET, *QUICK, "--eval-nodes", "1,site-4", "--out", out, "--resume")
    assert (out / "nodes" / "site-1.json").stat().st_mtime_ns == stamp
    assert result_of(out)["per_client"] == result["per_client"]


@pytest.mark.usefixtures("undrawn")
def test_variants_share_their_pretraining(tmp_path: Path, data: Path) -> None:
    out = tmp_path / "runs"
    done("run", "--method", "fol-n,fol-an,gossip", "--data", data, *FLEET, *QUICK, "--eval-nodes", 0, "--out", out)
    results = {name: result_of(out / name) for name in ("fol-n", "fol-an", "gossip")}
    assert [r["trained"] for r in results.values()] == [8, 0, 0]
    assert len(list((out / "uploads").iterdir())) == 1
    assert len({r["split_hash"] for r in results.values()}) == 1
    node = read(out / "fol-an" / "nodes" / "site-0.json")
    assert node["answer"] == node["rounds"][-1]["teacher"]
    assert load_predictor(out / "fol-an" / "personal" / "site-0").kind == "ensemble"
    rounds = [read(out / name / "nodes" / "site-0.json")["rounds"][0] for name in ("fol-an", "gossip")]
    met = [sorted(neighbours(one["candidates"], one)) for one in rounds]
    assert met[0] == met[1] != [], "an average is of neighbours too"


@pytest.mark.usefixtures("undrawn")
def test_neighbours_may_send_their_current_model(tmp_path: Path, data: Path) -> None:
    out = tmp_path / "run"
    done(
        "run",
        "--method",
        "fol-n",
        "--data",
        data,
        *FLEET,
        *QUICK,
        "--eval-nodes",
        2,
        "--set",
        "sends=current",
        "--out",
        out,
    )
    rounds = read(out / "nodes" / "site-2.json")["rounds"]
    versions = [{c["sender"]: c["version"] for c in r["candidates"] if c["sender"] != "self"} for r in rounds]
    assert set(versions[0].values()) == {0}
    new = set(versions[1]) - set(versions[0])
    assert {versions[1][sender] for sender in new} == {1}, "in round 2 a neighbour gives what round 1 made of it"
    crossings = Ledger.load(out / "ledger.json").crossings
    digests = {e: {c.sender: c.digest for c in crossings if c.round == e} for e in (1, 2)}
    assert all(digests[1][s] != digests[2][s] for s in digests[2])


def test_a_mixed_fleet(tmp_path: Path, data: Path) -> None:
    out = tmp_path / "run"
    fleet = ("--set", "fleet=[mlp,cnn-small]", "--set", "model.width=0.1", "--eval-nodes", "0,1")
    done("run", "--method", "fol", "--data", data, *FLEET, *QUICK, *fleet, "--out", out)
    kinds = [parcel.read_manifest(out / "parcels" / f"site-{i}.parcel").spec.name for i in range(8)]
    assert kinds == ["mlp", "cnn-small"] * 4
    assert result_of(out)["model"] == "mlp, cnn-small"
    assert {c["model"] for c in read(out / "nodes" / "site-0.json")["rounds"][0]["candidates"]} <= {"mlp", "cnn-small"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--method", "fedavg", "--rounds", 2), "belong to methods without a server"),
        (("--method", "fol", "--split", "iid"), "validation and 0 test images of its own"),
        (
            ("--method", "fol", "--split", "fol", "--min-size", 10, "--eval-nodes", "99"),
            "there is no node 99: they are 0 to 4",
        ),
        (("--method", "fol", "--split", "fol", "--min-size", 10, "--eval-nodes", "mars"), "unknown node 'mars'"),
        (("--method", "fol", "--split", "fol", "--min-size", 10, "--fusion", "fedavg"), "has no server"),
        (
            ("--method", "fol", "--split", "fol", "--min-size", 10, "--set", "orient.top=0"),
            "orient.top = 0 will not do",
        ),
        (
            ("--method", "fol", "--split", "fol", "--min-size", 10, "--set", "orient.lambda=1"),
            "unknown orient setting 'lambda'",
        ),
    ],
)
def test_what_a_population_cannot_do(tmp_path: Path, data: Path, words: tuple[object, ...], message: str) -> None:
    assert message in one_line(call("run", "--data", data, *words, "--out", tmp_path / "run", "--quiet"))


def test_one_real_node_with_an_inbox(tmp_path: Path, data: Path) -> None:
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    for name in ("me", "ann", "bob"):
        path = tmp_path / "me.parcel" if name == "me" else inbox / f"{name}.parcel"
        done(
            "train",
            "--data",
            data,
            "--out",
            path,
            "--site",
            name,
            "--model",
            "mlp",
            "--epochs",
            3,
            "--seed",
            0,
            "--quiet",
        )
    (inbox / "torn.parcel").write_bytes((inbox / "ann.parcel").read_bytes()[:500])
    answer = done(
        "orient",
        "--own",
        tmp_path / "me.parcel",
        "--received",
        inbox,
        "--data",
        data,
        "--out",
        tmp_path / "personal",
        "--set",
        "epochs=2",
        "--set",
        "orient.distill_epochs=2",
        "--set",
        "orient.distill_steps=0",
        "--no-export",
        "--json",
    )
    facts = answer.json
    assert facts["used"] == 2
    assert facts["received"] == 3
    assert "refused torn.parcel" in answer.err
    assert facts["bytes_received"] == sum((inbox / f"{n}.parcel").stat().st_size for n in ("ann", "bob"))
    assert done("evaluate", tmp_path / "personal", "--data", data, "--json").json["accuracy"] > 0.6
    assert parcel.read(tmp_path / "personal" / "me.parcel").manifest.meta["version"] == 1
    assert "unknown variant" in one_line(
        call(
            "orient",
            "--own",
            tmp_path / "me.parcel",
            "--received",
            inbox,
            "--data",
            data,
            "--out",
            tmp_path / "x",
            "--method",
            "aurora",
        )
    )


def test_the_slope_chart_draws_numbers_only() -> None:
    chart = slope_chart(
        "k",
        "from local to personal",
        {"left": "local", "right": "FOL", "pairs": {"a": [0.5, 0.7], "<b>": [0.6, 0.4], "c": ["x", 1]}},
    )
    assert chart.startswith("<svg")
    assert "&lt;b&gt;" in chart
    assert "mean 55.0" in chart
    assert slope_chart("k", "l", None) == slope_chart("k", "l", {"pairs": {}}) == ""


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_digits_fol_a_beats_fol_beats_local_and_adapting_pays(tmp_path: Path) -> None:
    """The run of docs/fol.md, cut to one round and half its nodes: means of own-test accuracy."""
    words = (
        "--split",
        "fol",
        "--min-size",
        40,
        "--clients",
        20,
        "--alpha",
        0.7,
        "--rounds",
        1,
        "--buffer",
        9,
        "--top",
        4,
        "--seed",
        2,
        "--quiet",
    )
    half = (
        "--eval-nodes",
        ",".join(map(str, range(10, 20))),
        "--set",
        "orient.diagnostics=false",
        "--set",
        "data.holdout=0",
        "--model",
        "mlp",
    )
    done(
        "run", "--method", "fol,fol-n", "--data", "digits", *words, *half, "--device", "cpu", "--out", tmp_path / "runs"
    )
    tables = {name: sections_of(RunData.read(tmp_path / "runs" / name))[0]["table"] for name in ("fol", "fol-n")}
    means = {
        name: next(dict(zip(table["columns"], row, strict=True)) for row in table["rows"] if row[0] == "mean")
        for name, table in tables.items()
    }
    fol = means["fol"]
    assert float(fol["FOL-A E=1 %"]) >= float(fol["FOL E=1 %"]) >= float(fol["local %"]) > 75
    assert float(fol["FOL E=1 %"]) > float(means["fol-n"]["FOL-N E=1 %"])
