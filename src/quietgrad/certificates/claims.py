"""The claim of a certificate: read as a statement of privacy, or refused, before anything is believed of it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from quietgrad.certificates.document import canonical
from quietgrad.privacy.budget import Relation, check_delta
from quietgrad.privacy.events import Event
from quietgrad.training.result import REFUTED, SEEDED, Privacy, event_size

_MOST_EVENTS = 4096
_MOST_BYTES = 1 << 17  # of an event: a law of 128 groups has five thousand
_MOST_LAW = 512  # rounds that are told apart
ALTERED = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)


@dataclass(frozen=True)
class Claim:
    """The parts of a body that were read and are of their kind."""

    privacy: Privacy
    event: Event
    epsilon: float
    delta: float
    relation: Relation


def read_claim(body: dict[str, Any]) -> Claim:
    stated, event = body["claim"], body["event"]
    if not isinstance(stated, dict) or "event" in stated:
        raise ValueError("claim")
    if event_size(event) > _MOST_EVENTS or len(canonical(event)) > _MOST_BYTES or _longest(event) > _MOST_LAW:
        raise ValueError("too many events")
    privacy = Privacy.from_json({**stated, "event": event})
    if privacy.to_json() != {
        "condition": None,
        **stated,
        "event": event,
    }:  # nothing was added, and nothing is spelt otherwise
        raise ValueError("claim")
    if privacy.events is None or privacy.relation is None or type(privacy.epsilon) is not float:
        raise ValueError("no ε")
    if not privacy.is_private or not 0.0 < privacy.epsilon < math.inf:
        raise ValueError("not private")
    if SEEDED in privacy.notes or any(str(note).startswith(REFUTED) for note in privacy.notes):
        raise ValueError("not private")
    _check_kinds(body)
    return Claim(privacy, privacy.events, privacy.epsilon, check_delta(privacy.delta or 0.0), privacy.relation)


_DATA = {
    "name", "n_public", "objective", "regularizer", "intercept", "row_bound", "rows", "features", "task", "classes",
}  # fmt: skip


def _check_kinds(body: dict[str, Any]) -> None:
    """Refuse parts of another kind, wherever nothing else in the file could contradict them."""
    plan, data, model, versions = body["plan"], body["data"], body["model"], body["versions"]
    if not all(isinstance(part, dict) for part in (plan, data, model, versions)):
        raise TypeError("parts")
    good = (
        isinstance(body["issued"], str) and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", body["issued"]),
        {"name", "n_public"} <= set(data) <= _DATA and isinstance(data["name"], str),
        all(value is None or isinstance(value, str | int | float) for value in data.values()),
        set(model) == {"sha256", "parameters"} and type(model["parameters"]) is int and model["parameters"] > 0,
        isinstance(model.get("sha256"), str) and re.fullmatch(r"[0-9a-f]{64}", model["sha256"]),
        all(isinstance(value, str) for value in versions.values()),
        isinstance(plan.get("stopped_by"), str) and isinstance(plan.get("algorithm"), str),
    )
    if not all(good):
        raise ValueError("parts")


def _longest(event: Any) -> int:
    """How many rounds the longest law in an event has."""
    if isinstance(event, list):
        return max(map(_longest, event), default=0)
    if not isinstance(event, dict):
        return 0
    law = event.get("law")
    return max(len(law) if isinstance(law, list) else 0, *map(_longest, event.values()), 0)
