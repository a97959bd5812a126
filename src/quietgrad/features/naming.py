"""Feature maps by name: as a run keeps them, and as a command line names them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quietgrad.core.errors import DataError
from quietgrad.features.frozen import MARK, ONNX_FILE, Frozen, PublicFeatures
from quietgrad.features.scattering import Pictures
from quietgrad.features.whitened import Whitened


def read_features(
    words: Mapping[str, Any], folder: str | Path, given: PublicFeatures | None = None
) -> PublicFeatures:
    """The feature map that ``to_json`` of one described, as a run keeps it.

    Args:
        words: what the run says of its features.
        folder: of the run, where public files lie.
        given: the map as the caller has it, for a torch module, whose code is not kept; it must be the same one.
    """
    if given is not None:
        if _without_file(given.to_json()) != _without_file(words):
            raise DataError(f"{folder}: the model was fitted on other features: {_digests(words)}.")
        return given
    kind = words.get("features")
    if kind == "whitened":
        inner = words.get("of")
        return Whitened.read(words, folder, None if inner is None else read_features(inner, folder))
    if kind != "frozen":
        return Pictures.from_json(words)
    if not words.get("file"):
        raise DataError(
            f"{folder}: the model's features are those of a torch module, which is not kept with it. Pass the same "
            f"features=Frozen(module, ...) as at the fit: {_digests(words)}."
        )
    shape = words.get("shape")
    return Frozen(
        Path(folder) / ONNX_FILE, digest=words["digest"], shape=None if shape is None else tuple(shape),
        output=words.get("output"), unit_rows=bool(words.get("unit_rows")),
    )  # fmt: skip


def _without_file(words: Mapping[str, Any]) -> dict[str, Any]:
    """The words, whether the weights came from a file or not."""
    inner = words.get("of")
    return {**words, "file": None, "of": None if inner is None else _without_file(inner)}


def _digests(words: Mapping[str, Any]) -> str:
    inner = words.get("of")
    return ", ".join(text for text in (words.get("digest", "wavelets"), inner and _digests(inner)) if text)


def named_features(text: str, columns: int) -> PublicFeatures:
    """The map of rows of so many numbers that a command line names, such as ``FILE.onnx@sha256:…``.

    >>> named_features("scattering", 784)
    Pictures(size=28, channels=1, normalization='picture')
    """
    if text == "scattering":
        return Pictures.of(columns)
    path, _, pinned = text.partition(f"@{MARK}")
    if Path(path).suffix.lower() != ".onnx":
        raise DataError(f"features={text!r}: must be scattering, FILE.onnx or FILE.onnx@{MARK}DIGEST.")
    return Frozen(path, digest=MARK + pinned if pinned else None)
