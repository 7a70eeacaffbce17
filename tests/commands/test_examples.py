"""The documentation, held to what it says: every example in docs/ is run, every number that can be counted again is
counted again."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_safetensors

from factories import WAIT, Answer, done, make_tree
from flyby.data.dataset import DataBundle
from flyby.data.splits import SPLITS, SplitSettings, make_split
from flyby.fusion import FUSIONS, Inbox, load_predictor
from flyby.fusion.evaluation import accuracy, evaluate_dataset
from flyby.models import ModelSpec
from flyby.parcels import parcel
from flyby.parcels.codecs import CODECS
from flyby.runs.methods import METHODS

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "my_method"
TINY = ModelSpec(name="mlp", classes=10, channels=1, size=(8, 8), widths={"fc1": 12, "fc2": 8})


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def blocks(name: str) -> list[str]:
    """The Python of a page, block by block."""
    return re.findall(r"^```python\n(.*?)^```$", page(name), flags=re.S | re.M)


def tables(name: str) -> list[list[list[str]]]:
    """The tables of a page: rows of cells, without the rule under the heading."""
    found = re.findall(r"(?:^\|.*\|\n)+", page(name), flags=re.M)
    return [
        [
            [c.strip() for c in re.split(r"(?<!\\)\|", row)[1:-1]]
            for row in t.splitlines()
            if not set(row) <= set("|-: ")
        ]
        for t in found
    ]


def words(cell: str) -> list[str]:
    """What stands in backquotes."""
    return re.findall(r"`([^`]+)`", cell)


def made(
    sender: str, *, spec: ModelSpec = TINY, codec: str = "fp32", weights: dict[str, torch.Tensor] | None = None
) -> parcel.Parcel:
    state = weights or dict(spec.build().state_dict())
    counts = [1000] * spec.classes
    names = [str(i) for i in range(spec.classes)]
    return parcel.make(
        sender=sender,
        method="supervised",
        spec=spec,
        class_names=names,
        weights=state,
        samples=sum(counts),
        counts=counts,
        codec=codec,
    )


def python(code: str, cwd: Path, *flags: str) -> str:
    """What some code prints in a Python of its own."""
    ended = subprocess.run(
        [sys.executable, *flags, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=WAIT, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


# -- docs/add-a-method.md


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The example's module, read from where it lies."""
    spec = importlib.util.spec_from_file_location("my_method", EXAMPLE / "my_method.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process beside whose packages pip has installed the example, from a copy of its folder."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(EXAMPLE, folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    offline = "-m pip install --quiet --no-index --no-deps --no-build-isolation --disable-pip-version-check --target"
    command = [sys.executable, *offline.split(), str(folder / "packages"), str(folder / "source")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=False)
    assert ended.returncode == 0, ended.stderr
    return {**os.environ, "PYTHONPATH": str(folder / "packages")}


def flyby(installed: dict[str, str], *words: object) -> subprocess.CompletedProcess[str]:
    """The command line in a process that has the example."""
    command = [sys.executable, "-m", "flyby", *map(str, words)]
    return subprocess.run(command, env=installed, capture_output=True, text=True, timeout=WAIT, check=False)


def answers(installed: dict[str, str], *lines: list[object]) -> list[Answer]:
    """What some command lines leave, one after another in one process that has the example."""
    code = "import json, sys; from factories import call;"
    code += " print(json.dumps([vars(call(*words)) for words in json.loads(sys.argv[1])]))"
    told = json.dumps([[*map(str, words)] for words in lines])
    here = installed | {"PYTHONPATH": os.pathsep.join((installed["PYTHONPATH"], str(Path(__file__).parents[1])))}
    command = [sys.executable, "-c", code, told]
    ended = subprocess.run(command, env=here, capture_output=True, text=True, timeout=WAIT, check=False)
    assert ended.returncode == 0, ended.stderr
    return [Answer(**one) for one in json.loads(ended.stdout)]


@pytest.fixture(scope="module")
def compared(installed: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, run as its page says, only shorter."""
    out = tmp_path_factory.mktemp("median") / "out"
    options = "--data digits --clients 3 --alpha 100 --epochs 4 --model mlp --engine processes -q --out"
    ended = flyby(installed, "run", "--method", "fedavg,mine", *options.split(), out)
    assert ended.returncode == 0, ended.stderr
    return out


def test_the_page_holds_the_example_and_its_test_word_for_word() -> None:
    code, test = blocks("add-a-method")
    assert code == (EXAMPLE / "my_method.py").read_text()
    assert len(code.splitlines()) <= 70
    assert test in Path(__file__).read_text()
    (package,) = re.findall(r"^```toml\n(.*?)^```$", page("add-a-method"), flags=re.S | re.M)
    assert package == (EXAMPLE / "pyproject.toml").read_text()


def test_the_page_names_every_group_of_entry_points() -> None:
    groups = {word for row in tables("add-a-method")[0][1:] for word in words(row[0])}
    used = {
        match for path in (ROOT / "src").rglob("*.py") for match in re.findall(r'group="([\w.]+)"', path.read_text())
    }
    assert groups == used


def test_the_middle_of_the_sites_values(example: ModuleType) -> None:
    values = torch.tensor([[1.0, 5.0], [100.0, -7.0], [2.0, 6.0]])  # three sites, two weights
    assert example.middle(values, 0.5).tolist() == [2.0, 5.0]
    even = torch.tensor([1.0, 4.0, 2.0, 100.0])
    assert example.middle(even, 0.5).item() == 3.0  # between the two in the middle
    assert example.middle(even, 0.0).item() == 26.75  # the plain mean
    assert example.middle(torch.tensor([7, 9, 8]), 0.5).item() == 9  # a counter


def test_the_example_learns_beside_fedavg_on_the_same_uploads(compared: Path) -> None:
    results = {name: json.loads((compared / name / "result.json").read_text()) for name in ("fedavg", "mine")}
    assert all(result["accuracy"] > 0.7 for result in results.values())
    assert [results[name]["trained"] for name in ("fedavg", "mine")] == [3, 0]
    assert (results["mine"]["fusion"], results["mine"]["uploads"]) == ("middle", 3)
    ours, theirs = (json.loads((compared / name / "ledger.json").read_text()) for name in results)
    assert ours == theirs
    assert "mine" in (compared / "report.html").read_text()


def test_one_wild_site_harms_the_mean_and_not_the_median(
    compared: Path, example: ModuleType, digits: DataBundle
) -> None:
    assert digits.test is not None
    honest = [parcel.read(path) for path in sorted((compared / "mine" / "parcels").glob("*.parcel"))]
    wild = {
        name: -10 * v if v.is_floating_point() and "running_var" not in name else v
        for name, v in honest[0].weights.items()
    }
    box = Inbox([made("site-0", spec=honest[0].manifest.spec, weights=wild), *honest[1:]])
    found = {}
    for rule in (FUSIONS["fedavg"], example.Median):
        scores, part = evaluate_dataset(rule().fuse(box), digits.test)
        found[rule.name] = accuracy(scores, part.labels)
    assert found["fedavg"] < 0.2
    assert found["middle"] > 0.6


def test_every_command_knows_the_example(installed: dict[str, str], compared: Path, tmp_path: Path) -> None:
    parcels = sorted((compared / "mine" / "parcels").glob("*.parcel"))
    lines: list[list[object]] = [
        ["methods", "--json"],
        ["run", "--method", "mine", "--set", "fusion.trim=0.6", "--engine", "inline", "--out", tmp_path / "x"],
        ["fuse", *parcels, "--fusion", "middle", "--out", tmp_path / "global", "--device", "cpu"],
    ]
    methods, refused, fused = answers(installed, *lines)
    rows = {row["method"]: row for row in json.loads(methods.out)}
    assert (rows["mine"]["fusion"], rows["mine"]["needs"]) == ("middle", ["weights"])
    assert refused.code == 2
    assert re.fullmatch(r"flyby: fusion\.trim .* less than or equal to 0\.5\n", refused.err)
    assert refused.err.strip() in page("add-a-method")
    assert fused.code == 0, fused.err
    assert load_predictor(tmp_path / "global").kind == "single"


def test_without_the_example_its_name_is_unknown() -> None:
    assert "mine" not in METHODS
    assert "middle" not in FUSIONS


# -- docs/parcel.md


def test_a_parcel_is_read_without_flyby(tmp_path: Path) -> None:
    sent = made("site-a")
    parcel.write(sent, tmp_path / "site-a.parcel")
    (code,) = blocks("parcel")
    assert len([line for line in code.splitlines() if line]) <= 10
    show = (
        'print(json.dumps([manifest["sender"], manifest["samples"], {k: v.hex() for k, v in tensors.items()}, p,'
        " payload.hex()]))"
    )
    # -I -S: not even the packages installed beside this Python.
    sender, samples, tensors, length, payload = json.loads(python(code + show, tmp_path, "-I", "-S"))
    assert (sender, samples) == ("site-a", 10_000)
    assert {name: bytes.fromhex(raw) for name, raw in tensors.items()} == {
        n: t.numpy().tobytes() for n, t in sent.weights.items()
    }
    assert length == len(bytes.fromhex(payload))
    loaded = load_safetensors(bytes.fromhex(payload))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in sent.weights.items())


def test_damage_is_seen_without_flyby(tmp_path: Path) -> None:
    data = bytearray(parcel.to_bytes(made("site-a")))
    data[-1] ^= 1
    (tmp_path / "site-a.parcel").write_bytes(data)
    with pytest.raises(AssertionError, match="AssertionError"):
        python(blocks("parcel")[0], tmp_path, "-I", "-S")


def test_the_bytes_are_where_the_page_says() -> None:
    rows = tables("parcel")[0][1:]
    widths = [int(row[0]) for row in rows[:6]]
    data = parcel.to_bytes(made("site-a"))
    at, fields = 0, []
    for width in widths:
        fields.append(data[at : at + width])
        at += width
    assert fields[0].hex(" ") == words(rows[0][1])[0]
    version, flags, m, s, p = (int.from_bytes(field, "little") for field in fields[1:])
    assert (version, flags, s) == (1, 0, 0)
    assert at + m + s + p == len(data)
    assert set(json.loads(data[at : at + m])) == {key for row in tables("parcel")[1][1:] for key in words(row[0])}
    shown = re.findall(r"^((?:[0-9a-f]{2} +)+) ", page("parcel"), flags=re.M)
    start = bytes.fromhex("".join(shown))
    assert start[:8] == fields[0]
    assert struct.unpack("<HHIIQ", start[8:]) == (1, 0, 3666, 0, 380496)


def test_codecs_have_the_sizes_and_errors_of_the_page() -> None:
    head, *rows = tables("parcel")[2]
    assert head[:5] == ["codec", "a value `x` is off by at most", "bytes", "of fp32", "worst error"]
    assert [row[0] for row in rows] == list(CODECS)
    spec = ModelSpec(name="resnet18", classes=10, channels=3, size=(32, 32))
    assert f"{spec.parameter_count():,} parameters" in page("parcel")
    weights = dict(spec.build().state_dict())
    full = 0
    for name, _, size, share, worst, *_ in rows:
        sent = made("site-a", spec=spec, codec=name)
        full = full or sent.size
        error = max(float((sent.weights[k] - v).abs().max()) for k, v in weights.items() if v.is_floating_point())
        assert (size, share) == (f"{sent.size:,}", "100 %" if name == "fp32" else f"{100 * sent.size / full:.1f} %")
        assert worst == f"{error:.3g}"


# -- docs/loading.md


def test_a_fused_model_is_loaded_without_flyby(tmp_path: Path) -> None:
    for seed, sender in enumerate(("a", "b")):
        weights = dict(TINY.build(torch.Generator().manual_seed(seed)).state_dict())
        parcel.write(made(sender, weights=weights), tmp_path / f"{sender}.parcel")
    out = tmp_path / "global"
    done("fuse", tmp_path / "a.parcel", tmp_path / "b.parcel", "--fusion", "fedavg", "--out", out, "--device", "cpu")
    _, code = blocks("loading")
    assert len(code.splitlines()) == 5
    more = """
import json, sys
images = (torch.arange(3 * 64) % 256).to(torch.uint8).reshape(3, 8, 8, 1)
with torch.no_grad():
    print(json.dumps([scores.tolist(), model(images).tolist(), "flyby" in sys.modules]))
"""
    one, three, seen = json.loads(python(code + more, out))
    assert not seen
    same = load_predictor(out)
    with torch.no_grad():
        assert torch.allclose(torch.tensor(one), same(torch.zeros(1, 8, 8, 1, dtype=torch.uint8)), atol=1e-6)
        images = (torch.arange(3 * 64) % 256).to(torch.uint8).reshape(3, 8, 8, 1)
        assert torch.allclose(torch.tensor(three), same(images), atol=1e-6)
    assert {path.name for path in out.iterdir()} == {name for row in tables("loading")[1][1:] for name in words(row[0])}


# -- docs/splits.md


def test_the_picture_of_the_splits_is_true(digits: DataBundle) -> None:
    rules, _leaks, picture, summary = tables("splits")
    assert [words(row[0])[0] for row in rules[1:]] == list(SPLITS)
    assert f"({len(digits.train):,}, ten classes)" in page("splits")
    names = [words(row[0])[0] for row in picture[1:] if words(row[0])]
    assert (
        names == [words(row[0])[0] for row in summary[1:]] == [name for name in SPLITS if name.startswith("dirichlet")]
    )
    rows = iter(picture[1:])
    for name in names:
        split = make_split(digits.train, SplitSettings(name=name, clients=5, alpha=0.1), seed=0)
        for site, counts in split.counts.items():
            assert next(rows)[1:] == [site, *(str(n) if n else "·" for n in counts), str(sum(counts))]
    assert next(rows, None) is None


# -- docs/run-folder.md


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything that a run may leave."""
    out = tmp_path_factory.mktemp("run") / "out"
    small = ("--model", "mlp", "--epochs", 2, "--engine", "inline", "--device", "cpu", "--quiet")
    settings = ("--set", "train.snapshots=1", "--set", "split.val=0.1")
    done(
        "run", "--method", "fedavg", "--data", "digits", "--clients", 2, "--alpha", 10, "--out", out, *small, *settings
    )
    return out


def test_every_key_of_a_result_is_explained(finished: Path) -> None:
    result = json.loads((finished / "result.json").read_text())
    explained = [key for row in tables("run-folder")[1][1:] for key in words(row[0])]
    assert len(explained) == len(set(explained))
    assert set(result) == set(explained)
    text = page("run-folder")
    assert all(f"`{key}`" in text for key in (*result["timings"], *result["consistency"]))


def test_every_file_of_a_run_is_explained(finished: Path) -> None:
    explained = {name for row in tables("run-folder")[0][1:] for name in words(row[0])}
    found = set()
    for path in finished.rglob("*"):
        name = re.sub(r"/\d{5}/", "/EPOCH/", re.sub(r"site-\d", "SITE", path.relative_to(finished).as_posix()))
        if path.is_file():
            found.add("global/" if name.startswith("global/") else name)
    assert explained - found == {"parcels/SITE.ckpt", "extra.json"}
    assert found <= explained
    split, ledger = (json.loads((finished / f"{name}.json").read_text()) for name in ("split", "ledger"))
    rows = {words(row[0])[0]: words(row[1]) for row in tables("run-folder")[0][1:]}
    assert set(split) <= set(rows["split.json"])
    assert set(ledger["crossings"][0]) <= set(rows["ledger.json"])
    assert {"site", "epoch", "loss", "lr", "samples_per_second", "val_loss", "val_accuracy"} == {
        *rows["metrics.jsonl"]
    } - {"metrics.jsonl"}
    metrics = json.loads((finished / "metrics.jsonl").read_text().splitlines()[0])
    assert set(rows["metrics.jsonl"]) <= set(metrics)


def test_exit_codes_are_those_of_the_command_line() -> None:
    from flyby import errors

    stated = [int(row[0]) for row in tables("run-folder")[2][1:]]
    assert stated == [0, errors.BadInput.exit_code, errors.Diverged.exit_code, 130]


# -- docs/satellites.md


def test_the_commands_of_the_satellites_page_work_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = np.arange(60) % 2
    noise = np.random.RandomState(0).randint(0, 120, (60, 16, 16, 3))
    images = (noise + 130 * labels[:, None, None, None]).astype(np.uint8)
    for part, rows in (("train", slice(40)), ("val", slice(40, 60))):
        make_tree(tmp_path / "tiles" / part, images[rows], labels[rows], ("fire", "none"))
    monkeypatch.chdir(tmp_path)
    done("keys", "new", "sat-b", "--out", "keys-b")
    neighbour = ("--key", "keys-b/sat-b.key", "--model", "cnn-small", "--epochs", 5, "--quiet", "--seed", 1)
    done("train", "--data", "tiles", "--out", "inbox/sat-b.parcel", *neighbour)
    less = [word for key in ("epochs=1", "distill_epochs=1", "distill_steps=0") for word in ("--set", key)]
    shorter = [*less, "--no-export", "--device", "cpu"]
    told = re.findall(r"^flyby .*$", page("satellites"), flags=re.M)
    assert [line.split()[1] for line in told] == ["keys", "train", "keys", "orient", "orient", "inspect"]
    said = [done(*line.split()[1:], *(shorter if " orient " in line else ())).out for line in told]
    assert "sat-a, round 1: 1 new, 0 refused" in said[3]
    assert "round 1 stands: nothing new came (0 new, 0 refused, 1 seen before)" in said[4]
    assert {path.name for path in (tmp_path / "node").iterdir()} == {
        words(row[0])[0].split("/")[0] for row in tables("satellites")[1][1:]
    }


def test_the_sizes_on_the_satellites_page_are_those_of_the_files() -> None:
    head, *rows = tables("satellites")[0]
    for name, parameters, *sizes in rows:
        spec = ModelSpec(name=words(name)[0], classes=2, channels=3, size=(64, 64))
        assert parameters == f"{spec.parameter_count():,}"
        weights = dict(spec.build().state_dict())
        for codec, size in zip((words(cell)[0] for cell in head[2:]), sizes, strict=True):
            assert size == f"{made('sat-a', spec=spec, codec=codec, weights=weights).size / 1000:,.0f}"
