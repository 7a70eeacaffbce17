"""Every failure a user can cause, as one family of exceptions.

The command line turns a :class:`FlybyError` into one line on stderr and the error's exit code; a traceback is a bug.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FlybyError(Exception):
    """The base of all errors flyby raises on purpose. ``exit_code`` is what the command line returns."""

    exit_code = 2


class BadInput(FlybyError):
    """The input cannot be used; the message says what is wrong and how to mend it."""


class Diverged(FlybyError):
    """Training left the finite numbers. The last good state is kept; exit code 3."""

    exit_code = 3


def expect(value: object, kind: type | tuple[type, ...], what: str) -> None:
    """Refuse a value of another type: ``what`` says what takes it and what would do."""
    if not isinstance(value, kind):
        raise BadInput(f"{what}; this is of type {type(value).__name__}")


def unknown(kind: str, name: object, known: Iterable[str], where: str = "") -> BadInput:
    """The error for an unknown name, with the nearest known names suggested; where none is near, all of them, or of
    many ``where`` to read them."""
    names = sorted(set(known))
    near = difflib.get_close_matches(str(name).lower(), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(repr(n) for n in near)}?" if near else where or f"known: {', '.join(names)}."
    return BadInput(f"unknown {kind} {name!r}; {hint}")
