"""From loose values to typed settings, with errors a person can act on."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from copy import deepcopy
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, TypeVar

from pydantic import BaseModel, SerializerFunctionWrapHandler, ValidationError, model_serializer

from flyby.errors import BadInput, unknown
from flyby.names import printable

Typed = TypeVar("Typed", bound=BaseModel)


class Grown(BaseModel):
    """Settings that have grown since parcels and uploads were first named by them: of the fields in ``later``, its own
    and those of the settings it is made of, a dump has only those that are not at their default, so that what was made
    before keeps its bytes and its name."""

    later: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _as_ever(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields, silent = handler(self), self.silent()
        return {name: value for name, value in fields.items() if name not in silent}

    def silent(self) -> set[str]:
        grown = {name for kind in type(self).__mro__ for name in kind.__dict__.get("later", ())}
        return {name for name in grown if getattr(self, name) == type(self).model_fields[name].default}


class Complaint(NamedTuple):
    """What pydantic has against a value: where it stands, why it will not do, pydantic's word for that, and the value
    where it was asked for."""

    place: str
    reason: str
    kind: str
    value: Any = None


def complaint(error: ValidationError, *, value: bool = False) -> Complaint:
    """The first of pydantic's complaints. Without ``value`` what stood there is not touched: a stranger's may be
    large."""
    first = error.errors(include_url=False, include_context=False, include_input=value)[0]
    place = printable(".".join(str(part) for part in first["loc"]))
    return Complaint(place, first["msg"].removeprefix("Value error, "), first["type"], first.get("input"))


def sentence(error: ValidationError) -> str:
    """The first of pydantic's complaints as one phrase: ``place: reason``."""
    first = complaint(error)
    return f"{first.place}: {first.reason}" if first.place else first.reason


def build(kind: type[Typed], values: Mapping[str, Any], where: str) -> Typed:
    """``kind(**values)``, or one sentence that names the setting, what was given and what would do."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        name, reason, why, value = complaint(error, value=True)
        if why == "extra_forbidden":
            raise unknown(f"{where} setting", name, kind.model_fields) from None
        if why == "missing":
            raise BadInput(f"{where} does not say its {name}; add it") from None
        given = f"{where}.{name} = {value!r} will not do" if name else f"these {where} settings will not do"
        raise BadInput(f"{given}: {reason[0].lower()}{reason[1:]}") from None


def described(kind: type[BaseModel], name: str) -> str:
    """The sentence of one setting: its own, or that of the class it was first written in."""
    fields = (getattr(one, "model_fields", {}).get(name) for one in kind.__mro__)
    return next((field.description for field in fields if field is not None and field.description), "")


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """``values[key] = value``; a key such as ``views.flip`` is put among the settings ``views``."""
    name, dot, inner = key.partition(".")
    held = values.get(name)
    values[name] = {**(held if isinstance(held, dict) else {}), inner: value} if dot else value


def parse_assignment(text: str) -> tuple[str, Any]:
    """``key=value`` with the value read as YAML: numbers, true/false, null, [lists] and words."""
    import yaml

    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise BadInput(f"--set takes key=value, got {text!r}; for example --set train.lr=0.01")
    try:
        value = deepcopy(_yaml(raw))
    except yaml.YAMLError:
        raise BadInput(f"--set {key}: the value {raw!r} cannot be read; quote it") from None
    if isinstance(value, str) and value == raw.strip():  # what was quoted stays a word
        with contextlib.suppress(ValueError):
            value = float(value)  # YAML reads 1e-3 as a word
    return key.strip(), value


@lru_cache(maxsize=4096)
def _yaml(raw: str) -> Any:
    """A study reads the same few values once per cell, and YAML takes its time."""
    import yaml

    return yaml.safe_load(raw)
