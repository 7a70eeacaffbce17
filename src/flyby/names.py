"""What a participant may be called, in one place: every door (a parcel, a ledger, a key, a trust file, a split) takes
the same names."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from flyby.errors import BadInput

LONGEST = 128
PATTERN = r"[A-Za-z0-9_:@+-][A-Za-z0-9._:@+-]{0,127}"

Name = Annotated[str, Field(pattern=f"^{PATTERN}$")]
"""A participant's name as it stands in parcels and ledgers: printable, without spaces, slashes or a first dot (``..``
is a place, not a name), fit for a file name or a table."""


def check_name(name: str) -> None:
    """Refuses what is no participant's name, with one sentence."""
    if not re.fullmatch(PATTERN, name):
        raise BadInput(
            f"a site cannot be called {name!r}; use at most {LONGEST} letters, digits and . _ : @ + -, and no dot first"
        )


def as_name(text: str) -> str:
    """A name for whatever a column of data calls a site: what no name may hold becomes a dash."""
    return re.sub(r"[^A-Za-z0-9._:@+-]|^\.", "-", text)[:LONGEST] or "-"


def printable(text: str) -> str:
    """A stranger's words without control characters, escape sequences or turned writing direction."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def natural(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """A sort key by which site-2 comes before site-10; the name itself puts site-01 and site-1 in one order always."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part], name
