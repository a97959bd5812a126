"""Secure sums in one process: every role, every frame and every key of the real protocols, without a network."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from quietgrad.core.errors import DataError
from quietgrad.federation.secure.channel import TranscriptRecorder
from quietgrad.federation.secure.discrete_gaussian import Vector
from quietgrad.federation.secure.identity import Identity, Roster
from quietgrad.federation.secure.masking import MaskingParty, MaskingServer
from quietgrad.federation.secure.servers import NoiseServer, SharingParty, SumServer, run_together
from quietgrad.federation.secure.terms import Mode, SecureSumConfig


class SecureSession:
    """All roles of a run of secure sums in one process.

    Args:
        terms: the agreed terms.
        seed: fixes the noise, for tests only: the result is then **not private**.
        view: a recorder of every decrypted message, for tests.

    >>> session = SecureSession(SecureSumConfig("mpc", parties=2, dimension=3, bound=10.0, sigma=0.0))
    >>> session.sum([[1.0, 2.0, 3.0], [0.5, -2.0, 0.0]]).round(9).tolist()
    [1.5, 0.0, 3.0]
    """

    def __init__(
        self, terms: SecureSumConfig, *, seed: int | None = None, view: TranscriptRecorder | None = None
    ) -> None:
        parties = [f"party-{i + 1}" for i in range(terms.parties)]
        servers = ["server"] if terms.masked else [f"server-{k + 1}" for k in range(terms.server_count)]
        people = [Identity(name) for name in parties + servers]
        roster, run = Roster.of(people), os.urandom(16)
        holders, others = people[: terms.parties], people[terms.parties :]
        self.terms, self.round, self._prepared = terms, -1, -1
        self._roles: _Masked | _Shared
        if terms.masked:
            self._roles = _Masked(
                [MaskingParty(each, roster, terms, run, view=view, seed=seed) for each in holders],
                MaskingServer(others[0], roster, terms, run, view=view),
            )
        else:
            kind = NoiseServer if terms.mode == "mpc" else SumServer
            self._roles = _Shared(
                [SharingParty(each, roster, terms, run, view=view) for each in holders],
                [kind(each, roster, terms, run, view=view, seed=seed) for each in others],
            )

    def prepare(self) -> None:
        """Do what the next round needs before there are data: masks, or the three servers' noise."""
        if self._prepared == self.round:
            self._prepared += 1
            self._roles.prepare(self._prepared)

    def sum(self, vectors: Sequence[npt.ArrayLike | None] | npt.NDArray[np.float64]) -> Vector:
        """The noisy sum of one vector per party; ``None`` stands for a party who drops out of this round.

        Every call is a new round and a new release, also after an aborted one.
        """
        if len(vectors) != self.terms.parties:
            raise DataError(f"{len(vectors)} vectors: must be one for each of the {self.terms.parties} parties.")
        given = {i: np.asarray(v, np.float64) for i, v in enumerate(vectors) if v is not None}
        self.prepare()
        self.round = self._prepared
        return self._roles.sum(self.round, given)


class _Masked:
    def __init__(self, parties: list[MaskingParty], server: MaskingServer) -> None:
        self.parties, self.server = parties, server
        server.meet([party.hello for party in parties])
        hellos = server.introductions()
        for party in parties:
            party.meet(hellos[party.me])

    def prepare(self, t: int) -> None:
        delivery = self.server.relay(t, {party.me: party.prepare(t) for party in self.parties})
        for party in self.parties:
            party.deliver(t, delivery[party.me])

    def sum(self, t: int, vectors: Mapping[int, npt.ArrayLike]) -> Vector:
        questions = self.server.survivors(t, {i: self.parties[i].submit(t, v) for i, v in vectors.items()})
        return self.server.finish(t, {i: self.parties[i].reveal(t, frame) for i, frame in questions.items()})


class _Shared:
    def __init__(self, parties: list[SharingParty], servers: Sequence[SumServer]) -> None:
        self.parties, self.servers = parties, servers
        hellos = [server.hello for server in servers]
        for party in parties:
            party.meet(hellos)
        for server in servers:
            server.meet([*hellos, *(party.hello for party in parties)])

    def prepare(self, t: int) -> None:
        if together := [server.prepare(t) for server in self.servers if isinstance(server, NoiseServer)]:
            run_together(together)

    def sum(self, t: int, vectors: Mapping[int, npt.ArrayLike]) -> Vector:
        shares = {i: self.parties[i].share(t, v) for i, v in vectors.items()}
        seen = {s.me: s.receive(t, {i: frames[s.me] for i, frames in shares.items()}) for s in self.servers}
        partials = {
            s.me: s.partial(t, {k: frames[s.me] for k, frames in seen.items() if k != s.me}) for s in self.servers
        }
        return self.servers[0].finish(t, {k: frame for k, frame in partials.items() if frame is not None})


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
        honest, colluders: masks: see :class:`~quietgrad.federation.secure.terms.SecureSumConfig`.
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
        if row.shape != rows[0].shape or not np.isfinite(row).all():
            raise DataError(f"vector {i}: must have shape {rows[0].shape} as the first, and no NaN or infinity.")
    if not noise_multiplier >= 0.0:
        raise ValueError(f"noise_multiplier={noise_multiplier!r}: must be ≥ 0. For no noise pass 0.")
    sigma = float(noise_multiplier) * float(clip)
    terms = SecureSumConfig(
        mode, len(rows), rows[0].size, float(clip), sigma, honest=honest, colluders=colluders, servers=servers
    )
    return SecureSession(terms, seed=seed).sum(rows)
