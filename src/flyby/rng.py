"""Randomness: one generator per (seed, site, stage), passed in, never global.

The key is hashed, so that neighbouring seeds give unrelated streams and a resumed stage needs no saved state: it asks
for its generator again by name.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def seed_of(*key: object) -> int:
    """A 63-bit seed from any key, the same in every process and on every machine."""
    text = "\x1f".join(str(part) for part in key)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(*key: object, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch generator for (seed, site, stage, ...)."""
    import torch  # here: who needs only numpy's streams is spared 200 MB

    return torch.Generator(device=device).manual_seed(seed_of(*key))


def legacy_numpy(*key: object) -> np.random.RandomState:
    """numpy's RandomState, whose streams are frozen for ever (NEP 19): splits stay the same across numpy versions."""
    raw = hashlib.sha256("\x1f".join(str(part) for part in key).encode()).digest()
    return np.random.RandomState(np.frombuffer(raw, dtype=">u4").astype(np.uint32))
