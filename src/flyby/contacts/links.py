"""How fast a link is: a number, or what power, antennas and noise allow.

Friis: received = power * gain * gain * (c / (4 pi range frequency))^2; noise = k T bandwidth; Shannon: no code carries
more than bandwidth * log2(1 + received / noise) bits per second.
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass, fields

from flyby.errors import BadInput
from flyby.names import printable

log = logging.getLogger(__name__)
LIGHT, BOLTZMANN = 299_792_458.0, 1.380649e-23  # m/s, J/K
RATE = 1_250_000.0  # bytes per second where nobody says: 10 Mbit/s, a modest radio between small satellites
MARGIN = 3.0  # dB that a rate from a budget stays below Shannon's: what good codes reach
PREFIX = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


def amount(text: str, what: str) -> float:
    """Bytes of words like 45MB, 44.7 MiB, 10Mbit, 1250000; a rate may end in /s."""
    found = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([kMGT]i?|)\s*(B|bit|bytes?|)(?:/s|ps)?\s*", text)
    try:
        if found is None or found[2] not in PREFIX:
            raise ValueError
        number = float(found[1]) * PREFIX[found[2]] / (8 if found[3] == "bit" else 1)
    except ValueError:
        said = f"{what} {printable(text)!r} is not understood; write it as 45MB, 300kB or 10Mbit"
        raise BadInput(said) from None
    if not (math.isfinite(number) and number > 0):
        raise BadInput(f"{what} {printable(text)!r} is nothing; give more than 0")
    return number


@dataclass(frozen=True)
class Budget:
    """One link: watts, dBi of both antennas, kelvin of the receiving system, hertz, hertz, and dB lost on the way."""

    power: float
    gain: float
    temperature: float
    frequency: float
    bandwidth: float
    gain_there: float | None = None  # as the own one where not said
    losses: float = 0.0

    def __post_init__(self) -> None:
        for name in ("power", "temperature", "frequency", "bandwidth"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise BadInput(f"a link budget with a {name} of {value} carries nothing; give a positive number")
        if not all(math.isfinite(getattr(self, f.name) or 0.0) for f in fields(self)) or self.losses < 0:
            raise BadInput("the gains and losses of a link budget are finite numbers of dB, losses not below 0")

    def snr(self, kilometres: float) -> float:
        """Received power over noise."""
        gains = self.gain + (self.gain if self.gain_there is None else self.gain_there) - self.losses
        spread = (LIGHT / (4e3 * math.pi * kilometres * self.frequency)) ** 2
        return self.power * 10 ** (gains / 10) * spread / (BOLTZMANN * self.temperature * self.bandwidth)

    def limit(self, kilometres: float, margin: float = 0.0) -> float:
        """Shannon's bytes per second with so many dB less than received."""
        return self.bandwidth * math.log2(1 + self.snr(kilometres) / 10 ** (margin / 10)) / 8


def rate_of(claimed: float | None, budget: Budget | None, kilometres: float | None) -> float:
    """Bytes per second of all contacts: the claimed rate, or what the budget gives at the longest range, MARGIN below
    Shannon's limit. A claim beyond that limit is said to be impossible, and kept."""
    if budget is None:
        return RATE if claimed is None else claimed
    if kilometres is None:
        raise BadInput("a link budget needs the longest range to reckon with; give --max-range")
    limit = budget.limit(kilometres)
    if claimed is None:
        return budget.limit(kilometres, MARGIN)
    if claimed > limit:
        log.warning(
            "a rate of %.3g bytes/s is beyond Shannon's limit of this link, %.3g at %.0f km: no code reaches it",
            *(claimed, limit, kilometres),
        )
    return claimed
