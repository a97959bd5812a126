"""Addresses of tables that lie elsewhere: a text that may be shown, and the one way to open what it names.

An address may carry a login (``s3://KEY:SECRET@bucket/people``) or a signed query. Names of accounts, reports,
``run.json``, ledgers and errors are all made of texts. So an :class:`Address` is a text *without* them, and the
whole of it is read by :func:`open_addresses` alone. What a library raises while it opens or reads an address may
quote the whole of it; :func:`guarded` lets none of that through.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar
from urllib.parse import parse_qs, unquote

from quietgrad.core.errors import DataError, QuietgradError
from quietgrad.core.sanitize import sanitize

if TYPE_CHECKING:
    from pyarrow import fs

Value = TypeVar("Value")

_WEB = ("http", "https")
_LINK = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)(.*)", re.DOTALL)
_CHAIN = re.compile(r"::(?=[A-Za-z][A-Za-z0-9+.-]*://)")  # fsspec's: simplecache::s3://bucket/people.csv
_ATTEMPT = re.compile(r"(?:^|::)[\s\x00-\x20]*[A-Za-z][A-Za-z0-9+.-]+:[/\\]")  # is meant as one, perhaps misspelt
_SYSTEM = re.compile(r"[\w.+-]*")  # the name of a file system
# Host and port, or a file inside an archive.
_PLACE = re.compile(r"(\[[0-9A-Fa-f:.]*\]|[\w.~*{}, +()-]*)(:\d*|::)?")
_QUERY = re.compile(r"\?(?=[\w.~%-]+=)")  # elsewhere than on the web, ? is also a mark of a pattern
_MARK = r"(?:[;&]|%3[FfBb]|%2[36])"  # what parameters may follow besides ?, spelt out or escaped
_HIDDEN = re.compile(rf"\?|{_MARK}")  # on the web a path is shown up to the first of them
_PARAMETER = re.compile(rf"{_MARK}[^/]*?(?:=|%3[Dd])")  # elsewhere such a path is refused: it names a file
_PATTERN = "*?["


def is_address(source: object) -> bool:
    """Whether a text is an address, and not a path or a name; one that is misspelt is one, and is refused later.

    >>> is_address("s3://bucket/people"), is_address("simplecache::s3://bucket/a.csv"), is_address("people.csv")
    (True, True, False)
    """
    return isinstance(source, str) and (
        _ATTEMPT.search(source) is not None or any(_LINK.match(link) for link in _CHAIN.split(source))
    )


class Address(str):
    """The address of a table, which shows no login, no query and no fragment, however it is printed or kept.

    It is a text like any other. What is cut from it, joined to it or read back from a file has no login either,
    and opens what is open to everybody. A pickle of it holds the text alone.

    >>> Address("https://bob:secret@data.example/people.csv?key=12#top")
    'https://data.example/people.csv'
    >>> Address("https://bob:se/cret@data.example/people.csv")
    Traceback (most recent call last):
    quietgrad.core.errors.DataError: a https address: ... Nothing was read.
    """

    __slots__ = ("_whole",)
    _whole: str

    def __new__(cls, whole: str) -> Address:
        if isinstance(whole, Address):
            return whole
        address = super().__new__(cls, "::".join(_shown(link) for link in _CHAIN.split(whole)))
        address._whole = whole
        return address

    def __copy__(self) -> Address:
        return self

    def __deepcopy__(self, memo: object) -> Address:
        return self

    def __reduce_ex__(self, protocol: object) -> tuple[type[str], tuple[str]]:
        return str, (self[:],)


def public(source: Value) -> Value | Address:
    """``source``, as an :class:`Address` if it is the text of one."""
    return Address(source) if isinstance(source, str) and is_address(source) else source


class _Parts(NamedTuple):
    scheme: str
    login: str
    place: str
    path: str
    query: str  # on the web with the mark that it begins with

    @property
    def text(self) -> str:
        return f"{self.scheme}://{self.place}{self.path}"


def _parts(link: str) -> _Parts | None:
    """The parts of one link of a chain; ``None`` of a link that is the name of a file system alone."""
    found = _LINK.fullmatch(link)
    if found is None:
        if _SYSTEM.fullmatch(link) is None:
            _refuse("an")
        return None
    scheme, place, rest = found[1].lower(), found[2], found[3].partition("#")[0]
    login, at, host = place.rpartition("@")
    # Unescaped, a / ? or # ends the place early and leaves half a password in the path. An @ behind it says so.
    is_split = "@" in found[3] and (bool(at) or ":" in place or scheme in _WEB)
    if is_split or _PLACE.fullmatch(host) is None:
        _refuse(f"a {scheme}")
    if scheme in _WEB:
        cut = _HIDDEN.search(rest)
        path, query = (rest, "") if cut is None else (rest[: cut.start()], rest[cut.start() :])
    else:
        cut = _QUERY.search(rest)
        path, query = (rest, "") if cut is None else (rest[: cut.start()], rest[cut.end() :])
        if _PARAMETER.search(path) is not None:
            _refuse(f"a {scheme}")
    return _Parts(scheme, login, host, path, query)


def _shown(link: str) -> str:
    parts = _parts(link)
    return link if parts is None else parts.text


def _refuse(kind: str) -> NoReturn:
    raise DataError(
        f"{sanitize(kind)} address: it is not clear where its login ends. Write scheme://host/path with nothing "
        "before it, parameters behind a ?, @ in a path or a query as %40, and in a login : as %3A, / as %2F, ? as "
        "%3F, # as %23 and @ as %40. Nothing was read."
    )


def guarded(call: Callable[[], Value], refusal: str) -> Value:
    """Return ``call()``; an error of a library becomes a ``DataError``, which neither quotes it nor leads to it.

    The kind of the error is kept, and the number of a server's answer.
    """
    try:
        return call()
    except QuietgradError:
        raise
    except Exception as error:
        status = getattr(error, "status", None)
        why = f"the server answered {status}" if isinstance(status, int) else type(error).__name__
    # Out of the handler: the new error has no context that a traceback or a log could print.
    raise DataError(f"{refusal.removesuffix('.')} ({why}).")


def open_addresses(addresses: Sequence[Address], *, allow_http: bool = False) -> tuple[fs.FileSystem, list[str]]:
    """Open the file system of addresses, of pyarrow or else of fsspec, and give the paths there.

    Paths keep their patterns. They show no more than the addresses do.

    Raises:
        DataError: nothing installed knows the address, it is plain http and ``allow_http`` is not set, or the
            addresses are of several places or logins.
    """
    wholes = [[_parts(link) for link in _CHAIN.split(address._whole)] for address in addresses]
    for address, links in zip(addresses, wholes, strict=True):
        if not allow_http and any(link is not None and _is_plain(link) for link in links):
            raise DataError(
                f"{sanitize(address)}: plain http shows records and login to every machine on the way, and lets "
                "it change them. Use https; or pass {allow_http=True} on a network of your own. Nothing was read."
            )
    single = [links[0] for links in wholes if len(links) == 1 and links[0] is not None]
    if len(single) == len(addresses) and all(link.scheme in _WEB for link in single):
        return _open_web(single), [link.text for link in single]
    places = {tuple((link.scheme, link.login, link.query) if link else () for link in links) for links in wholes}
    if len(places) > 1:
        raise DataError(f"{sanitize(addresses[0])}: scan addresses of one place and one login at a time.")
    opened = [_open(address, links[0]) for address, links in zip(addresses, wholes, strict=True)]
    return opened[0][0], [path for _, path in opened]


def _is_plain(link: _Parts) -> bool:
    """Whether it is read over plain http: an address of the web, or a store that is asked for it."""
    return link.scheme == "http" or "http" in parse_qs(link.query).get("scheme", ())


def _open_web(links: Sequence[_Parts]) -> fs.FileSystem:
    from pyarrow import fs

    logins = {f"{link.scheme}://{link.place}": _login(link.login) for link in links if link.login}
    queries = {link.text: link.query for link in links if link.query}
    if len({(link.text, link.query) for link in links}) > len({link.text for link in links}):
        raise DataError(
            f"{sanitize(links[0].text)}: addresses that differ only in what is not shown of them cannot be told "
            "apart. Scan them one by one. Nothing was read."
        )

    def open_files() -> Any:
        from quietgrad.data.http_files import HTTPFiles  # loads aiohttp

        return fs.PyFileSystem(fs.FSSpecHandler(HTTPFiles(logins=logins, queries=queries)))

    return guarded(open_files, f"{sanitize(links[0].text)}: cannot be opened; install fsspec and aiohttp.")


def _login(text: str) -> tuple[str, str]:
    name, _, password = text.partition(":")
    return unquote(name), unquote(password)


def _open(address: Address, link: _Parts | None) -> tuple[fs.FileSystem, str]:
    import pyarrow as pa
    from pyarrow import fs

    whole = address._whole
    root, behind = whole, ""
    if link is not None and _CHAIN.search(whole) is None:  # a pattern is no part of what is opened
        folder = pattern_root(link.path)
        login, query = f"{link.login}@" if link.login else "", f"?{link.query}" if link.query else ""
        root, behind = f"{link.scheme}://{login}{link.place}{folder}{query}", link.path[len(folder) :]

    def open_files() -> tuple[fs.FileSystem, str]:
        try:
            return fs.FileSystem.from_uri(root)  # type: ignore[no-any-return]
        except (pa.ArrowException, ValueError, OSError):
            from fsspec.core import url_to_fs

            found, path = url_to_fs(root)
            return fs.PyFileSystem(fs.FSSpecHandler(found)), path

    refusal = f"{sanitize(address)}: nothing installed opens this address; install its fsspec package."
    system, path = guarded(open_files, refusal)
    secrets = [text for one in map(_parts, _CHAIN.split(whole)) if one for text in (one.login, one.query) if text]
    if any(text in path for text in secrets):
        raise DataError(
            f"{sanitize(address)}: its file system puts logins into the names of files, where they would be seen. "
            "Give the login by fsspec's own configuration. Nothing was read."
        )
    return system, path + behind


def pattern_root(source: str) -> str:
    """The path up to the folder of the first pattern character.

    >>> pattern_root("people/20*/a.parquet"), pattern_root("people/a.parquet")
    ('people', 'people/a.parquet')
    """
    cut = min((source.index(mark) for mark in _PATTERN if mark in source), default=len(source))
    return source[:cut].rpartition("/")[0] if cut < len(source) else source
