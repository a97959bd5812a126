"""Secure sums in one process: every role, every frame and every key of the real protocols, without a network."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from quietgrad.core.errors import DataError, SettingError
from quietgrad.federation.secure.channel import Endpoint, TranscriptRecorder
from quietgrad.federation.secure.choreography import (
    ANSWERS,
    QUESTION,
    Choreography,
    Frames,
    MaskedSums,
    NoisySum,
    Reply,
    SharedSums,
    Step,
    drive,
    submission,
)
from quietgrad.federation.secure.discrete_gaussian import Vector
from quietgrad.federation.secure.identity import Identity, ProtocolError, Roster
from quietgrad.federation.secure.masking import MaskingParty, MaskingServer
from quietgrad.federation.secure.servers import NoiseServer, SharingParty, SumServer
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
        self._protocol: MaskedSums | SharedSums
        self._roles: dict[int, Endpoint]
        if terms.masked:
            self._roles = {
                k: MaskingParty(p, roster, terms, run, view=view, seed=seed) for k, p in enumerate(holders)
            }
            server = MaskingServer(others[0], roster, terms, run, view=view)
            self._protocol = MaskedSums(server, terms.parties - terms.tolerated_dropouts)
        else:
            kind = NoiseServer if terms.mode == "mpc" else SumServer
            self._roles = {k: SharingParty(p, roster, terms, run, view=view) for k, p in enumerate(holders)}
            for k, person in enumerate(others, terms.parties):
                self._roles[k] = kind(person, roster, terms, run, view=view, seed=seed)
            self._protocol = SharedSums(terms, roster.names)
        self._under_way: tuple[Choreography[NoisySum], Step] | None = None  # a round up to its question
        drive(self._protocol.set_up(range(terms.parties), _refuse), self._replies)

    def prepare(self) -> None:
        """Do what the next round needs before there are data: masks, or the three servers' noise."""
        if self._under_way is None:
            self._prepared += 1
            this = self._protocol.sum(self._prepared, range(self.terms.parties), _refuse)
            step = next(this)
            while step.kind != QUESTION:
                step = this.send(self._replies(step))
            self._under_way = this, step

    def sum(self, vectors: Sequence[npt.ArrayLike | None] | npt.NDArray[np.float64]) -> Vector:
        """The noisy sum of one vector per party; ``None`` stands for a party who drops out of this round.

        Every call is a new round and a new release, also after an aborted one.
        """
        if len(vectors) != self.terms.parties:
            raise DataError(f"{len(vectors)} vectors: must be one for each of the {self.terms.parties} parties.")
        given = {i: np.asarray(v, np.float64) for i, v in enumerate(vectors) if v is not None}
        self.prepare()
        self.round = self._prepared
        assert self._under_way is not None
        (this, question), self._under_way = self._under_way, None
        replies = {i: self._submission(i, given[i]) for i in question.to if i in given}
        return drive(this, self._replies, after=replies).total

    def _replies(self, step: Step) -> dict[int, Reply]:
        return {i: self._reply(self._roles[i], step.kind, frames) for i, frames in step.to.items()}

    def _reply(self, role: Endpoint, kind: str, frames: Frames) -> Reply:
        if kind == "hello":
            return Reply({"frame": role.hello})
        return ANSWERS[type(role)][kind].of(role, self._prepared, frames)

    def _submission(self, party: int, vector: npt.NDArray[np.float64]) -> Reply:
        role = self._roles[party]
        assert isinstance(role, MaskingParty | SharingParty)
        return submission(role, self.round, vector)


def _refuse(left_out: Mapping[str, str]) -> None:
    """All roles are of this process: none sends what another cannot read."""
    for name, reason in left_out.items():
        raise ProtocolError(name, reason)


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
    """Sum the parties' vectors with noise that no single role knows.

    Each vector is clipped to L2 norm ``clip``.

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
        raise SettingError(
            "{noise_multiplier}: must be ≥ 0. For no noise pass 0.", noise_multiplier=noise_multiplier
        )
    sigma = float(noise_multiplier) * float(clip)
    terms = SecureSumConfig(
        mode, len(rows), rows[0].size, float(clip), sigma, honest=honest, colluders=colluders, servers=servers
    )
    return SecureSession(terms, seed=seed).sum(rows)
