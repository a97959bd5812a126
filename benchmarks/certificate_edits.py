"""Edits of certificates: which pass, of which field, and what that field's standing is.

Every kind of certificate is edited at random places, signed and unsigned, with and without its ledger part. The
first editor mends the file's digest. The second mends the statement as well, as a careful forger would. An edit
passes if quietgrad-verify still says that the claim is proved. It is listed by field and standing:

    python benchmarks/certificate_edits.py --edits 2000

A field that should be held fast and is not stands *open* in the verdict, which repeats nothing of it as shown.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np

import quietgrad as qg
import quietgrad_verify as qv
from quietgrad.assurance.certificates import PrivacyCertificate, SigningKey, issue, new_key
from quietgrad.federation import Party, simulate
from quietgrad_verify import proof, verdict
from quietgrad_verify.document import Claim, Unreadable, parse, standing, statement

RESULTS = Path(__file__).parent / "results"
NAMES = ("replace-one", "add-remove", "person", "record")
Path_ = tuple[str | int, ...]
Editor = Literal["digest", "digest and statement"]


def made(folder: Path, kinds: tuple[str, ...] = ()) -> dict[str, PrivacyCertificate]:
    """A certificate of every kind, or of those named, each with its ledger part."""
    folder.mkdir(exist_ok=True)
    loss, rng = qg.objectives.Logistic(), np.random.default_rng(0)
    X = rng.normal(size=(300, 2))
    data = X, (X[:, 0] > 0) * 1
    add, replace = qg.Budget(1.0, 1e-5), qg.Budget(1.0, 1e-5, qg.Relation.REPLACE_ONE)
    runs: dict[str, tuple[Any, qg.Budget, int | None]] = {
        "gaussian": (qg.DPGD(steps=4), add, 300),
        "poisson": (qg.DPSGD(steps=4, batch_size=30), add, 300),
        "counted": (qg.DPSGD(steps=4, batch_size=30), add, None),
        "random allocation": (qg.DPSGD(steps=10, batch_size=60, sampling="random-allocation"), add, 300),
        "fixed size": (qg.DPSGD(steps=4, batch_size=30, sampling="fixed-size"), replace, None),
        "correlated": (qg.DPSGD(steps=8, sampling="turns", cohorts=4, noise="correlated"), add, 300),
        "filter": (qg.DPAGD(), add, 300),
        "random round": (qg.RRPSGD(steps=6, batch_size=30), add, 300),
    }
    found = {}
    for name, (method, budget, n) in runs.items():
        if kinds and name not in kinds:
            continue
        home, ledger = folder / name.replace(" ", "-"), folder / f"{name.replace(' ', '-')}.jsonl"
        qg.minimize(loss, data, method, budget=budget, n_public=n, ledger=ledger).save(home)
        found[name] = issue(home, ledger=ledger)
    if kinds and "federation" not in kinds:
        return found
    parties = [Party(X[k::3], data[1][k::3]) for k in range(3)]
    home = folder / "federation"
    method = qg.DPSGD(steps=3, batch_size=30)
    simulate(method, loss, parties, budget=qg.Budget(2.0, 1e-5), trust="secure", secure="masks").save(home)
    found["federation"] = issue(home)
    return found


def foreign() -> dict[str, Claim]:
    """A claim of another library's run; it has no ledger part."""
    file = RESULTS / "foreign_claims" / "opacus-Poisson_samples.json"
    return {"opacus": qv.read(file)}


def paths(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Every place of a JSON document below its top."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from paths(item, (*path, key))


def changed(value: Any, rng: random.Random) -> Any:
    """Another value in its place: like it, near it, of another kind, or of nothing."""
    if isinstance(value, bool):
        options: list[Any] = [not value, None]
    elif isinstance(value, int | float):
        options = [value * 2 + 1, value * 1.01, value / 2, -value, 0, None, str(value)]
    elif isinstance(value, str):
        options = ["", value + "x", value[:-1], "f" + value[1:], None, *NAMES]
    elif isinstance(value, list):
        options = [[], value[:-1], value[::-1], [*value, "if nothing is wrong"], [*value, *value], None]
    elif isinstance(value, dict):
        dropped = dict(list(value.items())[1:])
        options = [{}, dropped, {**value, "more": 1}, None]
    else:
        options = [1, "if it rains", [], {}]
    return rng.choice(options)


def edit(body: Any, path: Path_, value: Any) -> Any:
    """A copy of the body with one value replaced."""
    body = copy.deepcopy(body)
    holder = body
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return body


def at(body: Any, path: Path_) -> Any:
    """The value at a place."""
    for key in path:
        body = body[key]
    return body


def try_edits(claim: Claim, number: int, editor: Editor, seed: int) -> dict[str, Any]:
    """Make so many edits of a claim's body; what passed, by field, and what of it stands open."""
    rng, places = random.Random(seed), list(paths(claim.body))
    passed: Counter[str] = Counter()
    opened: Counter[str] = Counter()
    same = 0
    for _ in range(number):
        path = rng.choice(places)
        body = edit(claim.body, path, changed(at(claim.body, path), rng))
        undone = path[0] == "statement" and editor != "digest"
        if undone or repr(body) == repr(claim.body):
            same += 1
            continue
        try:
            if editor == "digest and statement":
                body["statement"] = statement(body)
            forged = parse(Claim(body, claim.signature, claim.version).to_bytes(), "forged")
            found = qv.check(forged)
        except (Unreadable, LookupError, TypeError, ValueError, AttributeError):
            continue
        if found.ok:
            field = ".".join(str(key) for key in path if not isinstance(key, int))
            name = ".".join(map(str, path[:2]))
            left_open = name in found.open or (path[0] == "ledger" and bool(found.open))
            (opened if left_open else passed)[f"{field} [{standing(('body', *path))}]"] += 1
    return {"edits": number, "no change": same, "passed": dict(passed), "passed and said to be open": dict(opened)}


def variants(document: PrivacyCertificate | Claim, key: SigningKey) -> Iterator[tuple[str, Claim]]:
    """Signed and unsigned, with and without the ledger part."""
    for with_ledger in (True, False):
        body = copy.deepcopy(document.body)
        if not with_ledger:
            body["ledger"] = None
        elif body["ledger"] is None:
            continue
        body["statement"] = statement(body)
        words = "with its ledger" if with_ledger else "without a ledger"
        unsigned = PrivacyCertificate(body)
        yield f"unsigned, {words}", parse(unsigned.to_bytes(), "made")
        yield f"signed, {words}", parse(key.sign(unsigned).to_bytes(), "made")


def remember_proofs() -> None:
    """Prove each event once: most edits are elsewhere."""
    prove = proof.prove

    @cache
    def known(event: str, delta: Any, relation: Any) -> Any:
        try:
            return prove(json.loads(event), delta=delta, relation=relation)
        except Exception as error:
            return error

    def remembered(event: object, *, delta: Any, relation: Any) -> Any:
        value = known(json.dumps(event, sort_keys=True), delta, relation)
        if isinstance(value, Exception):
            raise value
        return value

    verdict.prove = remembered  # type: ignore[attr-defined]


def main(number: int, kinds: tuple[str, ...]) -> dict[str, Any]:
    """All kinds, or those named, all variants, both editors."""
    remember_proofs()
    result: dict[str, Any] = {"command": f"python benchmarks/certificate_edits.py --edits {number}", "kinds": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["QUIETGRAD_STATE"] = str(folder / "state")
        new_key(folder / "key")
        key = SigningKey.read(folder / "key")
        documents: dict[str, PrivacyCertificate | Claim] = {**made(folder, kinds), **foreign()}
        for kind, document in documents.items():
            if kinds and kind not in kinds:
                continue
            for words, claim in variants(document, key):
                assert qv.check(claim).ok or kind == "filter", (kind, qv.check(claim))
                for editor in ("digest", "digest and statement"):
                    found = try_edits(claim, number, editor, seed=len(result["kinds"]))
                    result["kinds"][f"{kind}, {words}, mends the {editor}"] = found
                    print(kind, words, editor, found["passed"], found["passed and said to be open"], flush=True)
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--edits", type=int, default=2000)
    parser.add_argument("--kinds", nargs="*", default=(), help="only these; the others stay as they are")
    given = parser.parse_args()
    outcome, file = main(given.edits, tuple(given.kinds)), RESULTS / "certificate_edits.json"
    if given.kinds:
        kept = json.loads(file.read_text(encoding="utf-8"))["kinds"]
        outcome["kinds"] = {**kept, **outcome["kinds"]}
    outcome = {
        "command": outcome["command"],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("quietgrad", "quietgrad-verify", "dp-accounting", "numpy")},
        "kinds": outcome["kinds"],
    }
    file.write_text(json.dumps(outcome, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
