"""Held-out records of a run: who they are, what a private score of them costs, and that they were not trained on.

Under add-remove a record is held out by a keyed hash of itself (or of its person's id), under replace-one by its
position. So its side does not depend on the other records, neighbouring tables have neighbouring parts, and a
resumed run finds the same split.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from quietgrad.core.accounting.accounting import sensitivity_factor
from quietgrad.core.accounting.budget import Budget
from quietgrad.core.accounting.closed_form_accountants import gaussian_mu
from quietgrad.core.errors import BudgetError, DataError, SettingError
from quietgrad.core.files import read_bytes, write_atomically
from quietgrad.core.ledger.account import Account
from quietgrad.core.ledger.fingerprints import fingerprint
from quietgrad.core.ledger.keys import KeyFile
from quietgrad.data.dataset import Dataset, Labels, Matrix, public_order
from quietgrad.methods.score_noise import TOO_NOISY

if TYPE_CHECKING:
    from quietgrad.estimators.scoring import PrivateScore

_TRAINED = ".trained"
"""In a run's folder: the name under which its owner keeps digests of the records that were trained on."""
_DIGEST = 8  # bytes
_SURE = 6.0  # deviations: a false alarm in a billion tables


Ids: TypeAlias = npt.NDArray[np.generic] | None


def _digests(X: Matrix, y: Labels, ids: Ids, key: bytes) -> npt.NDArray[np.uint64]:
    """One keyed digest per record, of its features and label, or of its person's id."""
    rows: Iterable[bytes]
    if ids is not None:
        rows = (str(one).encode() for one in ids)
    elif not isinstance(X, np.ndarray):
        rows = (
            X.indices[a:b].tobytes() + X.data[a:b].tobytes() + np.float64(label).tobytes()
            for a, b, label in zip(X.indptr[:-1], X.indptr[1:], y, strict=True)
        )
    else:
        table = np.ascontiguousarray(np.column_stack([np.asarray(X, np.float64), np.asarray(y, np.float64)]))
        rows = (row.tobytes() for row in table)
    words = b"".join(hashlib.blake2b(row, digest_size=_DIGEST, key=key).digest() for row in rows)
    return np.frombuffer(words, np.uint64)


def hold_out_records(data: Dataset, share: float, key: str, *, fixed: bool) -> Dataset:
    """The data set with a share of its records (of its people, if it has ids of them) held out.

    ``fixed`` holds out a fixed number by position: under replace-one the sizes of both parts are public.
    """
    if not 0.0 < share < 1.0:
        raise SettingError("{holdout}: must be between 0 and 1, such as 0.2.", holdout=share)
    if data.X_test is not None:
        raise DataError(f"{data.name}: has held-out records of its own; leave --holdout out.")
    if fixed and data.person is not None:
        raise DataError(
            "--holdout: under replace-one it splits records only, because replacing one person could move others "
            "to the other side. Use --relation add-remove, or give held-out people with --test."
        )
    if fixed:  # n is public, and a record that replaces another has its place
        aside = np.isin(np.arange(data.n), public_order(data.n, int(key, 16))[: int(share * data.n)])
    else:
        secret = bytes.fromhex(key)
        coins = _digests(data.X, data.y, data.person, secret)
        if data.person is None and len(np.unique(coins)) < len(coins):
            # Records that are equal have a coin each, by how many such came before.
            marks, seen = coins, Counter[int]()
            coins = marks.copy()
            for row, mark in enumerate(marks.tolist()):
                if before := seen[mark]:
                    said = marks[row].tobytes() + before.to_bytes(8, "little")
                    word = hashlib.blake2b(said, digest_size=_DIGEST, key=secret).digest()
                    coins[row] = np.frombuffer(word, np.uint64)[0]
                seen[mark] += 1
        aside = coins < np.uint64(int(share * 2**64))
    person = None if data.person is None else data.person[~aside]
    return replace(
        data, X=data.X[~aside], y=data.y[~aside], X_test=data.X[aside], y_test=data.y[aside], person=person,
        person_test=None if data.person is None else data.person[aside],
        notes=(*data.notes, f"held out: {share:.0%} of records {'by position' if fixed else 'by a keyed hash'}"),
    )  # fmt: skip


def remember_trained(folder: Path, data: Dataset) -> None:
    """Keep keyed digests of the training records beside this user's keys; the run's folder has their name alone.

    A copy of the folder tells nothing of the records, not even how many there are.
    """
    salt = secrets.token_bytes(32)
    kept, key = _kept_marks(salt)
    marks = np.sort(_digests(data.X, data.y, data.person, key))
    kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(kept, (b"r" if data.person is None else b"p") + marks.tobytes(), private=True)
    write_atomically(folder / _TRAINED, salt, private=True)


def _kept_marks(salt: bytes) -> tuple[Path, bytes]:
    """Where this user keeps the digests of a run, and the key that they are made with."""
    key = bytes.fromhex(fingerprint([b"trained", salt]))
    return KeyFile.directory().parent / "trained" / salt[:16].hex(), key


def were_trained_on(folder: Path, X: Matrix, y: Labels, ids: Ids) -> bool:
    """Whether records are of people the run was trained on.

    With ids, one person in common is enough. Without, records of different people may be equal, so the share of
    known records is held against Good and Turing's estimate of it for new people: 1 − (records met once)/n.
    """
    path = folder / _TRAINED
    if not path.exists():
        return False
    kept, key = _kept_marks(read_bytes(path))
    if not kept.exists():  # another user's run, or another machine's
        return False
    content = read_bytes(kept)
    kind, known = content[:1], np.frombuffer(content[1:], np.uint64)
    by_id = kind == b"p"
    if by_id and ids is None:
        return False
    marks = _digests(X, y, ids if by_id else None, key)
    met = float(np.isin(marks, known).mean())
    if by_id:
        return met > 0.0
    _, counts = np.unique(known, return_counts=True)
    usual = 1.0 - float((counts == 1).sum()) / len(known)
    spread = math.sqrt(max(usual * (1.0 - usual), 1.0 / len(known)) * (1.0 / len(marks) + 1.0 / len(known)))
    return met > usual + _SURE * spread


def expected_error(n: float, budget: Budget, *, classes: int) -> float:
    """About how uncertain a private accuracy (R² if there are no classes) of ``n`` people is, by n and ε alone.

    >>> from quietgrad.core.accounting.budget import Budget
    >>> round(expected_error(10_000, Budget(0.3, 1e-6), classes=2), 3)
    0.008
    """
    n = max(n, 1.0)
    noise = sensitivity_factor(budget.relation) / gaussian_mu(budget.epsilon, budget.delta)
    if classes == 0:
        return math.hypot(2.0 * 12.0 * noise / n, 1.0 / math.sqrt(n))
    bins = (10 if n < 5000 else 20) if classes == 2 else classes
    groups = 1.0 if classes == 2 else math.sqrt(2.0)
    return math.hypot(groups * noise * math.sqrt(bins) / n, 0.5 / math.sqrt(n))


def hopeless_score(n: float, budget: Budget, data: Dataset) -> str | None:
    """Why a private score of about ``n`` people would not be worth releasing; ``None`` if it is."""
    error = expected_error(n, budget, classes=0 if data.classes is None else len(data.classes))
    if error <= TOO_NOISY:
        return None
    return (
        f"not released: at this n and ε = {budget.epsilon:.3g} its error would be about ± {error:.1g}; hold out "
        "more, or give the score more of ε (--score-share)."
    )


def score_held_out(
    model: Any, data: Dataset, budget: Budget, account: Account, *, share: float | None, n: float
) -> PrivateScore | str:
    """Release a private score of the held-out records, or return the reason why none was released.

    Args:
        model: the fitted estimator.
        data: its held-out part is scored.
        budget: the guarantee of the score alone.
        account: who pays.
        share: the share of the records that was held out. ``None`` if they came in a file of their own, whose size
            is a secret until the score counts it.
        n: the public number of records (people) that the model was trained on.
    """
    from quietgrad.estimators.scoring import private_score  # loads scikit-learn

    classes = 0 if data.classes is None else len(data.classes)
    if share is not None and (why := hopeless_score(n * share / (1.0 - share), budget, data)) is not None:
        return f"{why} This share of ε was not spent"
    if not classes and data.label_bounds is None and not np.isfinite(model.target_range_).all():
        return "not released: its error needs public bounds of the target; declare them in a schema"
    try:
        return private_score(
            model, data.X_test, data.targets_test, epsilon=budget.epsilon, delta=budget.delta,
            relation=str(budget.relation), account=account, person=data.person_test,
            target_bounds=data.label_bounds,
        )  # fmt: skip
    except BudgetError as refused:  # the model is trained and paid for: it is not undone for want of a score
        return f"not released: {refused}"
