"""`quietgrad federate … --engine nvflare`: starts FLARE's process of a member and follows what it leaves behind."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quietgrad.errors import DataError, QuietgradError
from quietgrad.files import read_json
from quietgrad.secure.faults import DropoutError

if TYPE_CHECKING:
    from quietgrad.federation.flare import SiteSettings
    from quietgrad.federation.provision import Credentials
    from quietgrad.federation.toml_plan import PlanFile
    from quietgrad.privacy.budget import Budget
    from quietgrad.training.result import Result

Tell = Callable[[str], None]


def coordinate(
    file: PlanFile,
    credentials: Credentials,
    out: Path,
    *,
    plan: Path,
    wait: float,
    ledger: Path | None,
    account: str,
    cap: Budget | None,
    tell: Tell,
    listen_everywhere: bool = False,
) -> Result:
    """Start FLARE's server, wait for the sites, submit the job, follow it, and shut everything down."""
    from quietgrad.federation import flare, network
    from quietgrad.training.result import load

    network.check_coordinator(credentials)
    if network.finished(file, out) is not None:
        tell(f"{out} holds the finished run of this plan: its model is handed out, and nobody is asked anything")
    if not flare.is_bound(file) and not listen_everywhere:
        raise DataError(listens_everywhere(file.port) + "; or accept it with --listen-everywhere")
    _check_ports(file)
    settings = _settings(plan, credentials, out, None, ledger, account, cap)
    with _running(file, credentials, settings) as process:
        tell(f"plan {network.spoken(file.digest)}, FLARE's server is starting at {file.host}:{file.port}")
        tell(ACCEPTS if flare.is_bound(file) else listens_everywhere(file.port))
        everyone = {name for name in file.members if name != credentials.name}
        with _session(credentials, process, everyone, wait, tell) as session:
            job = session.submit_job(str(flare.write_job(file, out).resolve()))
            tell(f"job {job} was submitted")
            words, done = _follow(out, process, tell, status=lambda: str(session.get_job_status(job)))
            limit = time.monotonic() + 20.0  # a job that is still running would stand in the way of the shutdown
            while "FINISHED" not in str(session.get_job_status(job)) and time.monotonic() < limit:
                time.sleep(0.5)
    if not done:
        raise QuietgradError(words)
    return load(out)


def take_part(
    file: PlanFile,
    plan: Path,
    credentials: Credentials,
    data: Path | None,
    out: Path,
    tell: Tell,
    *,
    ledger: Path | None,
    account: str,
    cap: Budget | None,
    patience: float,
    people_key: Path | None = None,
    people_lists: Path | None = None,
) -> dict[str, Any]:
    """Start FLARE's client of a party or a sum server and wait until the run is over."""
    settings = dataclasses.replace(
        _settings(plan, credentials, out, data, ledger, account, cap),
        people_key=None if people_key is None else str(people_key.resolve()),
        people_lists=None if people_lists is None else str(people_lists.resolve()),
    )
    settings.member(file).close()  # whatever is wrong here is told here; the job's process makes its own
    with _running(file, credentials, settings) as process:
        tell(f"approved plan {file.digest[:16]}…; FLARE's client is calling {file.host}:{file.port}")
        words, done = _follow(out, process, tell, patience=patience)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30.0)  # the coordinator shuts all sites down
    if not done:
        raise QuietgradError(f"the coordinator ended the run: {words.rstrip('.')}.")
    kept = settings.ledger_for(file)
    return {
        "words": words, "model": str(out / "model.safetensors"),
        "ledger": "none: this plan has no noise" if kept is None else str(kept),
    }  # fmt: skip


ACCEPTS = "FLARE accepts TLS 1.2 beside 1.3; --engine tls speaks 1.3 only"


def listens_everywhere(port: int) -> str:
    """What FLARE does wherever the plan's address is not loopback, and what to do about it."""
    return (
        f"FLARE listens on ALL addresses of this machine (ports {port} and {port + 1}) and accepts TLS 1.2: let a "
        "firewall admit the members only, or use --engine tls, which binds to the plan's address and speaks TLS 1.3"
    )


def _check_ports(file: PlanFile) -> None:
    """FLARE's server would try for minutes, and say so in its log only."""
    from quietgrad.cli.members import cannot_listen
    from quietgrad.federation import flare

    for port in (file.port, file.port + 1):
        try:
            socket.create_server((file.host if flare.is_bound(file) else "", port)).close()
        except OSError as error:
            raise DataError(cannot_listen(file.host, port, error)) from None


def _settings(
    plan: Path, credentials: Credentials, out: Path, data: Path | None, ledger: Path | None, account: str,
    cap: Budget | None,
) -> SiteSettings:  # fmt: skip
    from quietgrad.federation.flare import SiteSettings

    out.mkdir(parents=True, exist_ok=True)
    for stale in ("outcome.json", "progress.log"):
        (out / stale).unlink(missing_ok=True)
    return SiteSettings(
        plan=str(plan.resolve()),
        keys=str(credentials.folder.resolve()),
        folder=str(out.resolve()),
        data=None if data is None else str(data.resolve()),
        ledger=None if ledger is None else str(ledger.resolve()),
        account=account,
        cap_epsilon=None if cap is None else cap.epsilon,
    )


@contextlib.contextmanager
def _running(file: PlanFile, credentials: Credentials, settings: SiteSettings) -> Iterator[subprocess.Popen[bytes]]:
    """FLARE's process of this member; it and the job processes it started are gone at the end."""
    from quietgrad.federation import flare
    from quietgrad.federation.provision import COORDINATOR

    kit = flare.prepare_kit(credentials, settings)
    if credentials.name == COORDINATOR:
        flare.bind(file, kit / "startup" / "fed_server.json")  # whatever it was made with
    with (settings.out / "nvflare.log").open("wb") as log:
        process = subprocess.Popen(
            flare.command(credentials, kit), cwd=kit, stdout=log, stderr=log, env=flare.environment(file)
        )
        before = signal.signal(signal.SIGTERM, _stop)  # else `kill` would end this process and leave FLARE's
        try:
            yield process
        finally:
            signal.signal(signal.SIGTERM, before)
            process.terminate()
            try:
                process.wait(timeout=10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _stop(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _session(
    credentials: Credentials, process: subprocess.Popen[bytes], everyone: set[str], wait: float, tell: Tell
) -> Iterator[Any]:
    """An admin session with FLARE's server, once all sites are connected to it."""
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    from quietgrad.federation import flare

    limit = time.monotonic() + wait
    session: Any = None
    here: set[str] = set()
    while here < everyone:
        if process.poll() is not None:
            raise DataError("FLARE's server ended at once; see nvflare.log in the folder.")
        if time.monotonic() > limit:
            raise DataError(f"{', '.join(sorted(everyone - here))} did not connect within {wait:g} s.")
        time.sleep(0.5)
        try:
            if session is None:
                kit = str((credentials.folder / flare.ADMIN_KIT).resolve())
                with contextlib.redirect_stdout(io.StringIO()):  # FLARE talks
                    session = new_secure_session(flare.ADMIN, kit, timeout=5.0)
            now = {client.name for client in session.get_system_info().client_info}
        except Exception:  # not up yet
            continue
        for name in sorted(now & everyone - here):
            tell(f"{name} is connected")
        here = now & everyone
    try:
        yield session
    finally:
        with contextlib.suppress(Exception):  # it is over, whatever FLARE says
            session.shutdown("all", wait=False)
        with contextlib.suppress(Exception):
            session.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20.0)


def _follow(
    out: Path,
    process: subprocess.Popen[bytes],
    tell: Tell,
    *,
    status: Callable[[], str] = lambda: "",
    patience: float = math.inf,
) -> tuple[str, bool]:
    """Pass on progress until the outcome is there; a job or process that ended without one is an abort.

    Raises if nothing at all was heard of a job for ``patience`` seconds.
    """
    told, checked = 0, time.monotonic()
    limit = time.monotonic() + patience
    while True:
        ended = process.poll() is not None
        if time.monotonic() - checked > 3.0:
            checked = time.monotonic()
            ended = ended or "FINISHED" in status()
        log = out / "progress.log"
        lines = log.read_text().splitlines() if log.exists() else []
        for line in lines[told:]:
            tell(line.partition(" ")[2])
        told = len(lines)
        outcome = out / "outcome.json"
        if outcome.exists():
            said = read_json(outcome)
            return str(said["words"]), bool(said["done"])
        if not told and time.monotonic() > limit:
            raise DropoutError(["coordinator"], f"has not started a job here for {patience:g} s")
        if ended:
            return "aborted: FLARE ended the job; see nvflare.log in the folder", False
        time.sleep(0.2)
