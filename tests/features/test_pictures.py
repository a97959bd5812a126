"""Pictures as rows of scattering features."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sparse

pytest.importorskip("torch")

from quietgrad.core.errors import DataError
from quietgrad.features import Pictures, Scattering
from quietgrad.features.scattering import constants

# --- rows -----------------------------------------------------------------------------------------------------


def test_rows_are_the_features_of_their_own_picture() -> None:
    rng = np.random.default_rng(2)
    grey, colour = Pictures.of(64), Pictures(8, 3, "photographs")
    mean, deviation = (c[:, :, None, None] for c in constants(3))
    for kind, scaled in (
        (grey, lambda x: Scattering(8).normalized(x)),
        (colour, lambda x: (Scattering(8)(x).numpy() - mean) / deviation),
    ):
        X = rng.random((300, kind.pixels))
        rows = kind.rows(X)
        assert rows.shape == (300, kind.width)
        assert rows.dtype == np.float32
        expected = scaled(X.astype(np.float32).reshape(300, kind.channels, 8, 8))
        np.testing.assert_allclose(rows, np.asarray(expected).reshape(300, -1), rtol=1e-4, atol=1e-4)
        assert (kind.rows(X[1:]) == rows[1:]).all()  # to the last bit, wherever a record stands
        assert (kind.rows(sparse.csr_array(X)) == rows).all()
        if kind.row_bound is not None:
            assert np.linalg.norm(rows.astype(np.float64), axis=1).max() <= kind.row_bound
    flat = np.concatenate([np.zeros((1, 64)), np.full((1, 64), 1e30), np.eye(1, 64)])
    assert grey.row_bound is not None
    lengths = np.linalg.norm(grey.rows(flat).astype(np.float64), axis=1)
    assert (np.isnan(lengths) | (lengths <= grey.row_bound)).all()


@pytest.mark.slow
def test_the_kept_constants_are_those_of_the_photographs() -> None:
    pytest.importorskip("PIL")
    from tools.photographs import made

    again = made()
    for name, channels in (("grey", 1), ("colour", 3)):
        mean, deviation = constants(channels)
        np.testing.assert_allclose(again[name]["mean"], mean, rtol=2e-3)
        np.testing.assert_allclose(again[name]["std"], deviation, rtol=2e-3)


def test_words() -> None:
    for kind in (Pictures(28), Pictures(32, 3, "photographs")):
        assert Pictures.from_json(json.loads(json.dumps(kind.to_json()))) == kind
    good = Pictures(28).to_json()
    for key, value in (("features", "hog"), ("size", 30), ("size", 10**9), ("size", True), ("channels", 2)):
        with pytest.raises(DataError, match="not described"):
            Pictures.from_json({**good, key: value})
    wrong: Any
    for wrong in (None, [], {}, {**good, "normalization": "people"}):
        with pytest.raises(DataError, match="not described"):
            Pictures.from_json(wrong)
    for pixels in (100, 36, 3, 785, 2 * 784):
        with pytest.raises(DataError, match="no square pictures"):
            Pictures.of(pixels)
