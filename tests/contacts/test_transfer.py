"""Chunks: what a window takes, and a file that comes in pieces over several windows, its maker's signature with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from factories import random_parcel
from flyby.contacts.plan import Contact
from flyby.contacts.transfer import Arriving, LinkSettings, Load, Sheet, pieces
from flyby.errors import BadInput
from flyby.parcels import parcel
from flyby.parcels.signing import Signed, Trust, new_key, read_private, sign, verdict


def test_room_by_hand() -> None:
    window = Contact(100.0, 160.0, "a", "b", 1000.0)
    link = LinkSettings(acquisition=10, overhead=0.25)
    assert link.room(window) == 40_000  # 50 s of 1000 bytes, a fifth of them headers
    assert link.until(window, 40_000) == 160
    assert link.until(window, 8_000) == 120
    assert LinkSettings(acquisition=61, overhead=0).room(window) == 0


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=3), st.lists(st.integers(0, 5000), max_size=12))
def test_chunks_cross_as_if_sent_one_by_one(sizes: list[int], rooms: list[int]) -> None:
    load = Load(tuple(sizes), 1024)
    queue = [min(1024, size - start) for size in sizes for start in range(0, size, 1024)]
    assert load.chunks == len(queue)
    done = sent = 0
    for room in rooms:
        left = room
        while sent < len(queue) and queue[sent] <= left:
            left -= queue[sent]
            sent += 1
        done = load.after(done, room)
        assert done == sent
        assert load.bytes(done) == sum(queue[:sent])


def test_a_signed_parcel_in_pieces(tmp_path: Path) -> None:
    _, _, public = new_key("sat-a", tmp_path)
    key = read_private(tmp_path / "sat-a.key")
    data = parcel.to_bytes(sign(random_parcel("sat-a"), key))
    sheet = Sheet.of(data, 1024)
    first = Arriving(sheet)
    for number, piece in list(enumerate(pieces(data, 1024)))[::2]:
        first.take(number, piece)
    assert len(first.missing) == len(sheet.hashes) // 2
    with pytest.raises(BadInput, match="a partial transfer is not an exchange"):
        first.whole()
    with pytest.raises(BadInput, match="not what its hash says"):
        first.take(1, bytes(1024))
    with pytest.raises(BadInput, match="not one of the file's"):
        first.take(len(sheet.hashes), b"")
    for number in first.missing:  # the next window
        first.take(number, pieces(data, 1024)[number])
    assert first.whole() == data
    # Whoever carried it, it is its maker's.
    trust = Trust()
    trust.add("sat-a", public)
    carried = parcel.from_bytes(first.whole())
    assert verdict(Signed.parcel(carried), trust).trusted_as == "sat-a"
