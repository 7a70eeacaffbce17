"""What every worker imports, imported once by the fork server. No tensor is made here: torch's threads start with its
first large sum."""

from __future__ import annotations

import flyby.engines.processes

__all__ = ["flyby"]
