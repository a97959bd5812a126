"""Where an own loop stands, in one safetensors file: states, what else the user adds, and what it cost.

Tensors go to tensors, everything else to the file's JSON header. Nothing is pickled, so loading runs no code.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from quietgrad.errors import DataError
from quietgrad.files import parse_json, read_bytes, write_atomically

__all__ = ["load", "save"]

FORMAT = 1
_HEADER = "quietgrad loop"


def save(path: Any, content: dict[str, Any], spent: Any) -> None:
    """Write ``content`` and the record of its spending to a path or an open binary file."""
    from safetensors.torch import save as to_bytes

    tensors: dict[str, Tensor] = {}
    header = {"format": FORMAT, "spent": spent, "content": _pack(content, "checkpoint", tensors)}
    data = to_bytes(tensors, metadata={_HEADER: json.dumps(header)})
    if hasattr(path, "write"):
        path.write(data)
    else:
        write_atomically(Path(os.fspath(path)), data)


def load(path: Any) -> tuple[dict[str, Any], Any]:
    """The content and the record of its spending; whatever is not a whole file of ours is refused.

    >>> import io, torch
    >>> file = io.BytesIO()
    >>> save(file, {"epoch": 3, "sizes": (1, 2), "w": torch.ones(2)}, {"loops": []})
    >>> _ = file.seek(0)
    >>> load(file)
    ({'epoch': 3, 'sizes': (1, 2), 'w': tensor([1., 1.])}, {'loops': []})
    """
    from safetensors import SafetensorError
    from safetensors.torch import load as from_bytes

    name = getattr(path, "name", "the file") if hasattr(path, "read") else os.fspath(path)
    try:
        data: bytes = path.read() if hasattr(path, "read") else read_bytes(path)
        # The header of a safetensors file: its length in 8 bytes, then JSON.
        length = int.from_bytes(data[:8], "little")
        header = parse_json(parse_json(data[8 : 8 + length])["__metadata__"][_HEADER])
        if header["format"] != FORMAT:
            raise DataError(f"{name}: checkpoint format {header['format']!r}; this version reads {FORMAT}.")
        content = _unpack(header["content"], from_bytes(data))
        if not isinstance(content, dict):
            raise TypeError
        return content, header["spent"]
    except FileNotFoundError:
        raise DataError(f"{name}: there is no checkpoint; save one with save_checkpoint first.") from None
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise DataError(
            f"{name}: not a whole checkpoint of save_checkpoint ({type(error).__name__}). Pickled files are not "
            "opened, because they may run code, and do not say what they cost."
        ) from None


def _pack(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        # A copy: tensors that share memory cannot be told apart in the file.
        tensors[place] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": place}
    if isinstance(value, dict):
        items = [[_key(key), _pack(item, f"{place}.{k}", tensors)] for k, (key, item) in enumerate(value.items())]
        return {"dict": items}
    if isinstance(value, tuple | list):
        items = [_pack(item, f"{place}.{k}", tensors) for k, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    if value is None or isinstance(value, bool | int | float | str):
        return {"plain": value}
    raise TypeError(
        f"checkpoint_dict holds a {type(value).__name__}: a checkpoint takes tensors, numbers, texts, lists and "
        "dictionaries, and nothing is pickled."
    )


def _key(key: Any) -> Any:
    if isinstance(key, str | int):
        return key
    raise TypeError(f"a key of type {type(key).__name__} in a checkpoint: must be a text or a whole number.")


def _unpack(packed: Any, tensors: dict[str, Tensor]) -> Any:
    ((kind, value),) = packed.items()
    if kind == "tensor":
        return tensors[value].clone()
    if kind == "dict":
        return {key: _unpack(item, tensors) for key, item in value}
    if kind == "tuple":
        return tuple(_unpack(item, tensors) for item in value)
    if kind == "list":
        return [_unpack(item, tensors) for item in value]
    if kind == "plain":
        return value
    raise ValueError(f"{kind!r}: not a kind of value.")
