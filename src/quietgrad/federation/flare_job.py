"""A job on NVIDIA FLARE 2.9: our plans and refusals over its network and mutual TLS (extra ``federated``).

A job is two of these objects and no code: :class:`Coordinator` runs in the server's job process, :class:`Site` in
each party's, both from the copy of this package that is installed there. What a site reads and writes (plan, keys,
records, ledger) stands in a file of its own (:class:`~quietgrad.federation.flare.SiteSettings`), never in the job.
"""

from __future__ import annotations

import gc
import threading

from nvflare.collab import collab

from quietgrad.errors import QuietgradError
from quietgrad.federation import network
from quietgrad.federation.flare import SiteSettings
from quietgrad.federation.members import SumMember
from quietgrad.federation.party import PartyCurator
from quietgrad.federation.provision import Credentials
from quietgrad.federation.toml_plan import PlanFile, read_plan
from quietgrad.federation.transport import Bytes, Handler
from quietgrad.federation.transport.nvflare import CollabTransport, Sweep
from quietgrad.federation.wire import Message, encode

_SERVER = "server"  # how FLARE calls the coordinator's process


class Coordinator:
    """The server's side of a job: trains through the sites and leaves the model in the coordinator's folder."""

    @collab.main  # type: ignore[untyped-decorator]
    def run(self) -> str:
        """Coordinate once; how it ended stands in the folder's ``outcome.json``."""
        settings = SiteSettings.read(collab.workspace.get_site_config_dir())
        transport: CollabTransport | None = None
        parting: Bytes = b""
        try:
            file = read_plan(settings.plan)
            credentials = Credentials.read(settings.keys)
            gc.freeze()  # what is there by now stays: sweeping need not look at it
            transport = CollabTransport({proxy.name: proxy for proxy in collab.clients}, file.digest)
            result = network.coordinate(
                file, credentials, transport, folder=settings.out, ledger=settings.ledger_for(file),
                account=settings.account, cap=settings.cap_for(file), tell=settings.tell,
            )  # fmt: skip
            words, parting = "the run is complete", network.parting(result)
        except (QuietgradError, ValueError, OSError) as error:
            words = f"aborted: {error}"
        if transport is not None:
            transport.finish(words, parting)
        settings.end(words, done=bool(len(parting)))
        return words


class Site:
    """A party's (or sum server's) side of a job: answers the coordinator as its own plan and keys say."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._settings: SiteSettings | None = None
        self._file: PlanFile | None = None
        self._member: PartyCurator | SumMember | None = None
        self._handler: Handler | None = None
        self._failure = "is not ready"
        self._asked: tuple[str, int] | None = None
        self._reply = b""
        self._sweep = Sweep()

    @collab.init  # type: ignore[untyped-decorator]
    def start(self) -> None:
        """Read this site's settings, plan, keys and records; what is wrong with them is told when asked."""
        self._settings = SiteSettings.read(collab.workspace.get_site_config_dir())
        self._settings.tell("the coordinator's job has started here")
        try:
            self._file = read_plan(self._settings.plan)
            self._member = self._settings.member(self._file)
            self._handler = self._member.handle
        except (QuietgradError, ValueError, OSError) as error:
            self._failure = str(error)
        gc.freeze()  # as at the coordinator

    @collab.publish  # type: ignore[untyped-decorator]
    def answer(self, session: str, number: int, message: bytes) -> bytes:
        """Answer one message; one that comes again gets the same reply."""
        if collab.caller != _SERVER:
            return _refusal("only the coordinator may ask")
        with self._lock:
            if self._handler is None or self._file is None:
                return _refusal(self._failure)
            if session.partition(":")[0] != self._file.digest:
                return _refusal("the coordinator's plan file is not the one that was approved here")
            if self._asked != (session, number):
                self._reply = bytes(self._handler(bytearray(message)))
                self._asked = (session, number)
                self._sweep.passed(len(message) + len(self._reply))
            return self._reply

    @collab.publish  # type: ignore[untyped-decorator]
    def finish(self, words: str, parting: bytes) -> bool:
        """Hear how it ended and keep the model."""
        if collab.caller != _SERVER or self._settings is None or self._file is None:
            return False
        try:
            done = network.save_parting(parting, self._file, self._settings.out, self._member)
            if isinstance(self._member, PartyCurator):
                self._member.discard() if done else self._member.withdraw()
        except QuietgradError as error:
            words, done = str(error), False
        self._settings.end(words, done=done)
        return done


def _refusal(reason: str) -> bytes:
    return bytes(encode(Message("refused", {"code": "plan", "reason": reason})))
