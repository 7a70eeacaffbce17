"""What a participant and a class may be called, in one place: every door (a parcel, a ledger, a key, a trust file, a
split, a dataset) takes the same names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from flyby.errors import BadInput

LONGEST = 128
PATTERN = r"[A-Za-z0-9_:@+-][A-Za-z0-9._:@+-]{0,127}"

Name = Annotated[str, Field(pattern=f"^{PATTERN}$")]
"""A participant's name as it stands in parcels and ledgers: printable, without spaces, slashes or a first dot (``..``
is a place, not a name), fit for a file name or a table."""

MOST_LABELS = 100_000
MOST_TEXT = 8 << 20  # bytes of all class names together: half of what the manifest of a parcel may have
_UNSEEN = r"\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069"

Label = Annotated[str, Field(pattern=f"^[^{_UNSEEN}]{{1,256}}$")]
"""A class's (or a method's) name as it stands in parcels: any script, without control characters, ends of lines and
marks that turn the writing direction."""


def check_labels(names: Sequence[str], what: str) -> None:
    """Refuses class names that no parcel would take, where the data is read and not after its training."""
    if len(names) > MOST_LABELS:
        raise BadInput(f"{what} names {len(names)} classes; {MOST_LABELS} are the most")
    if len(set(names)) < len(names):
        raise BadInput(f"{what} gives two classes the same name; name each class once")
    for name in names:
        if not re.fullmatch(rf"[^{_UNSEEN}\ud800-\udfff]{{1,256}}", name):
            shown = printable(name if len(name) <= 40 else f"{name[:40]}...")
            raise BadInput(
                f"{what} has a class called '{shown}'; rename it to 1 to 256 characters of UTF-8 text, without control"
                " characters or marks that turn the writing direction"
            )
    if sum(len(name.encode()) for name in names) > MOST_TEXT:
        raise BadInput(f"the class names of {what} are longer than {MOST_TEXT >> 20} MB together; shorten them")


def is_name(text: str) -> bool:
    """Whether a participant may be called so."""
    return re.fullmatch(PATTERN, text) is not None


def check_name(name: str) -> None:
    """Refuses what is no participant's name, with one sentence."""
    if not is_name(name):
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
