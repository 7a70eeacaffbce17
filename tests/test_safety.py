"""What a hostile or merely unlucky file system may not do: links and pipes in the place of locks, folders of somebody
else in the place of outputs, odd names in the quarantine, keys under which anybody can sign."""

from __future__ import annotations

import base64
import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from factories import call, done, one_line, random_parcel
from flyby import files
from flyby.commands.keys import trust
from flyby.errors import BadInput
from flyby.fusion.base import Server
from flyby.fusion.predictor import Predictor, check_replaceable
from flyby.fusion.weights.average import FedAvg
from flyby.parcels import parcel, signing
from flyby.parcels.gate import Gate, open_gate
from flyby.parcels.inbox import Inbox
from flyby.parcels.ledger import Ledger
from flyby.parcels.parcel import Manifest, Parcel
from flyby.parcels.signing import Trust

ROOT = Path(__file__).parents[1]
P = 2**255 - 19
D = -121665 * pow(121666, -1, P) % P
ORDER = 2**252 + 27742317777372353535851937790883648493


# -- locks


def test_a_link_in_the_place_of_a_lock_is_refused_and_its_target_stays(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".global.lock").symlink_to(victim)
    with pytest.raises(BadInput, match="not a plain file"), files.sole_writer(tmp_path / "global"):
        pytest.fail("it was taken")
    assert victim.read_text() == "precious"


def test_a_pipe_in_the_place_of_a_lock_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".global.lock")
    with pytest.raises(BadInput, match="not a plain file"), files.sole_writer(tmp_path / "global"):
        pytest.fail("it was taken")


def test_the_lock_of_a_run_folder_follows_no_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(victim)
    words = ("run", "--method", "local", "--data", "digits", "--epochs", 1, "--clients", 2, "-q", "--out")
    assert "not a plain file" in one_line(call(*words, tmp_path / "run"))
    assert victim.read_text() == "precious"


# -- outputs


def uploads(folder: Path) -> list[Path]:
    paths = [folder / f"{name}.parcel" for name in ("a", "b")]
    for seed, path in enumerate(paths):
        parcel.write(random_parcel(path.stem, seed=seed), path)
    return paths


@pytest.mark.parametrize("extra", ["thesis.txt", "model.json", ".git"])
def test_only_what_flyby_wrote_is_replaced(tmp_path: Path, extra: str) -> None:
    paths, out = uploads(tmp_path), tmp_path / "global"
    out.mkdir()
    (out / "model.json").write_text(json.dumps({"my": "own"}))
    if extra != "model.json":
        (out / extra).write_text("precious")
    said = one_line(call("fuse", *paths, "--fusion", "fedavg", "--no-export", "--out", out))
    assert "name a new folder" in said
    assert json.loads((out / "model.json").read_text()) == {"my": "own"}


def test_the_folder_one_is_in_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, out = uploads(tmp_path), tmp_path / "global"
    out.mkdir()
    monkeypatch.chdir(out)
    assert "you are in it" in one_line(call("fuse", *paths, "--fusion", "fedavg", "--no-export", "--out", "."))
    assert not list(out.iterdir())


def test_an_older_model_is_replaced_and_one_with_something_added_is_not(tmp_path: Path) -> None:
    paths, out = uploads(tmp_path), tmp_path / "global"
    words = ("fuse", *paths, "--fusion", "fedavg", "--no-export", "--out", out)
    done(*words)
    done(*words)
    (out / "notes.txt").write_text("precious")
    assert "'notes.txt'" in one_line(call(*words))
    assert (out / "notes.txt").read_text() == "precious"


def test_an_output_that_is_a_link_is_refused(tmp_path: Path) -> None:
    paths = uploads(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    for name, target in (("link", "elsewhere"), ("dangling", "nowhere")):
        (tmp_path / name).symlink_to(tmp_path / target)
        said = one_line(call("fuse", *paths, "--fusion", "fedavg", "--no-export", "--out", tmp_path / name))
        assert "is a link" in said
        assert (tmp_path / name).is_symlink()
    assert not list((tmp_path / "elsewhere").iterdir())
    with pytest.raises(BadInput, match="is a link"):
        check_replaceable(tmp_path / "link")


def test_a_crossing_that_cannot_be_written_down_gives_no_model(tmp_path: Path) -> None:
    paths, ledger = uploads(tmp_path), tmp_path / "ledger.json"
    words = ("fuse", *paths, "--fusion", "fedavg", "--no-export", "--ledger", ledger, "--out", tmp_path / "global")
    (tmp_path / ".ledger.json.lock").mkdir()  # nobody can hold this lock
    assert call(*words).code == 2
    assert not (tmp_path / "global").exists()
    (tmp_path / ".ledger.json.lock").rmdir()
    done(*words)
    assert len(json.loads(ledger.read_text())["crossings"]) == 2


# -- the quarantine


@pytest.mark.parametrize("name", [b"x" * 240 + b".parcel", b"caf\xe9.parcel", b"a b\x1b[31m.parcel", b"..x.parcel"])
def test_any_name_can_be_put_in_quarantine(tmp_path: Path, name: bytes) -> None:
    path = tmp_path / os.fsdecode(name)
    path.write_bytes(b"not a parcel")
    gate = Gate(quarantine=tmp_path / "refused")
    assert gate.try_check(path) is None
    gate.isolate()
    kept = sorted(p.name for p in (tmp_path / "refused").iterdir())
    assert len(kept) == 2
    assert all(one.isascii() and one.isprintable() for one in kept)
    assert not path.exists()


def test_a_sparse_file_is_not_written_out_on_another_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 30)

    def elsewhere(*_: object) -> None:
        raise OSError(18, "another disk")  # EXDEV

    monkeypatch.setattr(os, "rename", elsewhere)
    assert not files.moved(path, tmp_path / "taken", 1 << 40)
    assert path.exists()
    assert not (tmp_path / "taken").exists()


# -- keys


def add(p: tuple[int, int], q: tuple[int, int]) -> tuple[int, int]:
    """The sum of two points of Ed25519, straight from the curve's law."""
    (x1, y1), (x2, y2) = p, q
    t = D * x1 * x2 * y1 * y2
    return (
        (x1 * y2 + x2 * y1) * pow(1 + t, -1, P) % P,
        (y1 * y2 + x1 * x2) * pow(1 - t, -1, P) % P,
    )


def times(n: int, p: tuple[int, int]) -> tuple[int, int]:
    total = (0, 1)
    while n:
        total, p, n = add(total, p) if n & 1 else total, add(p, p), n >> 1
    return total


def point(y: int) -> tuple[int, int] | None:
    """A point with this y, if there is one."""
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    if (x * x - square) % P:
        x = x * pow(2, (P - 1) // 4, P) % P
    return (x, y) if (x * x - square) % P == 0 else None


def test_the_keys_of_small_order_are_all_there() -> None:
    """A second way: all multiples of ORDER times some points; with the two encodings above p they are the table."""
    found: set[int] = set()
    for y in range(2, 40):
        start = point(y)
        if start is not None:
            torsion = times(ORDER, start)
            found |= {times(k, torsion)[1] for k in range(8)}
    assert len(found) == 5
    encoded = {y.to_bytes(32, "little") for y in found} | {(y + P).to_bytes(32, "little") for y in (0, 1)}
    assert encoded == signing._SMALL_ORDER


def test_a_key_of_small_order_is_refused_wherever_it_comes_from(tmp_path: Path) -> None:
    for raw in signing._SMALL_ORDER:
        for sign in (0, 0x80):
            text = base64.b64encode(raw[:-1] + bytes([raw[-1] | sign])).decode()
            (tmp_path / "evil.pub").write_text(f"flyby-ed25519 {text} evil\n")
            with pytest.raises(BadInput, match="small order"):
                signing.read_public(tmp_path / "evil.pub")
            (tmp_path / "trust.json").write_text(json.dumps({"schema_version": 1, "senders": {"evil": [text]}}))
            with pytest.raises(BadInput, match="small order"):
                Trust.load(tmp_path / "trust.json")


def test_keys_trusted_at_the_same_time_are_all_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is on an open file, so that threads stand for processes; each reads long before it writes."""
    names = [f"site-{k}" for k in range(6)]
    for name in names:
        signing.new_key(name, tmp_path)
    path, real = tmp_path / "trust.json", Trust.load

    def slow(where: Path) -> Trust:
        found = real(where)
        time.sleep(0.05)
        return found

    monkeypatch.setattr(Trust, "load", slow)
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(lambda name: trust(path, tmp_path / f"{name}.pub"), names))
    assert sorted(real(path).senders) == names


def test_half_a_key_pair_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(BadInput, match="cannot write"):
            signing.new_key("a", tmp_path)
    assert not list(tmp_path.iterdir())
    signing.new_key("a", tmp_path)


# -- deep JSON


@pytest.mark.parametrize("word", ["evaluate", "keys", "fuse"])
def test_deep_json_is_one_line(tmp_path: Path, word: str) -> None:
    deep = "[" * 200_000 + "]" * 200_000
    (tmp_path / "deep.json").write_text(deep)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.json").write_text(deep)
    signing.new_key("a", tmp_path)
    asked = {
        "evaluate": ("evaluate", tmp_path / "model", "--data", "digits"),
        "keys": ("keys", "trust", tmp_path / "deep.json", tmp_path / "a.pub"),
        "fuse": ("fuse", *uploads(tmp_path), "--ledger", tmp_path / "deep.json", "--out", tmp_path / "out"),
    }[word]
    one_line(call(*asked))


def test_inspect_takes_any_name(tmp_path: Path) -> None:
    for name in ("[/x].parcel", "caf\udce9.parcel", "\u202egnp.parcel", "\x1b[31mred.parcel", "a\rb.parcel"):
        path = tmp_path / name
        parcel.write(random_parcel("a"), path)
        for answer in (done("inspect", path), call("inspect", path.with_suffix(".absent"))):
            assert "\u202e" not in answer.out + answer.err
            assert "\udce9" not in answer.out + answer.err
            assert not set("\x1b\r") & set(answer.out + answer.err)


@pytest.mark.parametrize("name", ["\u202elive", "\u2067cat", "dog\x1b[31m", "a\u2028b"])
def test_no_parcel_takes_a_class_name_that_turns_or_escapes(name: str) -> None:
    item = random_parcel("a")
    with pytest.raises(BadInput):
        parcel.make(weights=item.weights, **item.manifest.facts | {"class_names": (name, "b", "c")})


# -- the gate sees what a rule will use


def with_extras(name: str, seed: int, extras: dict[str, torch.Tensor]) -> Parcel:
    item = random_parcel(name, seed=seed)
    return parcel.make(weights=item.weights, extras=extras, **item.manifest.facts)


def test_one_that_lacks_what_the_rule_needs_is_refused_and_the_rest_goes_on(tmp_path: Path) -> None:
    table = torch.tensor([[0.9, 0.8, 0.9], [0.1, 0.2, 0.1], [0.1, 0.1, 0.1]])
    for seed, name in enumerate("abc"):
        extras = {} if name == "c" else {"calibration": table}
        parcel.write(with_extras(name, seed, extras), tmp_path / f"{name}.parcel")
    words = ("fuse", *sorted(tmp_path.glob("*.parcel")), "--fusion", "experts-calibrated", "--no-export", "--json")
    assert "does not carry calibration" in one_line(call(*words, "--out", tmp_path / "all"))
    answer = done(*words, "--min-sites", 2, "--out", tmp_path / "two").json
    assert answer["sites"] == 2
    assert [(one["sender"], one["stage"]) for one in answer["refused"]] == [("c", "fit")]


def test_a_copy_with_a_junk_extra_is_a_copy_and_the_trusted_sender_stays(tmp_path: Path) -> None:
    honest = random_parcel("hospital")
    secret, public, _ = signing.new_key("hospital", tmp_path)
    thief, _, _ = signing.new_key("athief", tmp_path)
    trust = Trust()
    trust.add("hospital", signing.read_public(public))
    facts = honest.manifest.facts | {"sender": "athief"}
    copy = parcel.make(weights=honest.weights, extras={"junk": torch.ones(1)}, **facts)
    gate = Gate(trust=trust)
    gate.check(signing.sign(copy, signing.read_private(thief)))  # it comes first, and signs too
    gate.check(signing.sign(honest, signing.read_private(secret)))
    assert [one.manifest.sender for one in gate.settle()] == ["hospital"]
    assert [(one.sender, one.stage) for one in gate.refused] == [("athief", "copy")]


class Spoilt(FedAvg):
    def combine(self, parcels: Inbox, server: Server) -> Predictor:
        made = super().combine(parcels, server)
        with torch.no_grad():
            next(made.parameters()).fill_(float("nan"))
        return made


def test_a_fused_model_that_is_not_finite_is_not_kept() -> None:
    with pytest.raises(BadInput, match=r"whose networks\.0\..* is not finite"):
        Spoilt().fuse(Inbox([random_parcel("a"), random_parcel("b", seed=1)]))


# -- watching


def test_watching_reads_the_ledger_and_the_trust_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox, ledger, trust = tmp_path / "inbox", tmp_path / "standing.json", tmp_path / "trust.json"
    known = Trust()
    for seed in range(6):
        secret, public, _ = signing.new_key(f"site-{seed}", tmp_path)
        known.add(f"site-{seed}", signing.read_public(public))
        item = signing.sign(random_parcel(f"site-{seed}", seed=seed), signing.read_private(secret))
        parcel.write(item, inbox / f"{seed}.parcel")
    known.save(trust)
    Ledger().save(ledger)
    reads: list[str] = []
    plain = files.read_json
    monkeypatch.setattr(files, "read_json", lambda path: (reads.append(Path(path).name), plain(path))[1])
    words = ("--watch", inbox, "--expect", 6, "--poll", "1s", "--trust", trust, "--require-signed", "--ledger", ledger)
    done("fuse", *words, "--fusion", "fedavg", "--no-export", "--out", tmp_path / "global")
    assert reads.count("trust.json") == 1
    assert reads.count("standing.json") == 2  # and once more under its lock, when the crossings are added to it


def test_a_ledger_or_trust_file_that_changes_is_read_again(tmp_path: Path) -> None:
    trust, ledger, known = tmp_path / "trust.json", tmp_path / "ledger.json", Trust()
    known.save(trust)
    Ledger().save(ledger)
    item = random_parcel("a")
    path = tmp_path / "a.parcel"
    parcel.write(item, path)

    def look() -> Manifest:
        return open_gate("server", tmp_path / "out", trust=trust, ledger=ledger).check(path).manifest

    assert look().sender == "a"
    standing = Ledger()
    standing.record("a", "server", 1, "d")
    standing.save(ledger)
    with pytest.raises(BadInput, match="second crossing"):
        look()
    Ledger().save(ledger)
    assert look().sender == "a"
    known.add("a", signing.read_public(signing.new_key("a", tmp_path)[1]))
    known.save(trust)
    with pytest.raises(BadInput, match="is not signed, and a signs"):
        look()
    trust.unlink()
    with pytest.raises(BadInput, match="does not exist"):
        look()


# -- what SECURITY.md says


def test_the_table_of_promises_names_tests_that_exist() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and "(`tests/" in line]
    assert len(rows) >= 13
    for row in rows:
        named = re.findall(r"`((?:tests/[\w/]*)?test_\w+\.py)`", row)
        assert named, row
        folder = Path(named[0]).parent
        for name in named:
            assert (ROOT / (name if "/" in name else folder / name)).is_file(), name
