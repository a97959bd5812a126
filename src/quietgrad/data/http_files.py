"""Files on the web: fsspec's, by names that show no login and no query, and from the named host alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp
import yarl
from fsspec.implementations.http import HTTPFileSystem

from quietgrad.core.errors import DataError
from quietgrad.core.sanitize import sanitize


class HTTPFiles(HTTPFileSystem):  # type: ignore[misc]
    """Files by their shown addresses; logins by origin and queries by address are added when one is asked for."""

    cachable = False  # fsspec would keep the logins for as long as the process lives

    def __init__(
        self,
        logins: Mapping[str, tuple[str, str]] | None = None,
        queries: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(get_client=_client, **options)
        self._logins = dict(logins or {})
        self._queries = dict(queries or {})

    def __reduce__(self) -> tuple[Any, ...]:  # for the workers of a cluster, who read the same files
        return type(self), (self._logins, self._queries)

    def encode_url(self, url: str) -> yarl.URL:
        """The whole address of a file: what every request of fsspec is made with."""
        asked = yarl.URL(url)
        if query := self._queries.get(url):
            asked = yarl.URL(f"{asked}{query}", encoded=True)  # with its mark
        if login := self._logins.get(_origin(url)):
            asked = asked.with_user(login[0]).with_password(login[1])
        return asked


def _origin(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"


async def _client(**options: Any) -> aiohttp.ClientSession:
    traces = aiohttp.TraceConfig()
    traces.on_request_redirect.append(_check_redirect)
    return aiohttp.ClientSession(trace_configs=[traces], **options)


async def _check_redirect(session: object, context: object, asked: aiohttp.TraceRequestRedirectParams) -> None:
    """Refuse to be sent to another host or port, or from https to http; from http to https is fine."""
    target = asked.url.join(yarl.URL(asked.response.headers.get("Location", "")))
    is_upgrade = (asked.url.scheme, target.scheme, target.host) == ("http", "https", asked.url.host)
    if target.origin() != asked.url.origin() and not is_upgrade:
        there, here = (sanitize(str(url.origin())) for url in (target, asked.url))
        raise DataError(
            f"{here}: sends the reader on to {there}. Records are read from the host that was named and from no "
            "other: name that address if it is meant. Nothing was read."
        )
