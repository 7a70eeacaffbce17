"""The command line: the app with its commands, and the exit codes.

0 done, 2 bad input (one line that says what and how to mend it), 3 a run that diverged, 130 interrupted.
"""

from __future__ import annotations

import atexit
import errno
import gc
import logging
import os
import sys
from typing import Annotated

import typer

from flyby import __version__
from flyby.commands import contacts, flower, keys
from flyby.commands.audit import audit
from flyby.commands.backbones import backbones
from flyby.commands.bench import bench
from flyby.commands.compare import compare
from flyby.commands.data import data
from flyby.commands.evaluate import evaluate
from flyby.commands.export import export
from flyby.commands.fuse import fuse
from flyby.commands.inspect import inspect
from flyby.commands.methods import explain, methods
from flyby.commands.orient import orient
from flyby.commands.predict import predict
from flyby.commands.report import report
from flyby.commands.run import run
from flyby.commands.serve import serve
from flyby.commands.sign import sign
from flyby.commands.study import study
from flyby.commands.train import train
from flyby.errors import FlybyError

# When a process ends, Python's garbage collector looks once more through all that torch and others have made: half a
# second and more, for what ends with the process anyway.
atexit.register(gc.freeze)

app = typer.Typer(
    name="flyby",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # "rich" would take [x>=1] in a sentence for a colour, and keep the docstrings' lines
    help="One-shot federated learning: every participant's model crosses the wire exactly once.",
)
PANELS = {
    "A whole federation on one machine": (run, report, compare, study, bench),
    "Real sites, a server, nodes that meet": (
        *(train, inspect, fuse, orient, evaluate, predict, serve, export, audit, sign),
    ),
    "What there is": (methods, explain, data, backbones),
}
for title, commands in PANELS.items():
    for command in commands:
        app.command(rich_help_panel=title)(command)
for name, group in (("keys", keys), ("contacts", contacts), ("flower", flower)):
    app.add_typer(group.app, name=name, rich_help_panel="Real sites, a server, nodes that meet")


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    if version:
        print(f"flyby {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


class _Stderr(logging.Handler):
    """What the library logs, as plain lines for people."""

    def emit(self, record: logging.LogRecord) -> None:
        from flyby.names import printable

        print("\n".join(map(printable, self.format(record).split("\n"))), file=sys.stderr, flush=True)


_STDERR = _Stderr()


def main() -> None:
    """Run the command line and turn every error a user can cause into one line and an exit code."""
    log = logging.getLogger("flyby")
    log.addHandler(_STDERR)
    log.setLevel(logging.INFO)
    try:
        code = app(standalone_mode=False)
        if code == 130:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)
    except (KeyboardInterrupt, typer.Abort):
        _interrupted()
    except FlybyError as error:
        _fail(str(error), error.exit_code)
    except BrokenPipeError:
        os._exit(0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _fail(
            f"no room left on the disk ({error.strerror}); make room and give the same command again (flyby run: with"
            " --resume)",
            2,
        )
    except Exception as error:
        if "KeyboardInterrupt" in str(error):  # pydantic wraps one that comes while it makes a class
            _interrupted()
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # as Python says it, or torch
            _fail("there is not enough memory for this; use smaller files, or a machine with more", 2)
        if type(error).__module__.split(".")[0] in ("click", "typer") and hasattr(error, "format_message"):
            _fail(error.format_message() or "see flyby --help", 2)
        raise


def _interrupted() -> None:
    goes_on = {"run": "; the same command with --resume goes on from here"}
    goes_on |= dict.fromkeys(("train", "study", "fuse", "orient"), "; the same command goes on from here")
    _fail(f"interrupted{goes_on.get(sys.argv[1] if len(sys.argv) > 1 else '', '')}", 130)


def _fail(message: str, code: int) -> None:
    from flyby.names import printable

    print(f"flyby: {printable(' '.join(message.split()))}", file=sys.stderr)
    sys.exit(code)
