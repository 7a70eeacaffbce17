"""Rounds over Flower: real processes, TLS and authenticated nodes on one machine; the rules of a round with a grid made
of paper."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from factories import WAIT, call, command, done, make_npz, make_stripes, one_line, wait_for
from flyby.data.dataset import DataBundle
from flyby.deploy.app_folder import write_app
from flyby.deploy.client import PARCEL, SERIAL, SITE, answer, reason
from flyby.deploy.credentials import write_certificates, write_node_keys
from flyby.deploy.local import Federation, interruptible
from flyby.deploy.round import NodeSettings, Round, joined, read_node, read_round
from flyby.deploy.scratch import take_dead
from flyby.deploy.server import Roll, collect, conduct, prepare
from flyby.deploy.trial import judged, named
from flyby.errors import BadInput
from flyby.parcels import parcel, signing
from flyby.parcels.ledger import Ledger

needs_flower = pytest.mark.skipif(
    importlib.util.find_spec("flwr") is None, reason="needs Flower: pip install 'flyby[flower]'"
)


@pytest.fixture(autouse=True)
def unmeasured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's own processes run without coverage. When sys.path changes, as it does when Flower loads an app, coverage
    takes out of sys.modules whatever another thread is importing just then, and the import of torch ends in a KeyError
    once in a while."""
    if request.node.get_closest_marker("slow"):
        for name in ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"):
            monkeypatch.delenv(name, raising=False)


# -- what hosts need


def test_the_certificate_is_good_for_the_named_hosts_and_for_nobody_else(tmp_path: Path) -> None:
    paths = write_certificates(tmp_path / "certs", ["superlink.example.org", "10.1.2.3"])
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(paths["certificate"], paths["key"])
    believed = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    believed.load_verify_locations(paths["ca"])
    believed.verify_flags |= ssl.VERIFY_X509_STRICT

    def handshake(name: str, context: ssl.SSLContext) -> None:
        """A TLS handshake in memory: what one side writes the other reads, until both are content."""
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        client, server = (
            context.wrap_bio(back, there, server_hostname=name),
            served.wrap_bio(there, back, server_side=True),
        )
        for _ in range(4):
            for side in (client, server):
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        client.do_handshake()

    for name in ("superlink.example.org", "10.1.2.3", "localhost", "127.0.0.1"):
        handshake(name, believed)
    with pytest.raises(ssl.SSLCertVerificationError, match=r"[Hh]ostname"):
        handshake("another.example.org", believed)
    other = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    other.load_verify_locations(write_certificates(tmp_path / "other")["ca"])
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake("localhost", other)


def test_private_files_are_private_and_never_replaced(tmp_path: Path) -> None:
    keys = write_node_keys(tmp_path, "hospital-a")
    certs = write_certificates(tmp_path)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (keys["key"], certs["key"])] == [0o600, 0o600]
    before = keys["key"].read_bytes(), certs["key"].read_bytes()
    with pytest.raises(BadInput, match=r"hospital-a-node\.key is already there"):
        write_node_keys(tmp_path, "hospital-a")
    with pytest.raises(BadInput, match=r"ca\.crt is already there"):
        write_certificates(tmp_path)
    assert before == (keys["key"].read_bytes(), certs["key"].read_bytes())


def test_node_keys_are_p384_in_the_forms_that_flower_reads(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

    paths = write_node_keys(tmp_path, "hospital-a")
    private, public = (
        load_ssh_private_key(paths["key"].read_bytes(), None),
        load_ssh_public_key(paths["public"].read_bytes()),
    )
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert isinstance(private.curve, ec.SECP384R1)
    assert private.public_key() == public


@pytest.mark.parametrize("host", ["https://here", "here:8000", "a b", "", "hôte"])
def test_a_host_that_is_none_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(BadInput, match="neither a host name nor an IP address"):
        write_certificates(tmp_path, [host])
    assert not list(tmp_path.iterdir())


def test_commands_write_what_three_hosts_need(tmp_path: Path) -> None:
    made = done("flower", "certs", tmp_path / "certs", "--host", "superlink.example.org", "--json").json
    assert sorted(Path(path).name for path in made.values()) == ["ca.crt", "server.crt", "server.key"]
    made = done("flower", "keys", tmp_path / "keys", "hospital-a", "hospital-b", "--json").json
    assert all(Path(path).exists() for pair in made.values() for path in pair.values())
    assert "cannot be called '.hidden'" in one_line(call("flower", "keys", tmp_path, ".hidden"))
    made = done(
        "flower",
        "app",
        tmp_path / "app",
        "--method",
        "fedavg",
        "--sites",
        3,
        "--min-sites",
        2,
        "--deadline",
        "2h",
        "--json",
    ).json
    assert made["config"]["deadline"] == "2h"


def test_the_app_folder_has_every_key_of_a_round(tmp_path: Path) -> None:
    asked = Round(method="fedavg", epochs=3, settings="train.lr=0.01;objective.send=[kfac]", out='a "quoted" \\ name')
    folder = write_app(tmp_path / "app", asked)
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    config = project["tool"]["flwr"]["app"]["config"]
    assert read_round(config) == asked
    assert set(config) == {name.replace("_", "-") for name in Round.model_fields}
    assert project["tool"]["flwr"]["app"]["components"] == {
        "serverapp": "flyby_round.server_app:app",
        "clientapp": "flyby_round.client_app:app",
    }
    with pytest.raises(BadInput, match="already there"):
        write_app(folder, asked)


@given(st.text(max_size=40), st.text(max_size=40))
@example("\x7f\x00", '\\ " \n \U0001f600')
def test_any_text_travels_through_toml(settings: str, out: str) -> None:
    asked = Round(settings=settings, out=out)
    assert read_round(tomllib.loads(asked.toml())) == asked


@needs_flower
def test_flower_itself_accepts_the_app_folder(tmp_path: Path) -> None:
    from flwr.cli.build import build_fab_from_disk
    from flwr.cli.config_utils import load_and_validate

    folder = write_app(tmp_path / "app", Round())
    config, warnings = load_and_validate(folder / "pyproject.toml")
    assert not warnings
    assert config["project"]["name"] == "flyby-round"
    assert len(build_fab_from_disk(folder)) > 500


# -- what a round may be told


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"method": "fol"}, "sends nothing to a server"),
        ({"method": "local"}, "sends nothing to a server"),
        ({"method": "nonsense"}, "unknown method"),
        ({"deadline": "soon"}, "is not a duration"),
        ({"deadline": "0s"}, "is not a duration"),
        ({"sites": 2, "min-sites": 3}, "3 parcels cannot come from 2 sites"),
        ({"method": "fedavg", "fusion": "fedlpa"}, "fusion 'fedlpa' needs kfac"),
        ({"method": "feddf"}, "proxy images"),
        ({"settings": "train.lr=nonsense"}, "train.lr"),
        ({"settings": "data.name=/etc"}, "may not say which data"),
        ({"settings": "data.holdout=0.5"}, "may not say which data"),
        ({"require-signed": True}, "require-signed needs trust"),
        ({"min-site": 2}, "unknown run-config setting 'min-site'; did you mean 'min_sites'"),
    ],
)
def test_what_cannot_work_is_refused_before_anybody_trains(told: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read_round(told).check()


def test_a_deadline_and_a_quorum() -> None:
    assert Round(deadline="10m").seconds == 600
    assert Round(deadline="1h30m").seconds == 5400
    assert [Round(sites=s, min_sites=m).quorum for s, m in ((3, 0), (3, 2), (0, 0), (0, 2))] == [3, 2, 1, 2]


def test_settings_travel_as_one_text() -> None:
    assert Round(settings=joined(["train.lr=0.1", "counts=noisy"])).assignments == ["train.lr=0.1", "counts=noisy"]
    with pytest.raises(BadInput, match="semicolon"):
        joined(["a=b;c=d"])


def test_a_node_must_say_its_data_and_its_name() -> None:
    with pytest.raises(BadInput, match="does not say its site"):
        read_node({"data": "/somewhere"})
    assert read_node({"data": "/somewhere", "site": "a"}).key == ""
    assert named(["/x/hospital-a/", "/x/hospital-b.npz"]) == {
        "hospital-a": "/x/hospital-a/",
        "hospital-b": "/x/hospital-b.npz",
    }
    assert list(named(["/x/images", "/y/images"])) == ["site-0", "site-1"]


def test_the_sites_own_settings_win_over_the_rounds() -> None:
    asked = Round(method="fedavg", epochs=20, settings="counts=exact")
    config = asked.config("digits", ["counts=binary", "train.epochs=2"])
    assert (config.counts, config.train["epochs"]) == ("binary", 2)


# -- a site


def test_a_site_answers_with_the_parcel_of_flyby_train_signed_with_its_key(tmp_path: Path) -> None:
    data = make_stripes(tmp_path / "site.npz", 60)
    secret, public, _ = signing.new_key("hospital-a", tmp_path)
    told = {"data": str(data), "site": "hospital-a", "key": str(secret)}
    made = answer(Round(method="fedavg", epochs=1, seed=5).scalars(), told)
    done(
        "train",
        "--data",
        data,
        "--method",
        "fedavg",
        "--epochs",
        1,
        "--seed",
        5,
        "--site",
        "hospital-a",
        "--key",
        secret,
        "--holdout",
        0,
        "--out",
        tmp_path / "a.parcel",
        "-q",
    )
    assert made == (tmp_path / "a.parcel").read_bytes()
    trust = signing.Trust()
    trust.add("hospital-a", signing.read_public(public))
    assert signing.verdict(signing.Signed.parcel(parcel.from_bytes(made)), trust).trusted_as == "hospital-a"


def test_a_parcel_that_is_too_large_is_not_sent(tmp_path: Path) -> None:
    data = make_stripes(tmp_path / "site.npz", 12)
    asked = Round(method="fedavg", epochs=1, model="resnet18", max_megabytes=40)
    with pytest.raises(BadInput, match=r"the parcel has 44\.\d MB and this round takes 40 MB"):
        answer(asked.scalars(), {"data": str(data), "site": "a"})


def test_an_excuse_says_what_is_wrong_but_not_where(tmp_path: Path) -> None:
    told = {"data": str(tmp_path / "patients"), "site": "a"}
    with pytest.raises(BadInput) as caught:
        answer(Round().scalars(), told)
    said = reason(caught.value, told)
    assert "<data> does not exist" in said
    assert str(tmp_path) not in said
    assert reason(RuntimeError(f"secret {tmp_path}"), told) == "RuntimeError at the site; its log says more"


# -- a server, with a grid made of paper


class PaperGrid:
    """Nodes as their names and what they answer: bytes, an excuse (str), an error of Flower's (int), None for never, or
    an Event that it hangs on."""

    def __init__(self, nodes: dict[str, Any], later: dict[str, Any] | None = None) -> None:
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1  # as Flower sets them for a ServerApp
        self.ids = {name: number for number, name in enumerate([*nodes, *(later or {})], 1)}
        self.answers = {**nodes, **(later or {})}
        self.later, self.looks = set(later or {}), 0
        self.asked: list[int] = []

    def get_nodes(self) -> list[Any]:
        self.looks += 1
        return [
            SimpleNamespace(node_id=number, name=name.removeprefix("?") if "?" not in name else "")
            for name, number in self.ids.items()
            if name not in self.later or self.looks > 2
        ]

    def push_messages(self, messages: list[Any]) -> list[str]:
        self.asked += [message.metadata.dst_node_id for message in messages]
        return [str(message.metadata.dst_node_id) for message in messages]

    def pull_messages(self, ids: list[str]) -> list[Any]:
        from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

        (answered,) = (self.answers[name] for name, number in self.ids.items() if str(number) == ids[0])
        if answered is None:
            return []
        if isinstance(answered, threading.Event):
            answered.wait()
        if isinstance(answered, int):
            return [
                SimpleNamespace(has_error=lambda: True, error=SimpleNamespace(code=answered, reason="some\nreason"))
            ]
        records = {SITE: ConfigRecord({"error": answered})} if isinstance(answered, str) else {}
        if isinstance(answered, bytes):
            records = {PARCEL: ArrayRecord({PARCEL: Array("uint8", (len(answered),), SERIAL, answered)})}
        return [SimpleNamespace(has_error=lambda: False, content=RecordDict(records))]


@pytest.fixture(scope="module")
def parcels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """One small trained parcel for each of some sites, of different seeds so that no two are copies."""
    folder = tmp_path_factory.mktemp("parcels")
    data = make_stripes(folder / "data.npz", 60)
    names = ("a", "b", "c")
    return {
        name: answer(Round(method="fedavg", epochs=1, seed=i).scalars(), {"data": str(data), "site": name})
        for i, name in enumerate(names)
    }


def rows(found: list[dict[str, Any]]) -> dict[str, str]:
    return {row["site"] or row["node"]: row["reason"] for row in found}


def a_round(out: Path, **told: Any) -> Round:
    return Round(
        **{"method": "fedavg", "fusion": "ensemble", "export": False, "deadline": "3s", "out": str(out), **told}
    )


@needs_flower
def test_all_came_each_asked_once(tmp_path: Path, parcels: dict[str, bytes]) -> None:
    grid = PaperGrid({"b": parcels["b"], "a": parcels["a"]}, later={"c": parcels["c"]})
    result = conduct(grid, a_round(tmp_path / "out", sites=3, deadline="10m"))
    assert sorted(grid.asked) == [1, 2, 3]
    assert result["status"] == "fused"
    assert result["seconds"]["collect"] < 300
    assert {row["site"]: row["bytes"] for row in result["came"]} == {name: len(data) for name, data in parcels.items()}
    assert result["bytes_up"] == sum(map(len, parcels.values()))
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == result
    assert {c.sender for c in Ledger.load(tmp_path / "out" / "ledger.json").crossings} == set(parcels)
    assert {p.stem: p.read_bytes() for p in (tmp_path / "out" / "parcels").glob("*.parcel")} == parcels
    assert not (tmp_path / ".out.inbox").exists()
    with pytest.raises(BadInput, match="already there"):
        conduct(grid, a_round(tmp_path / "out"))
    assert len(grid.asked) == 3


@needs_flower
def test_late_lost_and_failed_nodes_are_told_and_not_awaited(tmp_path: Path, parcels: dict[str, bytes]) -> None:
    hang = threading.Event()
    broken = parcels["a"][:-1]
    grid = PaperGrid(
        {
            "a": parcels["a"],
            "b": parcels["b"],
            "late": None,
            "hung": hang,
            "lost": 5,
            "crashed": 8,
            "sorry": "its disk\nis full",
            "cut": broken,
            "c": parcels["a"],
            "empty": object(),
        }
    )
    result = conduct(grid, a_round(tmp_path / "out", sites=10, min_sites=2, deadline="4s"))
    hang.set()
    assert 4 <= result["seconds"]["collect"] < WAIT
    assert sorted(row["site"] for row in result["came"]) == ["a", "b"]
    assert rows(result["late"]) == {
        "late": "no answer within 4s; still connected",
        "hung": "no answer within 4s; still connected",
    }
    failed = rows(result["failed"])
    assert failed["lost"] == "it disconnected while it was at work"
    assert failed["crashed"] == "Flower says: some reason"
    assert failed["sorry"] == "its disk is full"
    assert failed["c"] == "it was registered as c and sent a parcel of a"
    assert "its answer holds no parcel" in failed["empty"]
    assert "cut" in failed
    assert result["absent"] == 0
    assert sorted(p.stem for p in (tmp_path / "out" / "parcels").glob("*.parcel")) == ["a", "b"]
    assert str(tmp_path) not in json.dumps(result["failed"])


@needs_flower
def test_nobody_crosses_twice_under_one_name(tmp_path: Path, parcels: dict[str, bytes]) -> None:
    result = conduct(
        PaperGrid({"?1": parcels["a"], "?2": parcels["a"], "b": parcels["b"]}),
        a_round(tmp_path / "out", sites=3, min_sites=2),
    )
    assert sorted(row["site"] for row in result["came"]) == ["a", "b"]
    assert "each participant sends exactly one" in result["failed"][0]["reason"]
    assert result["uploads"] == 2
    result = conduct(
        PaperGrid({"?1": parcels["a"], "a": None, "b": parcels["b"]}), a_round(tmp_path / "posing", min_sites=1)
    )
    assert rows(result["failed"]) == {"1": "it was registered without a name and sent a parcel of a"}


@needs_flower
def test_below_the_quorum_there_is_no_model_and_nothing_is_lost(tmp_path: Path, parcels: dict[str, bytes]) -> None:
    grid = PaperGrid({"a": parcels["a"], "b": "no images here"})
    with pytest.raises(BadInput, match=r"1 of at least 2 parcels came within 30s \(b: no images here\)"):
        conduct(grid, a_round(tmp_path / "out", sites=2, deadline="30s"))
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (result["status"], result["uploads"], result["bytes_up"]) == ("too few", 1, len(parcels["a"]))
    assert not (tmp_path / "out" / "model.json").exists()
    assert (tmp_path / "out" / "parcels" / "a.parcel").read_bytes() == parcels["a"]
    with pytest.raises(BadInput, match="0 of at least 1 parcels came within 1s; no node was connected"):
        conduct(PaperGrid({}), a_round(tmp_path / "none", deadline="1s"))


@needs_flower
def test_only_signed_parcels_where_that_is_asked(tmp_path: Path, parcels: dict[str, bytes]) -> None:
    secret, public, _ = signing.new_key("a", tmp_path)
    signed = parcel.to_bytes(signing.sign(parcel.from_bytes(parcels["a"]), signing.read_private(secret)))
    trust = signing.Trust()
    trust.add("a", signing.read_public(public))
    trust.save(tmp_path / "trust.json")
    asked = a_round(tmp_path / "out", sites=2, min_sites=1, trust=str(tmp_path / "trust.json"), require_signed=True)
    result = conduct(PaperGrid({"a": signed, "b": parcels["b"]}), asked)
    assert [row["site"] for row in result["came"]] == ["a"]
    assert "is not signed" in rows(result["failed"])["b"]


@needs_flower
def test_a_round_that_was_cut_short_is_not_forgotten(tmp_path: Path, parcels: dict[str, bytes]) -> None:
    asked = a_round(tmp_path / "out", sites=1)
    roll: Roll = prepare(asked)
    collect(PaperGrid({"a": parcels["a"]}), asked, roll)
    with pytest.raises(BadInput, match="holds parcels of a round that was cut short"):
        prepare(asked)


# -- all of it, with real processes


def left_behind(mark: str) -> list[str]:
    """Living processes with ``mark`` in their environment or command, by their command."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes()
            if (
                int(entry.name) != os.getpid()
                and command
                and (mark.encode() in command or mark.encode() in (entry / "environ").read_bytes())
            ):
                found.append(command.replace(b"\0", b" ").decode(errors="replace"))
    return found


@contextlib.contextmanager
def recorded_proxy() -> Iterator[tuple[dict[str, str], list[bytes]]]:
    """A proxy that every program is told to use for the world outside; it only writes down what it was asked for."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        over = threading.Event()

        def listen() -> None:
            while not over.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    with connection:
                        asked.append(connection.recv(4096))

        thread = threading.Thread(target=listen)
        thread.start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            yield (
                {name: address for way in ("http_proxy", "https_proxy", "all_proxy") for name in (way, way.upper())},
                asked,
            )
        finally:
            over.set()
            thread.join()


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory, digits: DataBundle) -> dict[str, Path]:
    """The digits' training images, every other one at each of two sites."""
    folder = tmp_path_factory.mktemp("halves")
    names = np.array(digits.train.class_names)
    return {
        site: make_npz(
            folder / f"{site}.npz",
            x_train=digits.train.images[k::2],
            y_train=digits.train.labels[k::2],
            class_names=names,
        )
        for k, site in enumerate(("north", "south"))
    }


@needs_flower
@pytest.mark.slow
def test_a_federation_over_tls(tmp_path: Path, halves: dict[str, Path], digits: DataBundle) -> None:
    """One SuperLink, three rounds: a parcel of 54 MB; a killed, a failing and a strange node; a deadline that comes too
    soon."""
    with pytest.MonkeyPatch.context() as patch, recorded_proxy() as (proxies, asked_outside):
        patch.setattr("tempfile.tempdir", str(tmp_path))
        for name, address in proxies.items():
            patch.setenv(name, address)
        started = time.monotonic()
        with Federation() as federation:
            federation.add(NodeSettings(data=str(halves["north"]), site="north"))
            brought_up = time.monotonic() - started

            large = Round(
                method="fedavg",
                fusion="ensemble",
                model="resnet18",
                settings="model.width=1.1",
                epochs=1,
                sites=1,
                export=False,
                deadline="10m",
                out=str(tmp_path / "large"),
            )
            result = federation.run(large)
            assert result["bytes_up"] > 50_000_000
            sent = tmp_path / "large" / "parcels" / "north.parcel"
            assert (sent.stat().st_size, parcel.read(sent).manifest.spec.name) == (result["bytes_up"], "resnet18")

            endless = "train.epochs=100000"
            federation.add(
                NodeSettings(data=str(halves["south"]), site="south"),
                NodeSettings(data=str(halves["south"]), site="doomed", settings=endless),
                NodeSettings(data=str(tmp_path / "nowhere"), site="broken"),
            )
            federation.add(NodeSettings(data=str(halves["south"]), site="stranger"), registered=False)
            deadline = max(20, int(5 * brought_up))  # as slow as this machine is today
            killer = threading.Thread(target=kill_while_it_trains, args=(federation, "doomed"))
            killer.start()
            asked = Round(
                method="fedavg",
                fusion="ensemble",
                epochs=6,
                seed=3,
                sites=4,
                min_sites=2,
                deadline=f"{deadline}s",
                out=str(tmp_path / "quorum"),
                export=False,
            )
            result = federation.run(asked)
            killer.join()
            assert federation.processes["doomed"].wait(timeout=WAIT) == -signal.SIGKILL
            check_quorum_round(result, asked, tmp_path, halves, digits)
            assert federation.processes["stranger"].wait(timeout=WAIT) != 0
            assert "stranger" not in json.dumps(result)

            with pytest.raises(BadInput, match="0 of at least 3 parcels came within 1s"):
                federation.run(Round(method="fedavg", min_sites=3, deadline="1s", out=str(tmp_path / "hasty")))
            assert json.loads((tmp_path / "hasty" / "result.json").read_text())["status"] == "too few"
            assert len(federation.members()) >= 4
        assert federation.members() == []
        assert left_behind(str(federation.folder)) == []
        assert not federation.folder.exists()
        assert asked_outside == []


def kill_while_it_trains(federation: Federation, site: str) -> None:
    """SIGKILL for a SuperNode and its programs once its training has begun (its parcel's place is taken)."""
    limit = time.monotonic() + WAIT
    while not list((federation.folder / "work" / site).glob(f".{site}.parcel.*")) and time.monotonic() < limit:
        time.sleep(0.05)
    time.sleep(1)
    os.killpg(federation.processes[site].pid, signal.SIGKILL)


def check_quorum_round(
    result: dict[str, Any], asked: Round, folder: Path, halves: dict[str, Path], digits: DataBundle
) -> None:
    assert result["status"] == "fused"
    assert sorted(row["site"] for row in result["came"]) == ["north", "south"]
    assert rows(result["failed"])["broken"].startswith("<data> does not exist")
    lost = {**rows(result["late"]), **rows(result["failed"])}[
        "doomed"
    ]  # Flower may notice before our deadline, and need not
    assert "no answer within" in lost or "disconnected" in lost
    assert result["seconds"]["collect"] < 2 * asked.seconds
    assert digits.test is not None
    assert judged(folder / "quorum", digits.test, "cpu") > 0.85
    for site, data in halves.items():  # the very file that flyby train --holdout 0 would have written
        done(
            "train",
            "--data",
            data,
            "--method",
            "fedavg",
            "--epochs",
            6,
            "--seed",
            3,
            "--site",
            site,
            "--holdout",
            0,
            "--out",
            folder / f"{site}.parcel",
            "-q",
        )
        assert (folder / f"{site}.parcel").read_bytes() == (
            folder / "quorum" / "parcels" / f"{site}.parcel"
        ).read_bytes()


@needs_flower
def test_the_recording_proxy_sees_a_program_that_asks_outside(tmp_path: Path) -> None:
    """Without the setting that ``flyby flower`` gives it, Flower asks its makers for news: what the test above would
    notice."""
    with recorded_proxy() as (proxies, asked_outside):
        environment = (
            {k: v for k, v in os.environ.items() if not k.startswith("FLWR_")} | proxies | {"FLWR_HOME": str(tmp_path)}
        )
        subprocess.run(
            [str(Path(sys.executable).parent / "flwr"), "supernode", "list"],
            env=environment,
            capture_output=True,
            timeout=WAIT,
            check=False,
        )
    assert any(b"flower.ai" in line for line in asked_outside), asked_outside


@contextlib.contextmanager
def up_process(tmp_path: Path, *words: object) -> Iterator[subprocess.Popen[str]]:
    """``flyby flower up`` as a process of its own, whose temporary folders (and so its processes) are known by
    ``tmp_path``."""
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            command(
                "flower",
                "up",
                "--data",
                "digits",
                "--method",
                "fedavg",
                "--fusion",
                "ensemble",
                "--no-export",
                "--out",
                tmp_path / "out",
                *words,
            ),
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
        wait_for(lambda: not left_behind(str(tmp_path)), "the end of all processes")


def said(tmp_path: Path) -> str:
    return (tmp_path / "said").read_text()


@needs_flower
@pytest.mark.slow
def test_up_gives_what_run_gives_and_leaves_nothing(tmp_path: Path) -> None:
    words = ("--epochs", 2, "--alpha", 0.5, "--seed", 1)
    with up_process(tmp_path, "--nodes", 2, *words, "--deadline", "10m", "--json") as process:
        out, _ = process.communicate(timeout=WAIT)
        assert process.returncode == 0, said(tmp_path)
        assert left_behind(str(tmp_path)) == []
    result = json.loads(out)
    done(
        "run",
        "--data",
        "digits",
        "--clients",
        2,
        "--method",
        "fedavg",
        "--fusion",
        "ensemble",
        *words,
        "--out",
        tmp_path / "run",
        "--engine",
        "inline",
        "-q",
    )
    expected = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["accuracy"] == expected["accuracy"]
    for site in ("site-0", "site-1"):
        there, here = (
            parcel.read(tmp_path / folder / "parcels" / f"{site}.parcel").manifest for folder in ("out", "run")
        )
        assert there.tensors == here.tensors
        assert (there.counts, there.samples) == (here.counts, here.samples)
    assert not list(tmp_path.glob("flyby-*"))


@needs_flower
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_up_that_is_stopped_takes_everything_down(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    with up_process(tmp_path, "--nodes", 1) as process:
        wait_for(lambda: "SuperLink at" in said(tmp_path), "SuperLink")
        assert any("flower-superlink" in line for line in left_behind(str(tmp_path)))
        process.send_signal(number)
        code = process.wait(timeout=WAIT)
        wait_for(lambda: not left_behind(str(tmp_path)), "the end of all processes")
    if number == signal.SIGKILL:  # nobody was there to tidy up; but Linux ended what it had started
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        assert len([*take_dead("flyby-flower"), *take_dead("flyby-sites")]) == 2  # as the next one does first of all
        assert not list(tmp_path.glob("flyby-*"))
        return
    assert code == 130
    assert said(tmp_path).endswith("flyby: interrupted\n")
    assert not list(tmp_path.glob("flyby-*"))
    assert not (tmp_path / "out").exists()


def test_up_refuses_in_one_line(tmp_path: Path) -> None:
    assert "is already there" in one_line(call("flower", "up", "--out", tmp_path.parent))
    assert "does not fit 2 sources" in one_line(call("flower", "up", "--data", "a", "--data", "b", "--nodes", 3))
    assert "3 parcels cannot come from 2 sites" in one_line(
        call("flower", "up", "--nodes", 2, "--min-sites", 3, "--out", tmp_path / "x")
    )
    assert "is not a duration" in one_line(call("flower", "up", "--deadline", "soon", "--out", tmp_path / "x"))
    assert "sends nothing" in one_line(call("flower", "up", "--method", "fol", "--out", tmp_path / "x"))
    assert "does not exist" in one_line(call("flower", "up", "--data", tmp_path / "no/where", "--out", tmp_path / "x"))


def test_without_flower_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'flyby[flower]'" in one_line(call("flower", "up", "--out", tmp_path / "x"))


def test_an_interrupt_that_was_dropped_on_the_way_is_heard_at_the_end() -> None:
    """An exception in a finaliser goes nowhere; that it came must not be forgotten."""
    reached = []

    def work() -> None:
        with interruptible():
            with contextlib.suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(5)
            reached.append(1)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == [1]
    assert signal.getsignal(signal.SIGTERM) is before
