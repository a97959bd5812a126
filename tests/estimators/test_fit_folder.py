"""A fit that is kept in a folder: killed at any release, the same call goes on, and nothing is paid twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.core.errors import DataError
from quietgrad.core.ledger.keys import KeyFile
from quietgrad.core.session.kept import is_kept
from quietgrad.core.session.session import CentralSession
from quietgrad.estimators import (
    PrivateAdditiveClassifier,
    PrivateLinearRegression,
    PrivateLogisticRegression,
    from_run,
)

X = np.random.default_rng(0).uniform(-1, 1, (1500, 3))
MODELS: dict[str, tuple[Any, Any]] = {
    "declared": (PrivateLogisticRegression(epsilon=4.0, classes=[0, 1], feature_bounds=[(-1, 1)] * 3), X[:, 0] > 0),
    "found": (PrivateLogisticRegression(epsilon=8.0), np.where(X[:, 0] > 0, "yes", "no")),
    "linear": (PrivateLinearRegression(epsilon=4.0, target_bounds=(-3, 3), feature_bounds=[(-1, 1)] * 3), X[:, 0]),
    "additive": (PrivateAdditiveClassifier(epsilon=4.0, classes=[0, 1], feature_bounds=[(-1, 1)] * 3), X[:, 1] > 0),
}  # fmt: skip


class Killed(Exception):
    """The process dies."""


def listened(patch: pytest.MonkeyPatch, *, most: int | None = None) -> list[Any]:
    """The numbers that sessions release from now on; the one after ``most`` of them kills the process."""
    heard: list[Any] = []
    release = CentralSession.release

    def listening(self: CentralSession, *args: Any, **how: Any) -> Any:
        if most is not None and len(heard) >= most:
            raise Killed
        heard.append(np.array(release(self, *args, **how)))
        return heard[-1]

    patch.setattr(CentralSession, "release", listening)
    return heard


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_killed_fit_goes_on_and_is_paid_once(name: str, most: int, tmp_path: Path) -> None:
    ledger, folder = tmp_path / "ledger.jsonl", tmp_path / "fit"
    model, y = MODELS[name]
    model = model.__class__(**{**model.get_params(), "ledger": ledger, "account": "people"})
    with pytest.MonkeyPatch.context() as patch:
        before = listened(patch, most=most)
        with pytest.raises(Killed):
            model.fit(X, y, folder=folder)
    if not is_kept(folder):  # nothing had left: the whole entry is given back, and there is nothing to resume
        assert most == 0
        assert [held.state for held in qg.Ledger(ledger).book().held.values()][-1] == "cancelled"
        return
    charged = len(qg.Ledger(ledger).book().counted("people"))
    with pytest.MonkeyPatch.context() as patch:
        after = listened(patch)
        model.fit(X, y, folder=folder)
    assert len(after) > most
    for old, new in zip(before, after, strict=False):
        np.testing.assert_array_equal(old, new)  # replayed, bit for bit
    assert len(qg.Ledger(ledger).book().counted("people")) == charged
    assert model.privacy_.is_private
    assert not is_kept(folder)
    np.testing.assert_array_equal(from_run(folder).predict(X), model.predict(X))


def test_other_data_are_charged_again_and_other_settings_are_refused(tmp_path: Path) -> None:
    ledger, folder = tmp_path / "ledger.jsonl", tmp_path / "fit"
    model, y = MODELS["declared"]
    settings = {**model.get_params(), "ledger": ledger, "account": "people", "n_public": 1500}
    with pytest.MonkeyPatch.context() as patch:
        listened(patch, most=2)
        with pytest.raises(Killed):
            PrivateLogisticRegression(**settings).fit(X, y, folder=folder)
    with pytest.raises(DataError, match="another budget"):
        PrivateLogisticRegression(**{**settings, "epsilon": 5.0}).fit(X, y, folder=folder)
    with pytest.raises(DataError, match="another account"):
        PrivateLogisticRegression(**{**settings, "account": "others"}).fit(X, y, folder=folder)
    again = PrivateLogisticRegression(**settings).fit(0.5 * X, y, folder=folder)
    assert any("charged again" in note for note in again.privacy_.notes)
    assert len(qg.Ledger(ledger).book().counted("people")) == 2


@pytest.mark.parametrize("name", MODELS)
def test_a_finished_fit_leaves_a_run(name: str, tmp_path: Path) -> None:
    model, y = MODELS[name]
    fitted = model.__class__(**{**model.get_params(), "ledger": tmp_path / "ledger.jsonl"})
    fitted.fit(X, y, folder=tmp_path / "fit")
    np.testing.assert_array_equal(from_run(tmp_path / "fit").predict(X), fitted.predict(X))
    assert not is_kept(tmp_path / "fit")


@pytest.mark.parametrize("name", MODELS)
def test_a_fit_that_was_killed_while_it_cleared_away_is_over(name: str, tmp_path: Path) -> None:
    """The result is safe and the key is gone, but the checkpoint is still there: the same call reads the result."""
    ledger, folder = tmp_path / "ledger.jsonl", tmp_path / "fit"
    model, y = MODELS[name]
    settings = {**model.get_params(), "ledger": ledger, "account": "people"}
    with pytest.MonkeyPatch.context() as patch:

        def killed(folder: Path, name: str) -> None:
            KeyFile.destroy(name)
            raise Killed

        patch.setattr("quietgrad.core.session.kept.clear", killed)
        with pytest.raises(Killed):
            model.__class__(**settings).fit(X, y, folder=folder)
    charged = len(qg.Ledger(ledger).book().counted("people"))
    again = model.__class__(**settings).fit(X, y, folder=folder)
    np.testing.assert_array_equal(again.predict(X), from_run(folder).predict(X))
    assert again.privacy_.is_private
    assert not is_kept(folder)
    assert len(qg.Ledger(ledger).book().counted("people")) == charged


def test_labels_that_no_run_can_hold_are_still_fitted(tmp_path: Path) -> None:
    days = np.array(["2024-01-01", "2024-01-02"], dtype="datetime64[D]")
    model = PrivateLogisticRegression(
        epsilon=4.0, classes=list(days), feature_bounds=[(-1, 1)] * 3, ledger=tmp_path / "ledger.jsonl"
    )
    model.fit(X, days[(X[:, 0] > 0).astype(int)], folder=tmp_path / "fit")
    np.testing.assert_array_equal(qg.load(tmp_path / "fit").params, model.result_.params)
