"""Who meets whom in which round, and what stays in a node's buffer between rounds.

Every ordered pair of nodes meets once at most, over all rounds. In a round a node tops its buffer up to Q neighbour
models; after it, K models stay: the node's own new one in place of the stale one, and the K - 1 best adapted peers. So
round 1 brings Q neighbours and every later round Q + 1 - K: with Q = 29, K = 10, E = 3 and n = 70 that is 29 + 20 + 20
= 69, each peer exactly once, and never more than Q at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flyby.errors import BadInput
from flyby.files import digest, read_json, write_json
from flyby.meeting.candidate import Candidate
from flyby.parcels.ledger import Ledger
from flyby.rng import generator

SCHEMA = 1
Meetings = Mapping[str, tuple[str, ...]]  # of one round: whose models reach each node


@dataclass(frozen=True)
class Schedule:
    """``rounds[e][node]`` are the senders whose models reach a node in round e + 1, in the order they come."""

    nodes: tuple[str, ...]
    rounds: tuple[Meetings, ...]

    def __post_init__(self) -> None:
        known, seen = set(self.nodes), set()
        for number, one in enumerate(self.rounds, start=1):
            for receiver, senders in one.items():
                for sender in senders:
                    if sender not in known or receiver not in known:
                        stranger = sender if sender not in known else receiver
                        raise BadInput(
                            f"round {number} of the schedule names {stranger!r}, which is not one of its nodes; correct"
                            " the schedule"
                        )
                    if sender == receiver:
                        raise BadInput(f"round {number} of the schedule has {sender} meet itself; correct the schedule")
                    if (sender, receiver) in seen:
                        raise BadInput(
                            f"{sender} sends to {receiver} twice in the schedule, again in round {number}; each pair"
                            " meets once"
                        )
                    seen.add((sender, receiver))

    def senders(self, node: str, number: int) -> tuple[str, ...]:
        """Who reaches ``node`` in round ``number`` (from 1)."""
        return self.rounds[number - 1].get(node, ()) if number <= len(self.rounds) else ()

    def to_json(self) -> dict[str, Any]:
        content = {
            "schema_version": SCHEMA,
            "nodes": list(self.nodes),
            "rounds": [{n: list(s) for n, s in one.items()} for one in self.rounds],
        }
        return {**content, "digest": digest(content)}

    def save(self, path: Path | str) -> None:
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path | str) -> Schedule:
        """A saved schedule, under the rules it was made by; a plan from elsewhere may leave ``digest`` out."""
        raw = read_json(path)
        try:
            if raw["schema_version"] != SCHEMA:
                raise BadInput(
                    f"{path} has schedule schema {raw['schema_version']!r} and this flyby reads {SCHEMA}; update flyby"
                )
            rounds = tuple(
                {str(n): tuple(str(s) for s in senders) for n, senders in one.items()} for one in raw["rounds"]
            )
            schedule = cls(tuple(str(n) for n in raw["nodes"]), rounds)
        except (KeyError, TypeError, AttributeError) as error:
            raise BadInput(
                f"{path} is not a meeting schedule ({type(error).__name__}: {error}); it needs schema_version, nodes"
                " and rounds"
            ) from None
        if raw.get("digest", schedule.to_json()["digest"]) != schedule.to_json()["digest"]:
            raise BadInput(
                f"{path} was changed after it was written (its digest does not fit); make the schedule again"
            )
        return schedule


def make_schedule(nodes: Sequence[str], rounds: int, buffer: int, top: int, seed: int) -> Schedule:
    """A random schedule: all possible pairs as matchings of a round-robin tournament over shuffled nodes, dealt in
    random order.

    In one matching everybody meets at most one peer, so that q matchings bring every node q neighbours (one fewer where
    the number of nodes is odd and the node once sat out).
    """
    rng = generator(seed, "schedule", len(nodes), rounds, buffer, top)
    players: list[str | None] = [nodes[int(i)] for i in torch.randperm(len(nodes), generator=rng)]
    players += [None] * (len(players) % 2)
    matchings = _tournament(players)
    order = [matchings[int(i)] for i in torch.randperm(len(matchings), generator=rng)]
    made: list[dict[str, tuple[str, ...]]] = []
    for number in range(rounds):
        wanted = buffer if number == 0 else newcomers(buffer, top)
        dealt, order = order[:wanted], order[wanted:]
        met: dict[str, list[str]] = {node: [] for node in nodes}
        for matching in dealt:
            for a, b in matching:
                met[a].append(b)
                met[b].append(a)
        made.append({node: tuple(senders) for node, senders in met.items()})
    return Schedule(tuple(nodes), tuple(made))


def _tournament(players: Sequence[str | None]) -> list[list[tuple[str, str]]]:
    """The circle method: the first player stays, the others move round; n - 1 matchings hold every pair once."""
    fixed, others, half = players[0], list(players[1:]), len(players) // 2
    matchings = []
    for _ in range(len(others)):
        ring = [fixed, *others]
        pairs = ((ring[i], ring[-1 - i]) for i in range(half))
        matchings.append([(a, b) for a, b in pairs if a is not None and b is not None])
        others = [*others[1:], others[0]]
    return matchings


def newcomers(buffer: int, top: int) -> int:
    """How many new models fit after a round: Q minus the peers that stay."""
    return buffer - stayers(buffer, top)


def stayers(buffer: int, top: int) -> int:
    """Peers kept after a round: of the K models that stay one is the node's own."""
    return min(buffer, max(0, top - 1))


def retain(chosen: Sequence[Candidate], buffer: int, top: int) -> list[Candidate]:
    """The peers that stay in the buffer: of those chosen for the ensemble, best first, as many as there are places."""
    return list(chosen)[: stayers(buffer, top)]


def record_round(ledger: Ledger, schedule: Schedule, number: int, sizes: Mapping[str, tuple[int, str]]) -> None:
    """Enter one round's crossings: ``sizes[sender]`` is (bytes, digest) of what it sends in this round."""
    for receiver in schedule.nodes:
        for sender in schedule.senders(receiver, number):
            ledger.record(sender, receiver, *sizes[sender], round=number)
