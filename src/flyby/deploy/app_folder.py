"""The Flower app as a folder that ``flwr run`` takes: a pyproject.toml with every key of a round, and two modules that
point at flyby."""

from __future__ import annotations

from pathlib import Path

from flyby import __version__
from flyby.deploy.round import Round, must_be_new
from flyby.files import atomic_folder, write_text

PROJECT = """\
[project]
name = "flyby-round"
version = "{version}"
description = "One round of one-shot federated learning: every site's parcel crosses once"
license = {{ text = "Apache-2.0" }}
dependencies = []  # flyby[flower] must be installed on every host; nothing is installed at run time

[tool.flwr.app]
publisher = "flyby"

[tool.flwr.app.components]
serverapp = "flyby_round.server_app:app"
clientapp = "flyby_round.client_app:app"

# What a round may be told; change it here or with flwr run --run-config 'epochs=5 deadline="2h"'.
[tool.flwr.app.config]
{config}"""

MODULE = """\
from flyby.deploy.{side} import make_app

app = make_app()
"""


def write_app(folder: Path, asked: Round) -> Path:
    """Write the app's folder, whole or not at all; ``asked`` gives the run config its values."""
    must_be_new(folder)
    told = "".join(
        f"# {field.description}\n{line}\n"
        for field, line in zip(Round.model_fields.values(), asked.toml().splitlines(), strict=True)
    )
    with atomic_folder(folder) as tmp:
        package = tmp / "flyby_round"
        package.mkdir()
        write_text(tmp / "pyproject.toml", PROJECT.format(version=__version__, config=told))
        write_text(package / "__init__.py", "")
        for side in ("client", "server"):
            write_text(package / f"{side}_app.py", MODULE.format(side=side))
    return folder
