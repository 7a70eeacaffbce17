"""The registry of recipes: a method is an objective for the sites and a fusion for the server. The two axes are free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flyby.errors import BadInput, unknown
from flyby.fusion import FUSIONS, Fusion
from flyby.objectives import OBJECTIVES, Objective, ObjectiveSettings
from flyby.objectives.statistics import STATISTICS


@dataclass(frozen=True)
class Method:
    """A named recipe. ``fusion`` None means that there is no server: every site keeps its own model, or personalises it by the
    variant ``orient`` of FOL from those of sites it meets."""

    name: str
    objective: str
    fusion: str | None
    about: str
    paper: str = ""
    objective_settings: dict[str, Any] = field(default_factory=dict)
    fusion_settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # by rule
    train: dict[str, Any] = field(default_factory=dict)
    orient: str | None = None


FAFI = "FAFI: Zeng et al., ICML 2025"
FOL = "FOL: Huang and Shu, ICML 2025"
COUNTED = {"iffi": {"prototypes": "counts"}}
# The rule for prototype clients where the user names none; docs/experts.md shows what it earned this place with. FAFI and AURORA are
# published with `iffi`: all of them share one default here, so that a comparison of clients never compares server rules by accident.
BEST = "experts-calibrated"

METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        Method("local", "supervised", None, "every site keeps its own model; nothing is exchanged"),
        Method(
            "fedavg", "supervised", "fedavg", "cross-entropy at the sites, weighted mean of all weights", "McMahan et al., AISTATS 2017"
        ),
        Method("ensemble", "supervised", "ensemble", "cross-entropy at the sites, mean of their predictions"),
        Method("fafi", "salt", BEST, "SALT at the sites (published with --fusion iffi)", FAFI),
        Method(
            "fafi-anneal", "aurora", BEST, "FAFI with a shared anchor and lambda 18 -> 0 by hand", FAFI, {"weighting": "linear"}, COUNTED
        ),
        Method("aurora", "aurora", BEST, "SALT plus an anchor whose strength each site learns", "AURORA", {}, COUNTED),
        Method(
            "aurora-no-stability", "aurora", BEST, "AURORA without the bound on lambda", "AURORA", {"weighting": "meta-anneal"}, COUNTED
        ),
        Method(
            "aurora-no-decouple", "aurora", BEST, "AURORA, plain coupled uncertainty weighting", "AURORA", {"weighting": "kendall"}, COUNTED
        ),
        Method(
            "fol", "supervised", None, "no server: neighbours' models adapted, selected and distilled into the own one", FOL, orient="fol"
        ),
        Method("fol-a", "supervised", None, "FOL, answering with the ensemble it distils", FOL, orient="fol-a"),
        Method("fol-n", "supervised", None, "FOL without adapting the neighbours' models", FOL, orient="fol-n"),
        Method("fol-an", "supervised", None, "FOL-A without adapting the neighbours' models", FOL, orient="fol-an"),
        Method("gossip", "supervised", None, "no server: each node averages its model with those it met", FOL, orient="gossip"),
        Method("fedetf", "etf", "fedavg", "a fixed simplex classifier with balanced softmax, averaged", "FedETF: Li et al., ICCV 2023"),
    )
}


def method_named(name: str) -> Method:
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]


def objective_named(name: str) -> type[Objective]:
    if name not in OBJECTIVES:
        raise unknown("objective", name, OBJECTIVES)
    return OBJECTIVES[name]


def fusion_named(name: str) -> type[Fusion]:
    if name not in FUSIONS:
        raise unknown("fusion", name, FUSIONS)
    return FUSIONS[name]


def check_pair(objective: type[Objective], fusion: type[Fusion], settings: ObjectiveSettings | None = None) -> None:
    """Refuse, before any training, a server rule that asks for what the sites' objective does not send under its settings."""
    sent = objective.provided(settings or objective.settings_type())
    missing = fusion.needs - sent
    if not missing:
        return
    askable = missing & set(STATISTICS)
    if "calibration" in missing and "calibration" in objective.provides:
        cure = "leave out objective.calibrate=false"
    elif askable == missing:
        cure = f"ask the sites for it with --set objective.send=[{','.join(sorted(askable))}]"
    else:
        able = sorted(o.name for o in OBJECTIVES.values() if fusion.needs <= o.provides | set(STATISTICS))
        cure = f"objectives that do: {', '.join(able) or 'none'}"
    fits = sorted(f.name for f in FUSIONS.values() if f.needs <= sent)
    raise BadInput(
        f"fusion {fusion.name!r} needs {', '.join(sorted(missing))}, which objective {objective.name!r} does not provide; {cure}; "
        f"fusions that fit it as it is: {', '.join(fits)}"
    )


def catalogue() -> list[dict[str, Any]]:
    """What ``flyby methods`` shows: each recipe with what crosses the wire and what its two halves need and provide."""
    rows = []
    for m in METHODS.values():
        objective = OBJECTIVES[m.objective]
        fusion = FUSIONS[m.fusion] if m.fusion else None
        rows.append(
            {
                "method": m.name, "objective": m.objective, "fusion": m.fusion, "about": m.about, "paper": m.paper,
                "provides": sorted(objective.provides), "needs": sorted(fusion.needs) if fusion else [],
                "exchanges": "one upload a site" if fusion else "one model a meeting" if m.orient else "nothing", "mixed_architectures": bool(fusion and fusion.heterogeneous) or bool(m.orient),
            }
        )  # fmt: skip
    return rows
