"""An ordinary job on an NVIDIA FLARE that is there already: one controller, one executor, auxiliary messages.

Nothing of the job is code. What a site reads and writes stands in its own ``local/quietgrad.json``
(``quietgrad federate approve``), which FLARE never ships. FLARE's names of the sites are those of the plan.
"""

from __future__ import annotations

import threading
from pathlib import Path

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from quietgrad.core.errors import QuietgradError
from quietgrad.federation.approved import FILE, Approved
from quietgrad.federation.exchange import Responder, refusing
from quietgrad.federation.members import Member
from quietgrad.federation.revocation import COORDINATOR
from quietgrad.federation.transport import Away, Bytes, Calls

TOPIC = "quietgrad"


def approval_here(fl_ctx: FLContext) -> Approved:
    workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
    return Approved.read(Path(workspace.get_site_config_dir()) / FILE)


class FlareTransport(Calls):
    """Frames as FLARE's auxiliary messages; a request is given up after ``timeout`` seconds."""

    def __init__(self, fl_ctx: FLContext, names: tuple[str, ...], timeout: float) -> None:
        super().__init__(names, self._ask)
        self._engine, self._context, self._timeout = fl_ctx.get_engine(), fl_ctx, timeout

    def _ask(self, name: str, frame: Bytes) -> Bytes:
        # Not multicast_aux_requests, which in 2.9 reaches no client.
        request = Shareable({"frame": bytes(frame)})
        replies = self._engine.send_aux_request(
            [name], TOPIC, request, self._timeout, self._context, optional=True, secure=False
        )
        reply = (replies or {}).get(name)
        code = "has no process of this job yet" if reply is None else reply.get_return_code()
        if reply is None or code != ReturnCode.OK or not isinstance(reply.get("frame"), bytes):
            raise Away(f"FLARE says: {code}")
        return bytearray(reply["frame"])


class QuietgradController(Controller):  # type: ignore[misc]
    """The server's side of a job: coordinates, as the approval in the server's folder says."""

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Nothing to begin with."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Nothing is open."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Coordinate once; how it ended stands in the folder's ``progress.json``."""
        try:
            mine = approval_here(fl_ctx)
            others = tuple(name for name in mine.file.members if name != COORDINATOR)
            transport = FlareTransport(fl_ctx, others, mine.file.timeout)
            try:
                mine.coordinate(transport, lambda words: self.log_info(fl_ctx, words))
            finally:
                transport.close()
        except (QuietgradError, ValueError, OSError) as error:
            self.system_panic(str(error), fl_ctx)


class QuietgradExecutor(Executor):  # type: ignore[misc]
    """A site's side of a job: answers as the approval in the site's folder says."""

    def __init__(self) -> None:
        super().__init__()
        self._site: Responder | None = None
        self._member: Member | None = None
        self._lock = threading.Lock()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Be ready when the job starts; let go when it ends."""
        if event_type == EventType.START_RUN:
            fl_ctx.get_engine().register_aux_message_handler(TOPIC, self._reply)
            with self._lock:
                try:
                    mine = approval_here(fl_ctx)
                    self._member = member = mine.member()  # says nothing of the data: the server may read this log
                    self._site = mine.site(member, lambda words: self.log_info(fl_ctx, words))
                except (QuietgradError, ValueError, OSError) as error:
                    self._site = refusing(str(error))
        elif event_type == EventType.END_RUN and self._member is not None:
            self._member.close()

    def _reply(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        reply, frame = make_reply(ReturnCode.OK), request.get("frame")
        with self._lock:
            if self._site is None or not isinstance(frame, bytes):
                return make_reply(ReturnCode.BAD_REQUEST_DATA)
            reply["frame"] = bytes(self._site.answer(bytearray(frame)))
        return reply

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        return make_reply(ReturnCode.TASK_UNKNOWN)
