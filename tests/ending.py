"""How the suite ends: a worker that dies ends the run, and a Ctrl-C is heard. Apart from ``conftest.py``, so that the
test of it starts processes that import nothing else."""

from __future__ import annotations

import signal
from typing import Any

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a job that a script started with "&", and its children
    signal.signal(signal.SIGINT, signal.default_int_handler)  # then no Ctrl-C of a test would ever be heard


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    """A worker that dies ends the whole run, at once and with a failure: xdist's replacement for it can wait for ever,
    and without one the others finish all that was given to them first."""
    if error:
        try:
            where = node.config.pluginmanager.getplugin("dsession").sched.remove_node(node)
        except KeyError:  # it had no tests yet
            where = None
        pytest.exit(f"worker {node.gateway.id} died {f'in {where}' if where else 'between tests'}", returncode=1)
