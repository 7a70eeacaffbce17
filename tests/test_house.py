"""Arrows point one way, nothing unpickles, nothing draws from a global generator, and the command line starts light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "flyby"
FOUNDATIONS = {"errors", "files", "rng", "__version__"}
TRAVEL = {"parcel", "container", "ledger", "codecs"}
UPPER = {"training", "engines", "study", "deploy", "commands", "cli"}

# A room (a folder or a file of src/flyby) and all the rooms it may import; itself and the foundations are always
# allowed.
MAY: dict[str, set[str]] = {
    "errors": set(),
    "files": set(),
    "rng": set(),
    "settings": set(),
    "checkpoint": set(),
    "data": set(),
    "models": set(),
    "parcel": {"models"} | TRAVEL,
    "container": {"codecs"},
    "ledger": {"models"} | TRAVEL,
    "codecs": {"models"} | TRAVEL,
    "objectives": {"data", "models"},
    "graphs": set(),
    "privacy": {"objectives", "data", "models"},
    "training": {"objectives", "data", "models", "parcel", "checkpoint", "graphs", "privacy"},
    "signing": {"models"} | TRAVEL,
    "plausible": {"models"} | TRAVEL,
    "admission": {"signing", "plausible", "models", "data", "evaluation", "settings"} | TRAVEL,
    "watch": {"signing", "admission"} | TRAVEL,
    "forkserver": set(),
}
MAY_NOT: dict[str, set[str]] = {
    "fusion": UPPER,
    "orient": UPPER,
    "evaluation": UPPER,
    "methods": UPPER,
    "engines": {"study", "deploy", "commands", "cli"},
    "study": {"deploy", "commands", "cli"},
    "deploy": {"commands", "cli"},
}


def sources() -> list[Path]:
    found = sorted(SRC.rglob("*.py"))
    assert len(found) > 30
    return found


def room(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> Iterator[str]:
    """Full names of what a module imports, in functions and under TYPE_CHECKING too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute, so that they can be read"
            yield from (f"{node.module}.{name.name}" for name in node.names)


def rooms_of(path: Path) -> set[str]:
    names = imported(ast.parse(path.read_text()))
    return {name.split(".")[1] for name in names if name.startswith("flyby.")} - {room(path)}


def test_a_forbidden_import_would_be_seen() -> None:
    text = "import flyby.runs.pipeline\ndef f():\n    from flyby import parcel\n    from flyby.data.site import Site\n"
    assert set(imported(ast.parse(text))) == {"flyby.runs.pipeline", "flyby.parcels.parcel", "flyby.data.site.Site"}


@pytest.mark.parametrize("path", sources(), ids=lambda p: p.relative_to(SRC).as_posix())
def test_arrows_point_one_way(path: Path) -> None:
    here, used = room(path), rooms_of(path)
    if here != "__main__":
        assert "cli" not in used
    if here in MAY:
        assert used <= MAY[here] | FOUNDATIONS
    assert not used & MAY_NOT.get(here, set())


def test_the_rules_name_rooms_that_exist() -> None:
    rooms = {room(path) for path in sources()}
    assert set(MAY) | set(MAY_NOT) <= rooms
    assert {"data", "models", "objectives", "training", "fusion", "engines", "study", "cli"} <= rooms


@pytest.mark.parametrize("path", sources(), ids=lambda p: p.relative_to(SRC).as_posix())
def test_nothing_unpickles_and_nothing_draws_from_a_global_generator(path: Path) -> None:
    tree = ast.parse(path.read_text())
    tops = {name.split(".")[0] for name in imported(tree)}
    assert not tops & {
        "pickle",
        "cPickle",
        "cloudpickle",
        "dill",
        "joblib",
        "marshal",
        "shelve",
        "random",
        "torchvision",
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in (
                "torch.load",
                "eval",
                "exec",
                "torch.manual_seed",
                "torch.seed",
                "np.random.seed",
                "numpy.random.seed",
            )
            assert not any(k.arg == "allow_pickle" and ast.unparse(k.value) != "False" for k in node.keywords)
            if called in ("np.load", "numpy.load"):
                assert any(k.arg == "allow_pickle" for k in node.keywords), "say allow_pickle=False"


def test_the_command_line_starts_without_heavy_modules() -> None:
    heavy = (
        "torch",
        "sklearn",
        "matplotlib",
        "pyarrow",
        "numpy",
        "scipy",
        "PIL",
        "cryptography",
        "ray",
        "flwr",
        "opacus",
    )
    code = f"import sys, flyby.cli; print([m for m in {heavy!r} if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
