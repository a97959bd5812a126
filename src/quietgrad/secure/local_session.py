"""Secure sums in one process: every role, every frame and every key of the real protocols, without a network.

``SecureSession`` sets the roles up once and sums round after round, as a federated curator does;
``secure_sum`` is one round of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from quietgrad.errors import DataError
from quietgrad.secure.channel import TranscriptRecorder
from quietgrad.secure.discrete_gaussian import Vector
from quietgrad.secure.identity import Identity, Roster
from quietgrad.secure.masking import MaskingParty, MaskingServer
from quietgrad.secure.servers import SharingParty, SumServer
from quietgrad.secure.terms import Mode, SecureSumConfig
from quietgrad.secure.three_party import NoiseServer, run_together


class SecureSession:
    """All roles of a run of secure sums in one process.

    Args:
        terms: the agreed terms.
        names: the parties' names; ``party-1`` … by default.
        seed: fixes the noise, for tests only: the result is then **not private**.
        view: a recorder of every decrypted message, for tests.

    >>> session = SecureSession(SecureSumConfig("mpc", parties=2, dimension=3, bound=10.0, sigma=0.0))
    >>> session.sum([[1.0, 2.0, 3.0], [0.5, -2.0, 0.0]]).round(9).tolist()
    [1.5, 0.0, 3.0]
    """

    def __init__(
        self,
        terms: SecureSumConfig,
        *,
        names: Sequence[str] | None = None,
        seed: int | None = None,
        view: TranscriptRecorder | None = None,
    ) -> None:
        parties = list(names) if names is not None else [f"party-{i + 1}" for i in range(terms.parties)]
        servers = ["server"] if terms.mode == "masks" else [f"server-{k + 1}" for k in range(terms.server_count)]
        people = [Identity(name) for name in parties + servers]
        roster, run = Roster.of(people), os.urandom(16)
        self.terms, self.round = terms, -1
        self._prepared = -1
        self._mask_parties: list[MaskingParty] = []
        self._sharing_parties: list[SharingParty] = []
        self._sum_servers: list[SumServer] = []
        holders, others = people[: terms.parties], people[terms.parties :]
        if terms.mode == "masks":
            self._mask_parties = [MaskingParty(p, roster, terms, run, view=view, seed=seed) for p in holders]
            self._mask_server = MaskingServer(others[0], roster, terms, run, view=view)
            self._mask_server.meet([party.hello for party in self._mask_parties])
            hellos = self._mask_server.introductions()
            for party in self._mask_parties:
                party.meet(hellos[party.me])
        else:
            kind = NoiseServer if terms.mode == "mpc" else SumServer
            self._sharing_parties = [SharingParty(p, roster, terms, run, view=view) for p in holders]
            self._sum_servers = [kind(p, roster, terms, run, view=view, seed=seed) for p in others]
            of_servers = [server.hello for server in self._sum_servers]
            for sharer in self._sharing_parties:
                sharer.meet(of_servers)
            for server in self._sum_servers:
                server.meet([*of_servers, *(sharer.hello for sharer in self._sharing_parties)])

    def prepare(self) -> None:
        """Do what the next round needs before there are data: masks, or the three servers' noise."""
        if self._prepared > self.round:
            return
        self._prepared = t = self.round + 1
        if self.terms.mode == "masks":
            delivery = self._mask_server.relay(t, {p.me: p.prepare(t) for p in self._mask_parties})
            for party in self._mask_parties:
                party.deliver(t, delivery[party.me])
        elif self.terms.mode == "mpc":
            run_together([s.prepare(t) for s in self._sum_servers if isinstance(s, NoiseServer)])

    def sum(
        self, vectors: Sequence[npt.ArrayLike | None] | npt.NDArray[np.float64], *, scale: float = 1.0
    ) -> Vector:
        """The noisy sum of one vector per party; ``None`` stands for a party who drops out of this round.

        Every call is a new round and a new release, also after an aborted one.

        Args:
            vectors: one per party.
            scale: a public number by which the terms' bound and σ are multiplied in this round, for queries
                whose clipping bound changes from step to step (SPIDER's differences).
        """
        if len(vectors) != self.terms.parties:
            raise DataError(f"{len(vectors)} vectors: must be one for each of the {self.terms.parties} parties.")
        if not 0.0 < scale < np.inf:
            raise ValueError(f"scale={scale!r}: must be a positive number.")
        given = {i: np.asarray(v, np.float64) / scale for i, v in enumerate(vectors) if v is not None}
        self.prepare()
        self.round = t = self._prepared
        total = self._sum_masked(t, given) if self.terms.mode == "masks" else self._sum_shared(t, given)
        return total * scale

    def _sum_masked(self, t: int, vectors: Mapping[int, npt.ArrayLike]) -> Vector:
        parties, server = self._mask_parties, self._mask_server
        questions = server.survivors(t, {i: parties[i].submit(t, v) for i, v in vectors.items()})
        total = server.finish(t, {i: parties[i].reveal(t, question) for i, question in questions.items()})
        for i, frame in server.results(t, list(vectors)).items():
            parties[i].result(t, frame)
        return total

    def _sum_shared(self, t: int, vectors: Mapping[int, npt.ArrayLike]) -> Vector:
        shares = {i: self._sharing_parties[i].share(t, v) for i, v in vectors.items()}
        servers = self._sum_servers
        present = {s.me: s.receive(t, {i: frames[s.me] for i, frames in shares.items()}) for s in servers}
        partials = {}
        for s in servers:
            frame = s.partial(t, {k: frames[s.me] for k, frames in present.items() if k != s.me})
            if frame is not None:
                partials[s.me] = frame
        total = servers[0].finish(t, partials)
        for i, frame in servers[0].results(t, list(vectors)).items():
            self._sharing_parties[i].result(t, frame)
        return total


def secure_sum(
    vectors: Sequence[npt.ArrayLike] | npt.NDArray[np.float64],
    clip: float = 1.0,
    noise_multiplier: float = 0.0,
    mode: Mode = "masks",
    seed: int | None = None,
    *,
    honest: int | None = None,
    colluders: int = 1,
    servers: int | None = None,
) -> npt.NDArray[np.float64]:
    """Sum the parties' vectors, each clipped to L2 norm ``clip``, with noise that no single role knows.

    The noise hidden from the adversary has σ = noise_multiplier·clip. The sum carries more variance: m/h times σ²
    with masks (h = m − 1 unless given), K times with K servers, 1.003 times with the three-server computation.

    Args:
        vectors: one vector per party, all of one length.
        clip: the L2 bound of one vector.
        noise_multiplier: σ ÷ clip; 0 gives the exact sum on a grid of clip/2^44, **not private**.
        mode: ``"masks"``, ``"servers"`` or ``"mpc"``.
        seed: fixes the noise, for tests only: the result is then **not private**.
        honest, colluders: masks: see :class:`~quietgrad.secure.terms.SecureSumConfig`.
        servers: servers: K, 2 unless given.

    >>> secure_sum([[3.0, 4.0], [0.0, 0.5]], clip=1.0).round(9).tolist()
    [0.6, 1.3]
    >>> noisy = secure_sum(np.zeros((5, 1000)), noise_multiplier=2.0, mode="mpc", seed=0)
    >>> bool(1.8 < noisy.std() < 2.2)
    True
    """
    rows = [np.asarray(v, np.float64) for v in vectors]
    if not rows or rows[0].ndim != 1 or rows[0].size == 0:
        raise DataError("vectors: must be a non-empty list of non-empty one-dimensional vectors.")
    for i, row in enumerate(rows):
        if row.shape != rows[0].shape:
            raise DataError(f"vector {i} has shape {row.shape}: all must have the shape {rows[0].shape}.")
        if not np.isfinite(row).all():
            raise DataError(f"vector {i}: has a NaN or an infinity.")
    if not noise_multiplier >= 0.0:
        raise ValueError(f"noise_multiplier={noise_multiplier!r}: must be ≥ 0. For no noise pass 0.")
    terms = SecureSumConfig(
        mode,
        parties=len(rows),
        dimension=rows[0].size,
        bound=float(clip),
        sigma=float(noise_multiplier) * float(clip),
        honest=honest,
        colluders=colluders,
        servers=servers,
    )
    return SecureSession(terms, seed=seed).sum(rows)
