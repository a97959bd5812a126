"""The claim that a certificate states: read whole, or refused if a part is not of its kind."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quietgrad.assurance.certificates.document import PUBLIC_MODEL, Json, canonical
from quietgrad.core.accounting.budget import Relation, check_delta
from quietgrad.core.accounting.events import Event
from quietgrad.core.session.statement import REFUTED, SEEDED, Privacy, event_size

ALTERED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, MemoryError)
"""Errors of a body that is not of its kind."""
# The events of a stranger are proved here, so they must fit the memory.
_MOST_EVENTS, _MOST_BYTES, _MOST_LAW = 4096, 1 << 17, 512


@dataclass(frozen=True)
class Finding:
    """One check of a certificate; ``ok=None`` where it does not apply."""

    what: str
    ok: bool | None
    words: str


@dataclass(frozen=True)
class Claim:
    """The statement of privacy that a body holds, and its parts that are never ``None``."""

    privacy: Privacy
    event: Event
    epsilon: float
    delta: float
    relation: Relation
    foreign: bool = False
    """Whether it is of another program's run, without a plan."""


def read_claim(body: Json) -> Claim:
    """The claim; one of ``ALTERED`` if a part of the body is not of its kind, or no ε is claimed."""
    stated, event = body["claim"], body["event"]
    laws = (len(v["law"]) for v in values_of(event) if isinstance(v, dict) and isinstance(v.get("law"), list))
    if event_size(event) > _MOST_EVENTS or len(canonical(event)) > _MOST_BYTES or max(laws, default=0) > _MOST_LAW:
        raise ValueError("too many events")
    privacy = Privacy.from_json({**stated, "event": event})
    # Nothing was added, and nothing is spelt otherwise.
    if "event" in stated or privacy.to_json() != {"condition": None, **stated, "event": event}:
        raise ValueError("claim")
    if privacy.events is None or privacy.relation is None or type(privacy.epsilon) is not float:
        raise ValueError("no ε")
    not_private = SEEDED in privacy.notes or any(str(note).startswith(REFUTED) for note in privacy.notes)
    if not privacy.is_private or not 0.0 < privacy.epsilon < math.inf or not_private:
        raise ValueError("not private")
    # Parts that nothing else in the file could contradict must at least be of their kind.
    data, foreign = body["data"], "source" in body and body["plan"] is None
    plan = {"stopped_by": "", "algorithm": ""} if foreign else body["plan"]
    model: Json = {"sha256": "0" * 64, "parameters": 1} if foreign else body["model"]
    source = body.get("source", {"program": "", "version": "", "object": "", "stated": None})
    good = (
        set(source) == {"program", "version", "object", "stated"} and (body["model"] is None) == foreign,
        all(isinstance(source[key], str) for key in ("program", "version", "object")),
        source["stated"] is None or set(source["stated"]) == {"epsilon", "delta"},
        isinstance(body.get("statement", ""), str),
        re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", body["issued"]),
        {"name", "n_public"} <= set(data) <= {"name", "n_public", *PUBLIC_MODEL} and isinstance(data["name"], str),
        all(value is None or isinstance(value, str | int | float) for value in data.values()),
        set(model) == {"sha256", "parameters"} and type(model["parameters"]) is int and model["parameters"] > 0,
        re.fullmatch(r"[0-9a-f]{64}", model["sha256"]),
        all(isinstance(value, str) for value in body["versions"].values()),
        isinstance(plan["stopped_by"], str) and isinstance(plan["algorithm"], str),
    )
    if not all(good):
        raise ValueError("parts")
    delta = check_delta(privacy.delta or 0.0)
    return Claim(privacy, privacy.events, privacy.epsilon, delta, privacy.relation, foreign)


def values_of(value: object) -> Iterator[Any]:
    """Every value of a JSON document, containers too."""
    yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from values_of(item)
