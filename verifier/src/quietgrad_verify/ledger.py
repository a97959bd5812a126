"""A ledger's lines in a claim: whether they chain, whether they paid, and whether they hold the claim fast.

A line is ``{body, hash, kind, prev, seq, time}``; ``hash`` is the SHA-256 of the canonical JSON of the other five
and ``prev`` the hash of the line before. The head ``SEQ-HASH`` names the last line by 40 digits of its hash. A line
of kind ``certificate`` holds the digest of the claim (:func:`~quietgrad_verify.document.covered`). The chain has no
key: an author can make another, so lines bind a claim only against a head that the reader had by another way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quietgrad_verify.document import covered, digest_of

_LINE = {"body", "hash", "kind", "prev", "seq", "time"}
_HEAD = re.compile(r"([1-9][0-9]{0,17})-([0-9a-f]{40})")


@dataclass(frozen=True)
class Lines:
    """What the lines show: what is wrong with them, whether all are there, and whether they hold the claim."""

    problem: str
    whole: bool = False
    bound: bool = False
    words: str = ""


def check_lines(body: Mapping[str, Any]) -> Lines:
    """Check the ledger part of a claim's body, which is there."""
    part = body["ledger"]
    if set(part) != {"head", "lines", "run"} or not isinstance(part["lines"], list) or not part["lines"]:
        return Lines("it is not the part of a ledger")
    lines, head = part["lines"], _HEAD.fullmatch(str(part["head"]))
    if head is None or not all(isinstance(line, dict) and set(line) == _LINE for line in lines):
        return Lines("its lines or its head are not those of a ledger")
    if problem := _chain_problem(lines, int(head[1]), head[2]):
        return Lines(problem)
    whole = [line["seq"] for line in lines] == list(range(1, len(lines) + 1))
    if whole and (lines[0]["kind"] != "open" or set(lines[0]["prev"]) != {"0"}):
        return Lines("its first line does not open a ledger")
    if problem := _unpaid(body, lines):
        return Lines(problem)
    held = [
        line["body"] for line in lines if line["kind"] == "certificate" and line["body"].get("run") == part["run"]
    ]
    bound = any(each.get("digest") == covered(body) for each in held) if "source" in body else False
    if held and not bound:
        return Lines("it certifies this run otherwise: a part of the claim was edited")
    # The head holds fast what chains up to it: a line with lines left out behind it is tied to nothing.
    tied = {line["seq"] for place, line in enumerate(reversed(lines)) if line["seq"] == int(head[1]) - place}
    bound = bound and any(line["seq"] in tied and line["body"].get("digest") == covered(body) for line in lines)
    chosen = f"{len(lines)} lines of this {'account' if lines[0]['kind'] == 'open' else 'run'}"
    words = f"{len(lines)} lines that chain" if whole else chosen
    return Lines("", whole, bound, f"{words}; head {part['head']}")


def _chain_problem(lines: Sequence[Mapping[str, Any]], last: int, digits: str) -> str:
    before: Mapping[str, Any] | None = None
    for line in lines:
        content = {key: value for key, value in line.items() if key != "hash"}
        if type(line["seq"]) is not int or not isinstance(line["body"], dict) or line["hash"] != digest_of(content):
            return "a line was edited: its hash does not fit its content"
        beside = before is not None and line["seq"] == before["seq"] + 1
        if before is not None and (line["seq"] <= before["seq"] or (beside and line["prev"] != before["hash"])):
            return "a line does not follow the line before: one was removed, added or moved"
        before = line
    assert before is not None
    if last < before["seq"] or (last == before["seq"] and before["hash"][:40] != digits):
        return "its head is not that of its last line"
    if last > before["seq"] and [line["seq"] for line in lines] == list(range(1, len(lines) + 1)):
        return "its head names a later line: lines are missing"
    return ""


def _unpaid(body: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> str:
    """What the reservations of the run say against the claim; '' if nothing."""
    claim, run = body["claim"], body["ledger"]["run"]
    reservations: dict[str, dict[str, Any]] = {}
    for line in lines:
        entry = line["body"]
        if line["kind"] == "reserve" and str(entry.get("run")).removesuffix("~count").partition("#")[0] == run:
            reservations[str(entry.get("id"))] = {**entry, "counts": entry.get("event")}
        elif line["kind"] in ("close", "cancel", "condition") and str(entry.get("id")) in reservations:
            reservation = reservations[str(entry["id"])]
            if line["kind"] == "condition":
                reservation["condition"] = entry.get("condition")
            elif line["kind"] == "cancel":
                del reservations[str(entry["id"])]
            elif entry.get("gives_back_all_but") is not None:
                reservation["counts"] = entry["gives_back_all_but"]
    if not reservations:
        return "it holds no reservation of this run"
    event = body["event"]
    parties = event.get("parties", ()) if event.get("event") == "per-party" else ()
    wanted = [event, *(parties if isinstance(parties, list | tuple) else ())]
    for key in ("event", "counts"):
        parts = [reservation[key] for reservation in reservations.values()]
        wanted_here = parts if len(parts) == 1 else [{"event": "composed", "parts": parts}, *parts]
        if any(each in wanted for each in wanted_here):
            break
    else:
        return "it paid for other releases than those claimed"
    for entry in reservations.values():
        same = (entry.get("delta"), entry.get("relation"), entry.get("unit", "record"), entry.get("condition"))
        if same == (claim["delta"], claim["relation"], claim["unit"], claim.get("condition")):
            return ""
    return "it has the run under another δ, relation, unit or condition"
