"""What there is, by name: methods, server rules, objectives, models, statistics, splits and groups of settings, each
with every key that ``--set`` takes."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from flyby.data.splits import SPLITS
from flyby.data.views import ViewSettings
from flyby.errors import BadInput, unknown
from flyby.fusion import FUSIONS, Fusion
from flyby.meeting.settings import FleetSettings, stage_defaults
from flyby.models import ARCHITECTURES, ModelSpec
from flyby.objectives import OBJECTIVES, Objective
from flyby.runs.config import SECTIONS, TOP, RunConfig
from flyby.runs.methods import METHODS, facts_of
from flyby.settings import described
from flyby.statistics.catalogue import STATISTICS
from flyby.training.settings import TrainSettings

Row = dict[str, Any]
# The groups that are the same for every method; those of objectives, rules and meetings belong to names.
GROUPS: dict[str, tuple[type[BaseModel], str]] = {
    "train": (TrainSettings, "how a site trains; objectives and methods have defaults of their own for some"),
    "views": (ViewSettings, "how images are augmented; each objective has its own defaults"),
    "data": (SECTIONS["data"], "which data, and how it is read"),
    "split": (SECTIONS["split"], "how the data is divided among the sites"),
    "model": (SECTIONS["model"], "the network; sizes, channels and classes come from the data"),
    "attack": (SECTIONS["attack"], "sites that lie, to see what survives them"),
    "contacts": (SECTIONS["contacts"], "how a run follows a contact plan (--contacts)"),
    "orient": (FleetSettings, "nodes that meet (fol and its kin); small images have shorter stages by default"),
}
OWNED = {"objective": "an objective", "fusion": "a server rule"}


def rules() -> list[Row]:
    return [
        {"rule": r.name, "about": r.about, "paper": r.paper, "needs": sorted(r.needs), "data_free": bool(r.data_free)}
        for r in FUSIONS.values()
    ]


def objectives() -> list[Row]:
    return [
        {"objective": o.name, "about": o.about, "paper": o.paper, "provides": sorted(o.provides)}
        for o in OBJECTIVES.values()
    ]


def models() -> list[Row]:
    return [{"model": name, "about": a.about, "smallest": a.smallest} for name, a in ARCHITECTURES.items()]


def groups() -> list[Row]:
    found = [{"group": name, "about": about} for name, (_, about) in GROUPS.items()]
    return [
        *found,
        *({"group": name, "about": f"settings of {whose}; explain its name"} for name, whose in OWNED.items()),
    ]


def explain(name: str) -> list[Row]:
    """All that bears this name, or the settings of this key: each with its ``kind``, what there is to say about it, and
    ``keys``. A name that nothing has is a BadInput with the nearest."""
    cards: dict[str, tuple[Mapping[str, Any], Callable[[str], Row]]] = {
        "method": (METHODS, _method),
        "server rule": (FUSIONS, _rule),
        "objective": (OBJECTIVES, _objective),
        "model": (ARCHITECTURES, _model),
        "statistic": (STATISTICS, _statistic),
        "split": (SPLITS, _split),
    }
    if not name:
        raise BadInput("name what to explain; `flyby methods` lists what there is")
    found = [{"kind": kind, "name": name, **card(name)} for kind, (known, card) in cards.items() if name in known]
    if name in GROUPS:
        kind, about = GROUPS[name]
        found.append({"kind": "settings", "name": name, "about": about, "keys": keys(kind, name)})
    if name in OWNED:
        owners = OBJECTIVES if name == "objective" else FUSIONS
        raise BadInput(f"{name} settings belong to {OWNED[name]}; explain one by its name: {', '.join(owners)}")
    found += [{"kind": "setting", "name": row["key"], "about": "", "keys": [row]} for row in _named(name)]
    if not found:
        names = {
            *METHODS,
            *FUSIONS,
            *OBJECTIVES,
            *ARCHITECTURES,
            *STATISTICS,
            *GROUPS,
            *(r["key"] for r in everything()),
        }
        more = (
            "`flyby methods` lists what there is, `flyby data` the data and the splits, `flyby backbones` the backbones"
        )
        raise unknown("name", name, names, more)
    return found


def keys(kind: type[BaseModel], section: str, given: Mapping[str, Any] | None = None) -> list[Row]:
    """Every key of some settings, those inside settings by dotted names; ``given`` are defaults of a method's own."""
    rows: list[Row] = []
    for name, field in kind.model_fields.items():
        key = f"{section}.{name}" if section else name
        inner = _inside(field.annotation)
        if inner is not None and inner is not ViewSettings:
            rows += keys(inner, key)
            continue
        default = (given or {}).get(name, field.get_default(call_default_factory=True))
        rows.append({"key": key, "default": _plain(default), "takes": takes(field), "about": described(kind, name)})
    return rows


def everything() -> list[Row]:
    """Every key that ``--set`` takes anywhere, with whose it is."""
    found = [{**row, "of": ""} for kind, name in ((k, n) for n, (k, _) in GROUPS.items()) for row in keys(kind, name)]
    found += [{**row, "of": ""} for row in keys(RunConfig, "") if row["key"] in TOP]
    found += [{**row, "of": o.name} for o in OBJECTIVES.values() for row in keys(o.settings_type, "objective")]
    return found + [{**row, "of": f.name} for f in FUSIONS.values() for row in keys(f.settings_type, "fusion")]


def _named(name: str) -> list[Row]:
    """The settings of one key, written whole or by its last part; equal ones of several rules once."""
    once: dict[tuple[str, str, str], Row] = {}
    for row in everything():
        if row["key"] == name or row["key"].partition(".")[2] == name:
            same = row["key"], str(row["default"]), row["about"]
            once.setdefault(same, {**row, "of": []})["of"] += [row["of"]] if row["of"] else []
    return list(once.values())


def takes(field: FieldInfo) -> str:
    """What a key can be set to, in few words."""
    words = list(dict.fromkeys(_kinds(field.annotation)))
    limits = [*field.metadata]
    texts = [
        *(f"at least {m.ge}" for m in limits if isinstance(m, Ge)),
        *(f"above {m.gt}" for m in limits if isinstance(m, Gt)),
        *(f"at most {m.le}" for m in limits if isinstance(m, Le)),
        *(f"below {m.lt}" for m in limits if isinstance(m, Lt)),
    ]
    return ", ".join([" | ".join(words), *texts])


def _kinds(annotation: Any) -> Iterable[str]:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _kinds(args[0])
    elif origin in (Union, types.UnionType):
        for part in args:
            yield from _kinds(part)
    elif origin is Literal:
        yield from map(str, args)
    elif origin in (tuple, list):
        yield "[list]"
    elif annotation is bool:
        yield from ("true", "false")
    elif annotation is type(None):
        yield "null"
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "keys of `flyby explain views`" if annotation is ViewSettings else "settings"
    else:
        yield {int: "whole number", float: "number", str: "word"}.get(annotation, "value")


def _inside(annotation: Any) -> type[BaseModel] | None:
    parts = [annotation, *get_args(annotation)]
    return next((p for p in parts if isinstance(p, type) and issubclass(p, BaseModel)), None)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return [_plain(one) for one in value] if isinstance(value, tuple | list | frozenset) else value


# -- cards


def _method(name: str) -> Row:
    method, facts = METHODS[name], facts_of(METHODS[name])
    objective = OBJECTIVES[method.objective]
    settings = objective.settings_type.model_validate(method.objective_settings)
    found = {
        key: facts[key]
        for key in (
            "about",
            "paper",
            "objective",
            "fusion",
            "exchanges",
            "needs",
            "provides",
            "weight_bytes",
            "extra_bytes",
        )
    }
    found["fits"] = _fitting(objective.provided(settings)) if method.fusion else []
    trained = {} if method.orient else {**objective.defaults(settings), **method.train}
    rows = keys(objective.settings_type, "objective", method.objective_settings)
    if method.fusion:
        rows += keys(FUSIONS[method.fusion].settings_type, "fusion", method.fusion_settings.get(method.fusion))
    if method.orient:
        rows += keys(FleetSettings, "orient", stage_defaults((32, 32), method.orient)[1])
    return {**found, "train": _plain_all(trained), "keys": rows}


def _rule(name: str) -> Row:
    rule: type[Fusion] = FUSIONS[name]
    able = [o.name for o in OBJECTIVES.values() if rule.needs <= o.provides | set(o.sends)]
    asked = sorted(rule.needs & set(STATISTICS))
    others = [o.name for o in OBJECTIVES.values() if o.name not in able and rule.needs <= o.provides | set(STATISTICS)]
    return {
        **{"about": rule.about, "paper": rule.paper, "needs": sorted(rule.needs), "wants": sorted(rule.wants)},
        "objectives": able,
        **({"when_asked": others, "ask": f"--set objective.send=[{','.join(asked)}]"} if others else {}),
        **{"data_free": bool(rule.data_free), "mixed_architectures": rule.heterogeneous},
        "keys": keys(rule.settings_type, "fusion"),
    }


def _objective(name: str) -> Row:
    kind: type[Objective] = OBJECTIVES[name]
    settings = kind.settings_type()
    return {
        **{"about": kind.about, "paper": kind.paper, "provides": sorted(kind.provided(settings))},
        **{"fits": _fitting(kind.provided(settings)), "train": _plain_all(kind.defaults(settings))},
        "keys": keys(kind.settings_type, "objective"),
    }


def _model(name: str) -> Row:
    one = ARCHITECTURES[name]
    spec = ModelSpec(name=name, classes=10, channels=3, size=(max(32, one.smallest),) * 2)
    keys_ = keys(SECTIONS["model"], "model")
    return {
        **{"about": one.about, "smallest": one.smallest, "parameters": spec.parameter_count()},
        "keys": [row for row in keys_ if row["key"] in ("model.width", "model.stem", "model.projector")],
    }


def _statistic(name: str) -> Row:
    text = " ".join((STATISTICS[name].__doc__ or "").split("\n\n")[0].split())
    rules = [f.name for f in FUSIONS.values() if name in f.needs]
    return {"about": text, "ask": f"--set objective.send=[{name}]", "rules": rules, "keys": []}


def _split(name: str) -> Row:
    text = " ".join((SPLITS[name].__doc__ or "").split("\n\n")[0].split())
    return {"about": text, "keys": keys(SECTIONS["split"], "split", {"name": name})}


def _fitting(provided: frozenset[str]) -> list[str]:
    return [f.name for f in FUSIONS.values() if f.needs <= provided]


def _plain_all(values: Mapping[str, Any]) -> Row:
    return {name: _plain(value) for name, value in values.items()}
