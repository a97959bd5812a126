"""A Flower deployment of this machine: a SuperLink with TLS and node authentication, and SuperNodes.

Used by ``tests/federation/test_flower.py`` and ``benchmarks/federation_engines.py``. Flower lives in an environment
of its own (docs/flower.md), whose ``bin`` folder is given.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

ROOT = Path(__file__).parents[2]
SECONDS = 300.0  # to give up, not to measure


class Flower:
    """A SuperLink and SuperNodes, one for each party.

    Args:
        folder: for keys and logs.
        bin_folder: of the environment that has Flower and quietgrad.
        names: of the parties.
        approval: the coordinator's.
    """

    def __init__(self, folder: Path, bin_folder: Path, names: tuple[str, ...], approval: Path) -> None:
        self.folder, self._bin, self.names = folder, bin_folder, names
        self._port, *self._nodes = free_ports(1 + len(names))
        self._running: list[subprocess.Popen[bytes]] = []
        self._environment = {
            **os.environ, "FLWR_HOME": str(folder / "home"), "FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1",
            "PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src"),
            "QUIETGRAD_APPROVAL": str(approval.resolve()),
        }  # fmt: skip
        (folder / "home").mkdir()
        (folder / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{self._port}"\n'
            f'root-certificates = "{folder / "ca.pem"}"\n'
        )
        _certificates(folder)

    def start(self, sockets: dict[str, Path]) -> None:
        """Start everybody; ``sockets`` are where the parties listen."""
        here = self.folder
        tls = ["--ssl-ca-certfile", "ca.pem", "--ssl-certfile", "link.pem", "--ssl-keyfile", "link.key"]
        self._start(
            "flower-superlink", "link", *tls, "--enable-supernode-auth",
            "--disable-runtime-dependency-installation", "--port", str(self._port),
        )  # fmt: skip
        limit = time.monotonic() + 60.0
        while time.monotonic() < limit:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1.0):
                break
            time.sleep(0.2)
        for name, port in zip(self.names, self._nodes, strict=True):
            key = ec.generate_private_key(ec.SECP384R1())
            secret = key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
            )
            (here / f"{name}.key").write_bytes(secret)
            (here / f"{name}.key").chmod(0o600)
            public = key.public_key().public_bytes(
                serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
            )
            (here / f"{name}.pub").write_bytes(public)
            self.flwr("supernode", "register", f"{name}.pub", "here")
            self._start(
                "flower-supernode", name, "--root-certificates", "ca.pem", "--superlink",
                f"127.0.0.1:{self._port}", "--auth-supernode-private-key", f"{name}.key", "--port", str(port),
                "--node-config", f'quietgrad-socket="{sockets[name]}"',
            )  # fmt: skip

    def flwr(self, *words: str) -> str:
        """Run Flower's own command."""
        done = subprocess.run(
            [self._bin / "flwr", *words], cwd=self.folder, env=self._environment, capture_output=True, text=True,
            timeout=120.0, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"flwr {' '.join(words)}: {done.stdout}{done.stderr}{self.log('link')[-2000:]}")
        return done.stdout

    def log(self, name: str) -> str:
        """What a process said."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def close(self) -> None:
        """End everything that was started here."""
        for process in reversed(self._running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its own group: it and the apps it started
            process.wait()

    def _start(self, program: str, name: str, *words: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self._running.append(
                subprocess.Popen(
                    [self._bin / program, *words], cwd=self.folder, env=self._environment, stdout=log, stderr=log,
                    start_new_session=True,
                )
            )  # fmt: skip


def free_ports(n: int) -> list[int]:
    """Ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(n)]
        return [int(each.getsockname()[1]) for each in sockets]


def _certificates(folder: Path) -> None:
    """An authority, and a certificate of 127.0.0.1."""
    now = datetime.datetime.now(datetime.UTC)
    authority, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])

    def made(name: str, public: ec.EllipticCurvePublicKey, extension: x509.ExtensionType) -> bytes:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now)
        builder = builder.not_valid_after(now + datetime.timedelta(days=1)).add_extension(extension, critical=False)
        return builder.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    here = x509.SubjectAlternativeName(
        [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
    )
    ca = x509.BasicConstraints(ca=True, path_length=0)
    (folder / "ca.pem").write_bytes(made("authority", authority.public_key(), ca))
    (folder / "link.pem").write_bytes(made("localhost", key.public_key(), here))
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "link.key").write_bytes(secret)
