"""Where a run stands, in one safetensors file that is written atomically and sealed whole; never a pickle.

Arrays go to tensors, everything else to the file's JSON header. A MAC under the run's key covers every byte of
both, so a file whose numbers were changed is not read. What it says is then what the run itself wrote; whether it
is the newest that the run wrote is the transcript's and the ledger's to say.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from quietgrad.core.errors import DataError
from quietgrad.core.files import parse_json, read_bytes, write_atomically
from quietgrad.core.settings import field_values

FORMAT = 3
Array = npt.NDArray[np.generic]
_Kind = TypeVar("_Kind", bound=type)
_KINDS: dict[str, type] = {}  # dataclasses that a checkpoint may hold, by name


def kept_state(kind: _Kind) -> _Kind:
    """Let checkpoints hold instances of a dataclass of plain fields; a decorator."""
    _KINDS[kind.__name__] = kind
    return kind


def versions() -> dict[str, str | None]:
    """Versions of quietgrad and of what its numbers depend on; ``None`` where not installed."""
    installed: dict[str, str | None] = dict.fromkeys(("numpy", "scipy", "numba", "torch", "quietgrad"))
    for package in installed:
        with contextlib.suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def save(path: Path, run: str, content: object, key: bytes) -> None:
    """Write ``content`` of ``run`` to ``path``; see :func:`sealed_bytes`."""
    write_atomically(path, sealed_bytes(run, content, key))


def sealed_bytes(run: str, content: object, key: bytes) -> bytes:
    """A safetensors file of dataclasses of ours, dictionaries, lists, tuples, arrays, tensors and plain values."""
    from safetensors.numpy import save as to_bytes

    tensors: dict[str, Array] = {}
    header = json.dumps({"format": FORMAT, "run": run, "content": _pack(content, "content", tensors)})
    return to_bytes(tensors, metadata={"quietgrad": header, "seal": _seal(key, header, tensors)})


def load(path: Path, key_of: Callable[[str], bytes]) -> tuple[str, Any]:
    """The run's name and the content that :func:`save` was given; see :func:`unsealed`."""
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        raise DataError(f"{path}: there is no checkpoint; train with --out DIR first.") from None
    except OSError as error:
        raise DataError(f"{path}: not a readable checkpoint ({type(error).__name__}).") from None
    return unsealed(str(path), data, key_of)


def unsealed(path: str, data: bytes, key_of: Callable[[str], bytes]) -> tuple[str, Any]:
    """The run's name and what :func:`sealed_bytes` was given; ``key_of`` finds the key of a run by its name.

    A file that was cut short or altered, or is another program's, is refused.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load as from_bytes

    try:
        # The header of a safetensors file: its length in 8 bytes, then JSON.
        length = int.from_bytes(data[:8], "little")
        metadata = parse_json(data[8 : 8 + length])["__metadata__"]
        header, seal = parse_json(metadata["quietgrad"]), str(metadata["seal"])
        tensors = from_bytes(data)
        format_number, run = header["format"], header["run"]
    except (SafetensorError, KeyError, TypeError, ValueError, OSError, OverflowError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{path}: not a readable checkpoint ({type(error).__name__}); start the run again. Pickled files are "
            "not opened, because they may run code."
        ) from None
    if format_number != FORMAT or not isinstance(run, str):
        raise DataError(f"{path}: checkpoint format {format_number!r}; this version reads {FORMAT}.")
    if not hmac.compare_digest(seal, _seal(key_of(run), metadata["quietgrad"], tensors)):
        raise DataError(
            f"{path}: the checkpoint was altered, so the state of the run is unknown. Start the run again; it is "
            "charged in full."
        )
    return run, _unpack(header["content"], tensors)


def run_named_in(path: Path) -> str | None:
    """The run that a checkpoint says it is of, unchecked: to find what else is kept of it."""
    names: list[str] = []

    def note(run: str) -> bytes:
        names.append(run)
        raise DataError("only its name was asked for.")

    with contextlib.suppress(DataError):
        load(path, note)
    return names[0] if names else None


def _seal(key: bytes, header: str, tensors: Mapping[str, Array]) -> str:
    seal = hashlib.blake2b(key=hmac.digest(key, b"checkpoint", "sha256"), digest_size=32)
    # Lengths, dtypes and shapes are hashed too, so no byte can move from one part to the next under the same seal.
    seal.update(f"{len(header)}\0{header}".encode())
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        seal.update(f"\0{name}\0{array.dtype.str} {array.shape}\0".encode())
        seal.update(array.reshape(-1).view(np.uint8).data)
    return seal.hexdigest()


def _pack(value: object, name: str, tensors: dict[str, Array]) -> dict[str, object]:
    if type(value) in _KINDS.values():
        held = {key: item for key, item in field_values(value).items() if key != "memo"}
        fields = {key: _pack(item, f"{name}.{key}", tensors) for key, item in held.items()}
        return {"kind": type(value).__name__, "fields": fields}
    if isinstance(value, Mapping):
        fields = {str(k): _pack(v, f"{name}.{k}", tensors) for k, v in value.items()}
        if value and all(type(k) is int for k in value):  # as an optimizer numbers its parameters
            return {"kind": "numbered", "fields": fields}
        if not all(isinstance(k, str) for k in value):
            raise TypeError("a dictionary in a checkpoint: its keys must be texts, or all whole numbers.")
        return {"kind": "dict", "fields": fields}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {"kind": kind, "items": [_pack(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, np.ndarray):
        tensors[name] = np.ascontiguousarray(value)
        return {"kind": "numpy", "tensor": name}
    if type(value).__module__.partition(".")[0] == "torch":
        import torch

        assert isinstance(value, torch.Tensor)
        flat = value.detach().cpu().contiguous()
        narrow = flat.dtype == torch.bfloat16  # which numpy does not know
        tensors[name] = (flat.view(torch.int16) if narrow else flat).numpy()
        return {"kind": "bfloat16" if narrow else "torch", "tensor": name}
    if value is None or isinstance(value, bool | int | float | str):
        return {"kind": "plain", "value": value}
    raise TypeError(
        f"a checkpoint cannot hold a {type(value).__name__}: it takes tensors, numbers, texts, lists and "
        "dictionaries, and nothing is pickled."
    )


def _unpack(packed: Any, tensors: Mapping[str, Array]) -> Any:
    kind = packed["kind"]
    if kind == "plain":
        return packed["value"]
    if kind == "numpy":
        return tensors[packed["tensor"]].copy()
    if kind in ("torch", "bfloat16"):
        import torch

        tensor = torch.from_numpy(tensors[packed["tensor"]].copy())
        return tensor if kind == "torch" else tensor.view(torch.bfloat16)
    if kind in ("list", "tuple"):
        items = [_unpack(item, tensors) for item in packed["items"]]
        return items if kind == "list" else tuple(items)
    fields = {key: _unpack(value, tensors) for key, value in packed["fields"].items()}
    if kind == "numbered":
        return {int(key): value for key, value in fields.items()}
    if kind == "dict":
        return fields
    if kind not in _KINDS:
        raise DataError(f"a checkpoint holds a {kind}, which only the front end that wrote it can read.")
    return _KINDS[kind](**fields)
