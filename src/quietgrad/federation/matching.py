"""Private record linkage: people known to several parties are found by a keyed hash of their ids.

The parties share a secret key and exchange lists of HMAC(key, id), past the coordinator. The key chooses one home
among the parties that know a person; the others leave the person out. So the parties' people are disjoint, and
what is proved for disjoint parties holds. A home depends on the person alone: removing one moves no other. A hash
collision only leaves a person out. A person whose ids differ between parties counts as two: ids must be written
alike.

A holder of the key can ask a list whether an id is in it: the lists tell the parties which of them knows a person.
Without the key they tell their lengths and how many entries they share.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quietgrad.errors import DataError
from quietgrad.federation.provisioning import write_new_secret
from quietgrad.files import os_error_text, parse_json, read_bytes, write_atomically
from quietgrad.objectives.person_ids import hashed_people, kind_of
from quietgrad.objectives.privacy_units import RecordsWithIds
from quietgrad.privacy.rng import KEY_BYTES, fresh_key

SUFFIX = ".people"
_HASH_BYTES = 16  # of a hash: a collision only leaves a person out
_MAC_BYTES = 32
_LARGEST = 1 << 32
_FORMAT = "quietgrad people 1"


@dataclass(frozen=True)
class HashedIdList:
    """The people of one party as hashes under the parties' key; build it with :meth:`of`."""

    party: str
    kind: str
    hashes: frozenset[bytes]

    @classmethod
    def of(cls, party: str, ids: npt.ArrayLike, key: bytes) -> HashedIdList:
        hashes = hashed_people(ids, key)[1]
        return cls(party, kind_of(ids), frozenset(each[:_HASH_BYTES] for each in hashes))

    def to_bytes(self, key: bytes) -> bytes:
        """A line that says whose it is, the hashes in order, and a MAC of both under the key."""
        head = json.dumps({"format": _FORMAT, "party": self.party, "kind": self.kind, "people": len(self.hashes)})
        body = head.encode() + b"\n" + b"".join(sorted(self.hashes))
        return body + hmac.digest(key, body, "sha256")

    @classmethod
    def parse(cls, content: bytes, key: bytes, source: str = "list") -> HashedIdList:
        """Read :meth:`to_bytes`; a list that was made with another key, or altered, is refused."""
        body, mac = content[:-_MAC_BYTES], content[-_MAC_BYTES:]
        head, _, rest = body.partition(b"\n")
        try:
            entry = parse_json(head)
            party, kind, count = str(entry["party"]), str(entry["kind"]), int(entry["people"])
            good = entry["format"] == _FORMAT and len(rest) == count * _HASH_BYTES
        except (ValueError, KeyError, TypeError):
            good = False
        if not good:
            raise DataError(f"{source}: is not a list of people of `quietgrad federate match`.")
        if not hmac.compare_digest(mac, hmac.digest(key, body, "sha256")):
            raise DataError(f"{source}: was made with another people key, or altered. All parties use one key.")
        hashes = (rest[k : k + _HASH_BYTES] for k in range(0, len(rest), _HASH_BYTES))
        return cls(party, kind, frozenset(hashes))


@dataclass(frozen=True)
class RecordLinkage:
    """The lists of all parties, and their key: says which people a party keeps.

    >>> key = b"k" * 32
    >>> lists = [HashedIdList.of("north", ["ann", "bob"], key), HashedIdList.of("south", ["bob", "cyd"], key)]
    >>> both = RecordLinkage(key, {each.party: each for each in lists})
    >>> north, south = both.keeps("north", ["ann", "bob"]), both.keeps("south", ["bob", "cyd"])
    >>> bool(north[0]), bool(south[1]), bool(north[1]) != bool(south[0])
    (True, True, True)
    """

    key: bytes
    lists: Mapping[str, HashedIdList]

    def __post_init__(self) -> None:
        if len({each.kind for each in self.lists.values()}) > 1:
            raise DataError("people: ids are numbers at one party and texts at another; write them alike at all.")

    def __repr__(self) -> str:
        return "RecordLinkage()"  # neither key nor hashes

    @classmethod
    def of(cls, parties: Mapping[str, npt.ArrayLike], key: bytes) -> RecordLinkage:
        return cls(key, {name: HashedIdList.of(name, ids, key) for name, ids in parties.items()})

    @classmethod
    def read(cls, key: bytes, folder: Path, parties: Sequence[str]) -> RecordLinkage:
        """The lists in ``folder``, one called ``NAME.people`` for each of ``parties``."""
        return cls(key, {name: _read_list(folder / f"{name}{SUFFIX}", name, key) for name in parties})

    @cached_property
    def digest(self) -> str:
        """A MAC of all lists, for the plan; other lists or another key give another one."""
        parts = [self.lists[name].to_bytes(self.key)[-_MAC_BYTES:] for name in sorted(self.lists)]
        return hmac.digest(self.key, b"quietgrad matched people 1\0" + b"".join(parts), "sha256").hex()

    def keeps(self, party: str, ids: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """For each record of ``party`` whether its person's home is there; all must be in the party's own list."""
        codes, hashes = hashed_people(ids, self.key)
        own, others = self.lists[party], [each for name, each in self.lists.items() if name != party]
        if kind_of(ids) != own.kind or not own.hashes.issuperset(each[:_HASH_BYTES] for each in hashes):
            raise DataError(f"{party}: a person in the table is not in its list; make and send the list again.")
        homes = np.array([self._is_home(party, each[:_HASH_BYTES], others) for each in hashes])
        return np.asarray(homes[codes])

    def _is_home(self, party: str, person: bytes, others: Sequence[HashedIdList]) -> bool:
        holders = [party, *(each.party for each in others if person in each.hashes)]
        return party == min(holders, key=lambda name: hmac.digest(self.key, person + name.encode(), "sha256"))

    def kept(self, party: str, held: RecordsWithIds) -> RecordsWithIds:
        from sklearn.utils import _safe_indexing

        places = np.flatnonzero(self.keeps(party, held.person))
        if not len(places):
            raise DataError(f"{party}: each person it knows is kept by another party; leave it out of the plan.")
        several = isinstance(held.data, tuple)
        taken = tuple(_safe_indexing(part, places) for part in (held.data if several else (held.data,)))
        return RecordsWithIds(taken if several else taken[0], _safe_indexing(held.person, places))


def read_matching(key: str | Path | None, lists: str | Path | None, parties: Sequence[str]) -> RecordLinkage | None:
    """The matching that a party was told of by two paths; ``None`` if it was told of none."""
    if (key is None) != (lists is None):
        raise DataError("people: the key and the folder of lists belong together; give both or neither.")
    return None if key is None or lists is None else RecordLinkage.read(read_key(Path(key)), Path(lists), parties)


def _read_list(path: Path, party: str, key: bytes) -> HashedIdList:
    try:
        found = HashedIdList.parse(read_bytes(path, most=_LARGEST), key, str(path))
    except FileNotFoundError:
        raise DataError(f"{path}: is missing; each party makes its own list and sends it.") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({os_error_text(error)}).") from None
    if found.party != party:
        raise DataError(f"{path}: is the list of {found.party!r}, not of {party!r}.")
    return found


def write_list(folder: Path, people: HashedIdList, key: bytes) -> Path:
    """Write a party's list into ``folder``, readable by its owner only."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{people.party}{SUFFIX}"
    write_atomically(path, people.to_bytes(key), private=True)
    return path


def new_key(path: Path) -> bytes:
    """Draw the parties' key and write it where only its owner may read it; a file that is there is left alone."""
    key = fresh_key()
    try:
        write_new_secret(path, key.hex().encode() + b"\n")
    except FileExistsError:
        raise DataError(f"{path}: exists already; leave out --new-key to use it.") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({os_error_text(error)}).") from None
    return key


def read_key(path: Path) -> bytes:
    """The parties' key; one that others may read is refused."""
    try:
        open_to_others = path.stat().st_mode & 0o077
        key = bytes.fromhex(read_bytes(path, most=1024).decode().strip())
    except FileNotFoundError:
        raise DataError(f"{path}: no such key. One party makes it with --new-key, for the parties alone.") from None
    except (ValueError, OSError):
        open_to_others, key = 0, b""
    if open_to_others:
        raise DataError(f"{path}: others may read this key; run `chmod 600 {path}`.")
    if len(key) != KEY_BYTES:
        raise DataError(f"{path}: is not a key of `quietgrad federate match --new-key`.")
    return key
