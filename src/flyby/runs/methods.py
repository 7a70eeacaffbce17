"""The methods, by name: a method is an objective for the sites and a fusion for the server. The two axes are free."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from flyby.data.site import Part, Site
from flyby.errors import BadInput
from flyby.fusion import FUSIONS, Fusion, FusionSettings
from flyby.meeting.settings import VARIANTS
from flyby.models import ModelSpec
from flyby.objectives import OBJECTIVES, Objective, ObjectiveSettings
from flyby.registry import Registry
from flyby.rng import generator
from flyby.statistics.catalogue import STATISTICS

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Method:
    """A named recipe. ``fusion`` None means that there is no server: every site keeps its own model, or personalises it
    by the variant ``orient`` of FOL from those of sites it meets. ``edition`` counts how often what it stands for was
    changed, so that a study's older rows do not pass for new ones."""

    name: str
    objective: str
    fusion: str | None
    about: str
    paper: str = ""
    objective_settings: dict[str, Any] = field(default_factory=dict)
    fusion_settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # by rule
    train: dict[str, Any] = field(default_factory=dict)
    orient: str | None = None
    edition: int = 1


def _supervised(name: str, about: str, paper: str = "", send: str = "") -> Method:
    """Plain training, with a statistic to send beside the weights if need be, and the server rule of the same name."""
    return Method(name, "supervised", name, about, paper, {"send": [send]} if send else {})


def _anchored(name: str, about: str, paper: str, **settings: str) -> Method:
    """SALT with a shared anchor."""
    return Method(name, "aurora", BEST, about, paper, settings, {"iffi": {"prototypes": "counts"}})


def _closed(name: str, about: str, paper: str = "") -> Method:
    """Nothing is trained at the sites, which send sums of features for a closed form; all of these share uploads."""
    return Method(name, "frozen", name, about, paper, {"send": ["feature-sums"]})


AFL = "AFL: He et al., CVPR 2025"
AURORA = "AURORA"
CVAE = "FedCVAE: Heinbaugh et al., ICLR 2023"
FAFI = "FAFI: Zeng et al., ICML 2025"
FED3R = "Fed3R: Fani et al., ICML 2024"
FEDETF = "FedETF: Li et al., ICCV 2023"
FOL = "FOL: Huang and Shu, ICML 2025"
GH = "GH-OFL"
SRA = "FedSRA, 2026"
YIN = "Yin et al., ICML 2018"
# The rule for prototype clients where the user names none; docs/experts.md shows what it earned this place with. FAFI
# and AURORA are published with `iffi`: all of them share one default here, so that a comparison of clients never
# compares server rules by accident.
BEST = "experts-calibrated"
# Our own pair from scratch, meant to be the most accurate. All that is chosen about it stands here for the sites, and
# as the defaults of ``BestSettings`` for the rule, which serves other uploads too; docs/best.md says how it was chosen.
OWN_PAIR = Method(
    "best",
    "bearings",
    "best",
    "our own pair from scratch: bearings at the sites, experts who say how far an image stands out at the server",
    objective_settings={"shift": "turns", "most_classes": 10, "preset": "fast", "send": ["moments"]},
    edition=2,
)

BUILT_IN: tuple[Method, ...] = (
    Method("local", "supervised", None, "every site keeps its own model; nothing is exchanged"),
    _supervised("fedavg", "cross-entropy at the sites, weighted mean of all weights", "McMahan et al., AISTATS 2017"),
    _supervised("ensemble", "cross-entropy at the sites, mean of their predictions"),
    Method("fafi", "salt", BEST, "SALT at the sites (published with --fusion iffi)", FAFI),
    _anchored("fafi-anneal", "FAFI with a shared anchor and lambda 18 -> 0 by hand", FAFI, weighting="linear"),
    _anchored("aurora", "SALT plus an anchor whose strength each site learns", AURORA),
    _anchored("aurora-no-stability", "AURORA without the bound on lambda", AURORA, weighting="meta-anneal"),
    _anchored("aurora-no-decouple", "AURORA, plain coupled uncertainty weighting", AURORA, weighting="kendall"),
    Method("fedsra", "fedsra", "standardised", "fixed anchors at the sites, standardised features at the server", SRA),
    Method("bearings", "bearings", "experts", "SALT on classes and quarter turns: experts that know their classes"),
    OWN_PAIR,
    *(Method(name, "supervised", None, v.about, FOL, orient=name) for name, v in VARIANTS.built_in.items()),
    Method("fedetf", "etf", "fedavg", "a fixed simplex classifier with balanced softmax, averaged", FEDETF),
    _supervised(
        "fedproto", "nearest class mean over all clients", "FedProto: Tan et al., AAAI 2022", send="class-means"
    ),
    _supervised(
        "fedtgp",
        "class means turned into trained global prototypes",
        "FedTGP: Zhang et al., AAAI 2024",
        send="class-means",
    ),
    Method("fedcvae", "cvae", "fedcvae", "clients' decoders paint the server's training set", CVAE),
    Method("fedcvae-kd", "cvae", "fedcvae-kd", "the same through one distilled decoder, labels uniform", CVAE),
    _supervised(
        "dense", "the ensemble distilled on images made from the models alone", "DENSE: Zhang et al., NeurIPS 2022"
    ),
    _supervised(
        "coboosting", "DENSE with harder images and a better-weighted ensemble", "Co-Boosting: Dai et al., ICLR 2024"
    ),
    _supervised(
        "feddf",
        "the ensemble distilled on unlabelled proxy images (--set proxy=PATH)",
        "FedDF: Lin et al., NeurIPS 2020",
    ),
    _supervised(
        "intactofl", "all models kept under a gate trained on synthetic images", "IntactOFL: Zeng et al., ACM MM 2024"
    ),
    _supervised(
        "fedlpa", "layer-wise posteriors joined by one solve a layer", "FedLPA: Liu et al., NeurIPS 2024", send="kfac"
    ),
    _supervised(
        "maecho",
        "weights moved together where clients' inputs are free",
        "MA-Echo: Su et al., 2022",
        send="null-space",
    ),
    _supervised("ot", "neurons matched layer by layer, then averaged", "OT fusion: Singh and Jaggi, NeurIPS 2020"),
    _supervised("median", "the median of the sites' weights, one by one", YIN),
    _supervised("trimmed", "the mean of the sites' weights without the extremes", YIN),
    _supervised("clipped", "the mean of weights, no site far from the median", "Karimireddy et al., ICML 2021"),
    _supervised("ensemble-median", "the median of the sites' predictions"),
    _supervised("ensemble-trimmed", "the mean of the sites' predictions without the extremes"),
    _closed("ridge", "frozen features, ridge regression from their sums, exact for every split", f"{AFL}; {FED3R}"),
    _closed("lda", "frozen features, discriminant analysis from their sums, exact for every split", GH),
    _closed("nb", "frozen features, naive Bayes from their sums, exact for every split"),
    _closed("fishermix", "frozen features, a head trained on draws from their Gaussians", GH),
)
# What a table calls the student and the teacher of nodes that meet; the average has no teacher.
PRINTED = {
    **dict.fromkeys(("fol", "fol-a"), ("FOL", "FOL-A")),
    **dict.fromkeys(("fol-n", "fol-an"), ("FOL-N", "FOL-AN")),
    **dict.fromkeys(("fol-plus", "fol-plus-a"), ("FOL-plus", "FOL-plus-A")),
    "gossip": ("FedAvg", ""),
}
METHODS: Registry[Method] = Registry("method", {m.name: m for m in BUILT_IN}, group="flyby.methods")


def rule_for(methods: Iterable[str]) -> str:
    """The server rule for parcels that name these methods. One that names an objective, since several methods share
    such uploads, gets the rule of the first method with that objective."""
    named = {word: method_of(word) for word in dict.fromkeys(methods)}
    rules = {word: method.fusion if method else None for word, method in named.items()}
    without = [word for word, rule in rules.items() if rule is None]
    if without or not rules:
        words = ", ".join(repr(word) for word in without) or "no method"
        raise BadInput(f"the parcels name {words}, for which there is no server rule; choose one with --fusion")
    if len(set(rules.values())) > 1:
        each = ", ".join(f"{rule} for {word!r}" for word, rule in rules.items())
        raise BadInput(f"the parcels' methods have different server rules ({each}); choose one with --fusion")
    return str(next(iter(rules.values())))


def method_of(word: str) -> Method | None:
    """The method that a parcel names; where it names an objective, the first method that has a server rule for it."""
    if word in METHODS:
        return METHODS[word]
    return next((m for m in METHODS.values() if m.objective == word and m.fusion), None)


def settings_for(rule: str, methods: Iterable[str]) -> dict[str, Any]:
    """The settings that the parcels' method gives to a rule, as a run of that method would; none where methods
    differ."""
    found = [method_of(word) for word in dict.fromkeys(methods)]
    given = [m.fusion_settings.get(rule, {}) if m else {} for m in found]
    return dict(given[0]) if given and all(one == given[0] for one in given) else {}


def check_pair(
    objective: type[Objective],
    fusion: Fusion | type[Fusion],
    settings: ObjectiveSettings | None = None,
    rule_settings: FusionSettings | None = None,
) -> None:
    """Refuse, before any training, a server rule that asks, under its settings, for what the sites' objective does not
    send under its own."""
    sent = objective.provided(settings or objective.settings_type())
    whole = isinstance(fusion, Fusion)
    needs = fusion.needs if whole else fusion.needed(rule_settings or fusion.settings_type())
    missing = needs - sent
    if not missing:
        return
    askable = missing & set(STATISTICS)
    if "calibration" in missing and "calibration" in objective.provides:
        cure = "leave out objective.calibrate=false"
    elif askable == missing:
        cure = f"ask the sites for it with --set objective.send=[{','.join(sorted(askable))}]"
    else:
        able = sorted(o.name for o in OBJECTIVES.values() if needs <= o.provides | set(STATISTICS))
        cure = f"objectives that do: {', '.join(able) or 'none'}"
    fits = sorted(f.name for f in FUSIONS.values() if f.needs <= sent)
    raise BadInput(
        f"fusion {fusion.name!r} needs {', '.join(sorted(missing))}, which objective {objective.name!r} does not"
        f" provide; {cure}; fusions that fit it as it is: {', '.join(fits)}"
    )


def catalogue() -> list[dict[str, Any]]:
    """What ``flyby methods`` shows: each recipe with what crosses the wire and what its two halves need and provide.

    ``extra_bytes`` is what an upload carries beside its weights, measured on the demo's network (cnn-small, grey 8x8
    images, 10 classes) for a site that holds every class; ``weight_bytes`` are the weights themselves.
    """
    rows = []
    for method in METHODS.values():
        try:
            rows.append(facts_of(method))
        except BadInput as error:  # a method from outside may name what is not installed
            log.warning("left out: the method %r: %s", method.name, error)
    return rows


def facts_of(m: Method) -> dict[str, Any]:
    """One method as ``flyby methods`` shows it."""
    objective = OBJECTIVES[m.objective]
    settings = objective.settings_type.model_validate(m.objective_settings)
    fusion = FUSIONS[m.fusion] if m.fusion else None
    weights, extras = upload_bytes(m.objective, settings) if fusion or m.orient else (0, 0)
    return {
        "method": m.name,
        "objective": m.objective,
        "fusion": m.fusion,
        "about": m.about,
        "paper": m.paper,
        "provides": sorted(objective.provided(settings)),
        "needs": sorted(fusion.needs) if fusion else [],
        "exchanges": "one upload per site" if fusion else "one model per meeting" if m.orient else "nothing",
        "weight_bytes": weights,
        "extra_bytes": extras,
        "data_free": fusion is None or fusion.data_free,
        "mixed_architectures": bool(fusion and fusion.heterogeneous) or bool(m.orient),
    }


@cache
def upload_bytes(name: str, settings: ObjectiveSettings) -> tuple[int, int]:
    """Bytes of the weights and of the extras that a site of the demo sends: an untrained network over noise, since only
    shapes count."""
    kind = OBJECTIVES[name]
    rng = generator("flyby", "upload bytes")
    spec = kind.adapt_spec(ModelSpec(name="cnn-small", classes=10, channels=1, size=(8, 8)), settings)
    images = torch.randint(0, 256, (20, 8, 8, 1), generator=rng, dtype=torch.uint8)
    part = Part(images, torch.arange(20) % 10)
    site = Site("demo", part, part, part, tuple("0123456789"))
    network, objective = spec.build(rng).eval(), kind(settings)
    objective.prepare(network, site, 0)
    extras, _ = objective.extras(network, site, 0)
    weights, sent = list(network.state_dict().values()), list(extras.values())
    return sum(t.nbytes for t in weights), sum(t.nbytes for t in sent)
