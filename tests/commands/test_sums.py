"""``flyby fuse`` where sums add up: a late site, a site that withdraws, and hubs that send their regions on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from factories import call, done, make_npz, one_line, stripes
from flyby.models import backbones
from flyby.parcels import parcel
from flyby.parcels.ledger import Ledger


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four sites' parcels, with exact sums; the last holds one class alone."""
    folder = tmp_path_factory.mktemp("sites")
    images, labels = stripes(160)
    parts = [*np.array_split(np.arange(120), 3), np.flatnonzero(labels == 2)[-12:]]
    for name, rows in zip("abcd", parts, strict=True):
        data = make_npz(
            folder / f"{name}.npz",
            images=images[rows],
            labels=labels[rows],
            class_names=np.array(["rows", "columns", "checks"]),
        )
        exact = "objective.send=[feature-sums:dtype=float64]"
        done("train", "--data", data, "--method", "ridge", "--out", folder / f"{name}.parcel", "--set", exact, "-q")
    return folder


def fused(sites: Path, out: Path, names: str, *more: object) -> Path:
    done("fuse", *(sites / f"{name}.parcel" for name in names), "--out", out, "--no-export", *more)
    return out


def model(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def same(one: Path, other: Path) -> bool:
    """Whether two models are one but for rounding: sums of sums are the same to 1e-10, of which float32 sees a bit."""
    pairs = zip(*(load_file(folder / "model.safetensors").values() for folder in (one, other)), strict=True)
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)


@pytest.mark.parametrize("rule", ["ridge", "lda", "nb", "fishermix"])
def test_a_late_site_and_one_that_withdraws_leave_the_model_of_those_who_are_in_it(
    sites: Path, tmp_path: Path, rule: str
) -> None:
    out = fused(sites, tmp_path / "global", "abc", "--fusion", rule)
    added = done("fuse", "--add", sites / "d.parcel", out, "--no-export", "--json").json
    assert (added["added"], added["sites"], added["fusion"]) == (["d"], 4, rule)
    assert model(out) == model(fused(sites, tmp_path / "all", "abcd", "--fusion", rule))
    assert Ledger.load(out / "ledger.json").uploads() == 4
    removed = done("fuse", "--remove", "b", out, "--out", tmp_path / "less", "--no-export", "--json").json
    assert (removed["removed"], removed["sites"]) == (["b"], 3)
    assert model(tmp_path / "less") == model(fused(sites, tmp_path / "acd", "acd", "--fusion", rule))
    assert b'"sender":"b"' not in (tmp_path / "less" / "sums.safetensors").read_bytes(), "its sums are gone"
    assert model(out) == model(tmp_path / "all"), "--out leaves the older model as it is"


def test_settings_stay_with_the_model_and_can_be_changed(sites: Path, tmp_path: Path) -> None:
    out = fused(sites, tmp_path / "global", "ab", "--set", "lam=0.3", "--set", "keep=total")
    done("fuse", "--add", sites / "c.parcel", out, "--no-export")
    assert same(out, fused(sites, tmp_path / "same", "abc", "--set", "lam=0.3"))
    line = one_line(call("fuse", "--remove", "b", out, "--no-export"))
    assert "b is in the sum total, of which only the whole is kept" in line
    done("fuse", "--remove", sites / "b.parcel", out, "--no-export", "--set", "lam=2", "--fusion", "ridge")
    assert same(out, fused(sites, tmp_path / "ac", "ac", "--set", "lam=2"))
    assert not same(out, tmp_path / "same")
    done("fuse", "--add", sites / "d.parcel", out, "--fusion", "lda", "--no-export")
    assert json.loads((out / "model.json").read_text())["card"]["fusion"] == "lda"


def test_a_tree_of_hubs_gives_the_model_of_one_server(sites: Path, tmp_path: Path) -> None:
    north, top, book = tmp_path / "north.parcel", tmp_path / "top.parcel", tmp_path / "book.json"
    said = done("fuse", "--partial", north, *(sites / f"{n}.parcel" for n in "ab"), "--ledger", book, "--json").json
    assert (said["sender"], said["sites"]) == ("north", 2)
    assert [(c.sender, c.receiver) for c in Ledger.load(book).crossings] == [("a", "north"), ("b", "north")]
    done("fuse", "--partial", top, north, sites / "c.parcel", "--no-names")
    assert parcel.read_manifest(top).sites == 3
    assert "site_names" not in parcel.read_manifest(top).meta
    done("fuse", top, sites / "d.parcel", "--out", tmp_path / "tree", "--no-export")
    flat = fused(sites, tmp_path / "flat", "abcd")
    assert Ledger.load(tmp_path / "tree" / "ledger.json").sites() == 4
    assert same(tmp_path / "tree", flat)
    again = one_line(call("fuse", top, sites / "a.parcel", "--out", tmp_path / "twice"))
    assert "counts in a and again in top; each site counts once" in again


def test_a_signed_folder_covers_its_sums(sites: Path, tmp_path: Path) -> None:
    out = fused(sites, tmp_path / "global", "ab")
    done("keys", "new", "server", "--out", tmp_path)
    key = next(path for path in tmp_path.iterdir() if path.suffix == ".key" or "private" in path.name)
    done("sign", out, "--key", key)
    sums = out / "sums.safetensors"
    whole = sums.read_bytes()
    sums.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "sums.safetensors was changed after server signed it" in one_line(
        call("fuse", "--add", sites / "c.parcel", out)
    )
    sums.write_bytes(whole)
    done("fuse", "--add", sites / "c.parcel", out, "--no-export")
    assert not (out / "signature.json").exists(), "who changed the model must sign it again"


def test_what_cannot_be_is_one_line(sites: Path, tmp_path: Path) -> None:
    out, a, d = fused(sites, tmp_path / "global", "abc"), sites / "a.parcel", sites / "d.parcel"
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    cases = {
        "a is in the ledger of an earlier fusion": ("--add", a, out),
        "z is not in this model; it is made of a, b, c": ("--remove", "z", out),
        "nothing would be left": ("--remove", "a", "--remove", "b", "--remove", "c", out),
        "name the one model folder": ("--add", d),
        "three different things": ("--add", d, "--partial", tmp_path / "x.parcel", out),
        "without --out": ("--partial", tmp_path / "x.parcel", a, "--out", tmp_path / "y"),
        "fedavg cannot be solved from sums": ("--add", d, out, "--fusion", "fedavg"),
        "only sums can be put together": ("--partial", tmp_path / "x.parcel", a, d, "--fusion", "fedavg"),
        "a site cannot be called": ("--partial", tmp_path / "no name.parcel", a, d),
        "name the folder to write with --out": (a, d),
    }
    for said, words in cases.items():
        assert said in one_line(call("fuse", *words)), said
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    plain = tmp_path / "plain"
    done("fuse", a, d, "--fusion", "ensemble", "--out", plain, "--no-export", "--min-sites", 1)
    assert "keeps no sums" in one_line(call("fuse", "--remove", "a", plain))


def test_a_changed_model_is_judged_as_a_fused_one_is(sites: Path, tmp_path: Path) -> None:
    images, labels = stripes(90, seed=5)
    names = np.array(["rows", "columns", "checks"])
    clean = make_npz(tmp_path / "clean.npz", images=images, labels=labels, class_names=names)
    wrong = make_npz(tmp_path / "wrong.npz", images=images, labels=(labels + 1) % 3, class_names=names)
    out = fused(sites, tmp_path / "global", "ab")
    before = (out / "model.safetensors").read_bytes()
    words = ("fuse", "--add", sites / "d.parcel", out, "--no-export", "--json", "--out", tmp_path / "more")
    said = done(*words, "--validation", clean).json["validation"]
    assert said["images"] == 90
    assert said["better_than_chance"]
    assert said["accuracy"] > 0.8
    assert said["worse_than_before"] == (said["accuracy"] < said["before_accuracy"])
    line = one_line(call("fuse", "--remove", "b", out, "--no-export", "--validation", wrong))
    assert "no better than chance on the validation images" in line
    assert "the model before has" in line
    assert (out / "model.safetensors").read_bytes() == before
    kept = done("fuse", "--remove", "b", out, "--no-export", "--validation", wrong, "--keep-bad", "--json")
    assert not kept.json["validation"]["better_than_chance"]
    assert any("WARNING" in note for note in kept.json["notes"])


def test_a_site_is_added_to_and_taken_out_of_the_model_of_a_run(tmp_path: Path) -> None:
    exact = "objective.send=[feature-sums:dtype=float64]"
    words = ("--method", "ridge", "--data", "digits", "--set", exact, "-q")
    done("run", *words, "--clients", 3, "--alpha", 5, "--out", tmp_path / "run")
    sent = sorted((tmp_path / "run").rglob("site-*.parcel"))
    assert len(sent) == 3
    model_folder = tmp_path / "run" / "global"
    assert (model_folder / "sums.safetensors").is_file()
    done("fuse", "--remove", "site-1", model_folder, "--out", tmp_path / "less", "--no-export")
    rest = [path for path in sent if path.stem != "site-1"]
    done("fuse", *rest, "--out", tmp_path / "rest", "--no-export", "--fusion", "ridge")
    assert model(tmp_path / "less") == model(tmp_path / "rest")
    done("fuse", "--add", next(path for path in sent if path.stem == "site-1"), tmp_path / "less", "--no-export")
    assert model(tmp_path / "less") == model(model_folder)


def test_a_fused_model_over_a_backbone_is_exported_by_a_process_that_never_saw_it(sites: Path, tmp_path: Path) -> None:
    """A server that adds up sums has no need of the backbone before that."""
    public = tmp_path / "public.parcel"
    done("train", "--data", sites / "a.npz", "--method", "fedavg", "--epochs", 1, "--out", public, "-q")
    for name in "bc":
        words = ("--method", "ridge", "--backbone", public, "--out", tmp_path / f"{name}.parcel", "-q")
        done("train", "--data", sites / f"{name}.npz", *words)
    backbones._HELD.clear()
    done("fuse", tmp_path / "b.parcel", tmp_path / "c.parcel", "--out", tmp_path / "global")
    images, labels = stripes(30, seed=9)
    with torch.no_grad():
        program = torch.export.load(tmp_path / "global" / "model.pt2").module()
        answers = program(torch.from_numpy(images)).argmax(1)
    data = make_npz(
        tmp_path / "test.npz", images=images, labels=labels, class_names=np.array(["rows", "columns", "checks"])
    )
    said = done("evaluate", tmp_path / "global", "--data", data, "--json").json["accuracy"]
    assert said == pytest.approx(float((answers == torch.from_numpy(labels)).double().mean()))
