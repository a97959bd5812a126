"""Saving where a run stands: one safetensors file, written atomically, never a pickle.

Arrays go to tensors; everything else goes to the file's JSON header with a format version. Nothing here decides
whether noise may be drawn again: that is the transcript's to say, by content.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from quietgrad.algorithms.base import State
from quietgrad.errors import DataError
from quietgrad.files import check_regular, parse_json, write_atomically
from quietgrad.oracles.base import Estimate

FORMAT = 2
_KINDS = {"State": State, "Estimate": Estimate}
_PACKAGES = ("numpy", "scipy", "numba", "torch", "quietgrad")


@dataclass(frozen=True)
class Checkpoint:
    """A state, how far its session had come, and what the run was."""

    state: State
    used: dict[str, int]
    rho_left: float | None
    meta: dict[str, Any]


def versions() -> dict[str, str | None]:
    """Versions of quietgrad and of what its numbers depend on; ``None`` where not installed."""
    return {package: _version(package) for package in _PACKAGES}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write ``checkpoint`` to ``path``."""
    from safetensors.numpy import save as to_bytes

    tensors: dict[str, Any] = {}
    header = {
        "format": FORMAT,
        "state": _pack(checkpoint.state, "state", tensors),
        "used": checkpoint.used,
        "rho_left": checkpoint.rho_left,
        "meta": checkpoint.meta,
    }
    write_atomically(path, to_bytes(tensors, metadata={"quietgrad": json.dumps(header)}))


def load(path: Path) -> Checkpoint:
    """Read a checkpoint; a file cut short or of another program is refused with a clear error."""
    from safetensors import SafetensorError, safe_open

    try:
        check_regular(path)
        with safe_open(path, framework="numpy") as file:
            header = parse_json(file.metadata()["quietgrad"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise DataError(f"{path}: there is no checkpoint; train with --out DIR first.") from None
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise DataError(
            f"{path}: not a readable checkpoint ({type(error).__name__}); start the run again."
        ) from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        found = header.get("format") if isinstance(header, dict) else None
        raise DataError(f"{path}: checkpoint format {found!r}; this version reads {FORMAT}.")
    try:
        return Checkpoint(_unpack(header["state"], tensors), header["used"], header["rho_left"], header["meta"])
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not a checkpoint of a run ({type(error).__name__}); start it again.") from None


def _pack(value: Any, name: str, tensors: dict[str, Any]) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.name != "memo"]
        fields = {key: _pack(getattr(value, key), f"{name}.{key}", tensors) for key in names}
        return {"kind": type(value).__name__, "fields": fields}
    if isinstance(value, Mapping):
        return {"kind": "dict", "fields": {k: _pack(v, f"{name}.{k}", tensors) for k, v in value.items()}}
    if isinstance(value, (list, tuple)):
        return {"kind": "list", "items": [_pack(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, np.ndarray):
        tensors[name] = np.ascontiguousarray(value)
        return {"kind": "numpy", "tensor": name}
    if type(value).__module__.partition(".")[0] == "torch":
        tensors[name] = np.ascontiguousarray(value.detach().cpu().numpy())
        return {"kind": "torch", "tensor": name}
    return {"kind": "plain", "value": value}


def _unpack(packed: Any, tensors: Mapping[str, Any]) -> Any:
    kind = packed["kind"]
    if kind == "plain":
        return packed["value"]
    if kind == "numpy":
        return tensors[packed["tensor"]].copy()
    if kind == "torch":
        import torch

        return torch.from_numpy(tensors[packed["tensor"]].copy())
    if kind == "list":
        return [_unpack(item, tensors) for item in packed["items"]]
    fields = {key: _unpack(value, tensors) for key, value in packed["fields"].items()}
    return fields if kind == "dict" else _KINDS[kind](**fields)
