"""Messages and queries on the wire: a JSON header and raw little-endian arrays, never a pickle.

    magic "QGM" · version (1 byte) · header length (4 bytes) · header CRC-32 (4) · sum of payload words (8) ·
    header (JSON: kind, fields, arrays) · arrays, each padded to 8 bytes

Checksums find accidents; forgery is prevented by TLS or by the sealed frames of a secure sum. Nothing is allocated
before its size was checked. A party never runs what a coordinator sends: it compares a query's name and fields
with the *templates* of its plan (fixed values, intervals, pinned vectors) and builds the query itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.core.accounting.budget import Relation
from quietgrad.core.session import queries as base
from quietgrad.core.session.clipping import Clipping, Flat, known_rules
from quietgrad.core.session.contributions import LARGEST_CLIP
from quietgrad.core.session.queries import Asked, Query
from quietgrad.core.settings import field_values
from quietgrad.core.vectors import OwnVector
from quietgrad.tables import whitening
from quietgrad.tables.queries.local_fit import LocalFit
from quietgrad.tables.queries.local_update import LocalUpdateQuery
from quietgrad.tables.queries.second_order import GradientsAndHessians
from quietgrad.tables.table import Affine

VERSION = 1
_MAGIC = b"QGM"
_HEAD = struct.Struct("<3sBIIQ4x")  # 24 bytes, so that arrays start on a word
_LARGEST_HEADER = 1 << 20
_DTYPES = {name: np.dtype(name) for name in ("<f8", "<f4", "<i8", "|u1")}
_OVERHEAD = 1 << 16

Array = npt.NDArray[Any]
Bytes = bytes | bytearray | memoryview


class WireError(ValueError):
    """Bytes that are not a message of this version."""


@dataclass(frozen=True)
class Message:
    """A message from one side to the other: a kind, public JSON fields, and arrays.

    >>> message = Message("sum", {"round": 3}, {"total": np.array([1.0, 2.0])})
    >>> again = decode(encode(message))
    >>> again.kind, again.fields["round"], again.arrays["total"].tolist()
    ('sum', 3, [1.0, 2.0])
    """

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)

    def blob(self, name: str) -> bytes:
        if name not in self.arrays or self.arrays[name].dtype != np.uint8:
            raise WireError(f"message {self.kind!r} has no bytes {name!r}")
        return self.arrays[name].tobytes()


def blobs(frames: Mapping[str, bytes | Array]) -> dict[str, Array]:
    """Frames as a message carries them: bytes become arrays, arrays stay as they are."""
    return {name: np.frombuffer(f, np.uint8) if isinstance(f, bytes) else f for name, f in frames.items()}


def refusal(code: str, reason: str) -> bytearray:
    return encode(Message("refused", {"code": code, "reason": reason}))


def limit(dimension: int, vectors: int = 4) -> int:
    """The largest message that may be needed for ``vectors`` vectors of a length."""
    return _HEAD.size + _LARGEST_HEADER + _OVERHEAD + 8 * dimension * vectors


def encode(message: Message) -> bytearray:
    arrays, pieces = [], []
    for name, value in message.arrays.items():
        array = np.ascontiguousarray(value)
        kind = array.dtype.newbyteorder("<").str
        if kind not in _DTYPES or array.ndim > 2:
            raise WireError(f"array {name!r} of type {array.dtype} and {array.ndim} dimensions cannot be sent")
        arrays.append([name, kind, list(array.shape)])
        pieces.append(array.astype(kind, copy=False).reshape(-1).view(np.uint8))
    text = json.dumps({"kind": message.kind, "fields": dict(message.fields), "arrays": arrays}).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LARGEST_HEADER:
        raise WireError(f"header of {len(text)} bytes: at most {_LARGEST_HEADER} are allowed")
    buffer = bytearray(_HEAD.size) + text
    for piece in pieces:
        buffer += piece.data
        buffer += bytes(-piece.size % 8)
    words = _word_sum(np.frombuffer(buffer, np.uint8, offset=_HEAD.size + len(text)))
    _HEAD.pack_into(buffer, 0, _MAGIC, VERSION, len(text), zlib.crc32(text), words)
    return buffer


def decode(data: Bytes, *, most: int | None = None) -> Message:
    """Read a message of at most ``most`` bytes; its arrays are views of ``data`` where that may be written to."""
    if most is not None and len(data) > most:
        raise WireError(f"{len(data)} bytes are more than the {most} that were agreed")
    if len(data) < _HEAD.size:
        raise WireError(f"{len(data)} bytes are too few for a message")
    magic, version, length, crc, checksum = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != VERSION:
        raise WireError(f"not a message of version {VERSION}")
    start = -(-(_HEAD.size + length) // 8) * 8
    if length > _LARGEST_HEADER or start > len(data) or len(data) % 8:
        raise WireError("header or message length is wrong")
    view = memoryview(data)
    text = view[_HEAD.size : _HEAD.size + length]
    raw = np.frombuffer(view, np.uint8)
    if zlib.crc32(text) != crc or _word_sum(raw[start:]) != checksum:
        raise WireError("was damaged on its way")
    kind, fields, listed = _header(bytes(text))
    arrays: dict[str, Array] = {}
    for name, dtype, shape in listed:
        size = math.prod(shape) * _DTYPES[dtype].itemsize
        if size > len(data) - start:
            raise WireError(f"array {name!r} is longer than the message")
        array = raw[start : start + size].view(_DTYPES[dtype]).reshape(shape)
        arrays[name] = array if array.flags.writeable else array.copy()
        start += -(-size // 8) * 8
    if start != len(data) or len(arrays) != len(listed):
        raise WireError("message length does not match its arrays")
    return Message(kind, fields, arrays)


def _header(text: bytes) -> tuple[str, dict[str, Any], list[tuple[str, str, list[int]]]]:
    try:
        header = json.loads(str(text, "utf-8"))
        kind, fields, listed = header["kind"], header["fields"], header["arrays"]
        entries = [(name, dtype, shape) for name, dtype, shape in listed]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise WireError("header is not understood") from None
    good = isinstance(kind, str) and isinstance(fields, dict)
    for name, dtype, shape in entries:
        good &= isinstance(name, str) and dtype in _DTYPES and isinstance(shape, list) and len(shape) <= 2
        good = good and all(type(n) is int and 0 <= n < 1 << 40 for n in shape)
    if not good:
        raise WireError("header is not understood")
    return kind, fields, entries


def _word_sum(payload: npt.NDArray[np.uint8]) -> int:
    return int(np.add.reduce(payload.view("<u8"), dtype=np.uint64))


Template = dict[str, Any]
"""By path, what a query may have there: a word or number; ``{"from": a, "to": b}``; ``["array", *shape]``, followed
by ``{"sha256": …}`` if the array is pinned."""
_LARGEST_ENTRY = LARGEST_CLIP  # of a vector: beyond, scores of ordinary records could overflow


# Names on the wire and in digests of plans: fixed texts, whatever the classes are called.
_KINDS: dict[str, type[Any]] = {
    "Gradient": base.GradientQuery, "GradientDifference": base.GradientDifferenceQuery, "Loss": base.LossQuery,
    "RecursiveMomentum": base.RecursiveMomentumQuery, "JointMomentum": base.JointMomentumQuery,
    "LocalFit": LocalFit, "LocalUpdate": LocalUpdateQuery, "GradientsAndHessians": GradientsAndHessians,
    "FeatureMean": whitening.FeatureMean,
    "SecondMomentMatrix": whitening.SecondMomentMatrix,
    "MeanSquares": whitening.MeanSquares, "RowNormHistogram": whitening.RowNormHistogram,
    "WhitenedGradient": whitening.WhitenedGradient, "Whitening": whitening.Whitening,
    "Affine": Affine,
    **{f"clipping-{kind}": rule for kind, rule in known_rules().items()},
}  # fmt: skip
_NAMES = {kind: name for name, kind in _KINDS.items()}
_PARTS = (whitening.Whitening, Affine, Clipping)  # what queries are made of
_FIELDS = {name: frozenset(f.name for f in dataclasses.fields(kind) if f.init) for name, kind in _KINDS.items()}


def pack(query: Query) -> tuple[dict[str, Any], dict[str, Array]]:
    """A query as JSON values and arrays.

    >>> from quietgrad.core.session.queries import GradientQuery
    >>> fields, arrays = pack(GradientQuery(np.zeros(2), 1.5))
    >>> fields
    {'kind': 'Gradient', 'params': {'array': 'q0'}, 'clip': 1.5}
    """
    arrays: dict[str, Array] = {}
    return _pack(query, arrays), arrays


def unpack(fields: object, arrays: Mapping[str, Array], like: OwnVector) -> Query:
    """The query of :func:`pack`; vectors become what ``like`` is, numpy or torch."""
    query: Query = _unpack(fields, arrays, like)
    if type(query) not in _NAMES or isinstance(query, _PARTS):
        raise WireError("that is not a query")
    return query


def _pack(value: object, arrays: dict[str, Array]) -> Any:
    if isinstance(value, Relation):
        return {"relation": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_pack(item, arrays) for item in value]
    kind = _NAMES.get(type(value))
    if kind is not None and dataclasses.is_dataclass(value):
        # A query with flat clipping is sent as it was before there were others: digests of plans stay.
        sent = {name: item for name, item in field_values(value).items() if name in _FIELDS[kind]}
        if isinstance(sent.get("clipping"), Flat):
            del sent["clipping"]
        return {"kind": kind, **{name: _pack(item, arrays) for name, item in sent.items()}}
    if not isinstance(value, np.ndarray):
        if type(value).__module__.partition(".")[0] != "torch":
            raise WireError(f"{type(value).__name__} cannot be part of a query that is sent")
        tensor: Any = value
        value = tensor.detach().cpu().numpy()
    name = f"q{len(arrays)}"
    arrays[name] = np.asarray(value)
    return {"array": name}


def _unpack(value: object, arrays: Mapping[str, Array], like: OwnVector) -> Any:
    if isinstance(value, list):
        return tuple(_unpack(item, arrays, like) for item in value)
    if not isinstance(value, dict):
        return value
    if "relation" in value and len(value) == 1:
        return Relation.parse(value["relation"])
    if "array" in value:
        if value["array"] not in arrays:
            raise WireError("query refers to an array that was not sent")
        array = arrays[value["array"]]
        if isinstance(like, np.ndarray) or array.ndim != 1:
            return np.ascontiguousarray(array, np.float64)
        return like.new_tensor(array)
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise WireError(f"query {kind!r} is not known; known are {', '.join(_KINDS)}")
    maker, names = _KINDS[kind], _FIELDS[kind]
    if value.keys() | ({"clipping"} & names) != names | {"kind"}:
        raise WireError(f"query {kind} must have exactly the fields {', '.join(sorted(names))}")
    return maker(**{name: _unpack(value[name], arrays, like) for name in names if name in value})


def template(asked: Asked) -> tuple[Query, Template]:
    """Return the query that an algorithm declares, and the values that a party accepts for its fields.

    >>> from quietgrad.core.session.queries import RecursiveMomentumQuery
    >>> query = RecursiveMomentumQuery(np.zeros(2), np.zeros(2), 0.1, 1.0, 0.5)
    >>> template(Asked(query, {"difference_clip": (0.0, 0.5)}))[1]["query.difference_clip"]
    {'from': 0.0, 'to': 0.5}
    """
    query = asked.query
    fields, arrays = pack(query)
    limits: Template = {}
    for path, value in _leaves(fields, arrays):
        name = path.removeprefix("query.")
        if name in asked.between:
            low, high = (float(end) for end in asked.between[name])
            limits[path] = {"from": low, "to": high}
        elif isinstance(value, np.ndarray):
            limits[path] = ["array", *value.shape, *([{"sha256": _digest(value)}] if name in asked.pinned else [])]
        else:
            limits[path] = value
    if missing := {*asked.between, *asked.pinned} - {path.removeprefix("query.") for path in limits}:
        raise ValueError(f"{type(query).__name__} has no field {sorted(missing)[0]!r} that could vary.")
    return query, json.loads(json.dumps(limits))


def _leaves(fields: object, arrays: Mapping[str, Array], path: str = "query") -> Iterator[tuple[str, Any]]:
    """Every number, word and array of a packed query, by its path."""
    if isinstance(fields, dict) and "array" in fields:
        name = fields["array"]
        yield path, arrays.get(name) if isinstance(name, str) else None
    elif isinstance(fields, dict):
        for name, item in fields.items():
            yield from _leaves(item, arrays, f"{path}.{name}")
    elif isinstance(fields, (list, tuple)):
        for i, item in enumerate(fields):
            yield from _leaves(item, arrays, f"{path}.{i}")
    else:
        yield path, fields


def template_mismatch(templates: Sequence[Template], fields: object, arrays: Mapping[str, Array]) -> str | None:
    """Why a packed query fits none of the templates, or ``None`` if it fits one.

    >>> template_mismatch([{"query.kind": "Gradient", "query.clip": 1.0}], {"kind": "Gradient", "clip": 9.0}, {})
    'query.clip is 9.0, the plan has 1.0'
    """
    given = dict(_leaves(fields, arrays))
    if sum(isinstance(value, np.ndarray) for value in given.values()) != len(arrays):
        return "it brings vectors that the query does not name"
    reason: str | None = "the plan allows no query here"
    for each in templates:
        reason = _difference(each, given)
        if reason is None:
            return None
    return reason


def _difference(allowed: Template, given: Mapping[str, object]) -> str | None:
    if set(allowed) != set(given):
        kinds = allowed.get("query.kind"), given.get("query.kind")
        return f"query {kinds[1]!r} has other fields than the plan's {kinds[0]!r}"
    for path, value in given.items():
        planned = allowed[path]
        if isinstance(planned, list):
            why = _other_array(planned, value)
        elif isinstance(planned, dict):
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            inside = number and planned["from"] <= value <= planned["to"]
            why = None if inside else f"is {value!r}, must be from {planned['from']:g} to {planned['to']:g}"
        else:
            same = planned == value and isinstance(planned, bool) == isinstance(value, bool)
            why = None if same else f"is {value!r}, the plan has {planned!r}"
        if why is not None:
            return f"{path} {why}"
    return None


def _other_array(planned: list[object], value: object) -> str | None:
    pinned = planned[-1]["sha256"] if isinstance(planned[-1], dict) else None
    shape = tuple(planned[1:] if pinned is None else planned[1:-1])
    if not isinstance(value, np.ndarray) or value.shape != shape or value.dtype.kind != "f":
        return f"is not a vector of shape {shape}"
    if value.size and not float(np.abs(value).max()) <= _LARGEST_ENTRY:  # refuses NaN too
        return f"has entries that are not numbers, or larger than {_LARGEST_ENTRY:.3g}"
    if pinned is not None and _digest(value) != pinned:
        return "is not the vector that the plan pins"
    return None


def _digest(array: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(array, "<f8").tobytes()).hexdigest()
