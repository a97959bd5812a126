"""The agreed configuration of secure sums, and their threat model.

The digest of the configuration is signed in every hello and mixed into every key, so roles with different ones
cannot exchange a message, and a party never has to believe the coordinator about the noise.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import re
import textwrap
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import numpy.typing as npt

from quietgrad.federation.secure.discrete_gaussian import (
    SMOOTHING,
    Vector,
    Words,
    check_length,
    decode,
    discrete_gaussian,
    encode,
    require_headroom,
    rounded_gaussian_distance,
    smoothing_error,
)
from quietgrad.federation.secure.graph import GRAPHS_PER_RELEASE, CommunicationGraph, choose_graph, left_out
from quietgrad.federation.secure.ring import COARSE_UNITS, FAILURE, AnyWords, divergence, word_type

if TYPE_CHECKING:
    from quietgrad.core.noise.correlated import BufferedToeplitzNoise


Mode = Literal["masks", "servers", "mpc"]

NOISE_UNITS = 2.0**28  # σ in grid units: √d/2^28 and 0.021d/2^56 are negligible up to d = 10^7
CORRELATED_UNITS = 2.0**20  # of real normals, whose last bits must not show
COARSE_SIGMA = 24.0  # σ₂ of the noise sampled inside the three-server computation
COARSE_TOP = 255  # its largest magnitude: 10.6σ₂
COARSE_STEP = 1 << 23  # c: what one unit of it is worth on the grid
COARSE_WORD_BITS = 56  # λ of its table
IMPOSSIBLE_BITS = 40  # an honest sum fails the check of its length with probability 2^-40
_MOST_PARTIES = 10_000
_EXACT_UNITS = 2.0**44  # grid units per bound when there is no noise


@dataclass(frozen=True)
class SecureSumConfig:
    """The public, agreed description of a run of secure sums.

    ``sigma`` is the standard deviation that the noise unknown to the adversary must have on the sum. Because no
    one may know all of it, the sum carries more: ``variance_factor`` times σ². With masks each of m parties adds
    N_Z(σ²/h) so that any h honest ones suffice (factor m/h); each of K servers adds all of σ² (factor K); inside
    the three-server computation only the smoothing share of one server is spare (factor 1.003).

    Args:
        parties: m, the number of data holders.
        dimension: d, the length of every vector.
        bound: L2 bound of one party's vector (sum over its records), clipped on encoding.
        sigma: σ > 0 of the guaranteed noise, or 0 for an exact sum that is **not private**.
        honest: masks: h, how many honest parties remain in any sum; default m − 1, so that no single party,
            which knows its own share of the noise, sees less noise than σ.
        colluders: masks: how many parties may work with the server; default 1. Up to m − h − colluders parties
            may drop in a round.
        servers: K ≥ 2 for ``"servers"``; 3 for ``"mpc"``.
        quorum: servers and mpc: how few parties a sum may have; default all of them.
        neighbours: masks: k, among how many others each party's secrets are shared; default all up to 64 parties,
            beyond that the fewest for which the bounds of :mod:`quietgrad.federation.secure.graph` hold.
        correlated: noise that is correlated over the rounds, in which case σ is that of its innovations; masks and
            servers only. Round t is then release t of it.
        ring: bits of a word on the wire. 32 is for masks with independent noise: σ has 2^20 grid units, sums are
            rounded with a dither, and ``bound`` is at most :func:`coarse_reach`.

    >>> terms = SecureSumConfig("masks", parties=5, dimension=123, bound=1.0, sigma=2.0, honest=3)
    >>> terms.variance_factor, terms.least_parties, terms.threshold
    (1.6666666666666667, 4, 4)
    """

    mode: Mode
    parties: int
    dimension: int
    bound: float
    sigma: float
    honest: int | None = None
    colluders: int = 1
    servers: int | None = None
    quorum: int | None = None
    neighbours: int | None = None
    correlated: BufferedToeplitzNoise | None = None
    ring: int = 64

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode={self.mode!r}: must be one of {', '.join(get_args(Mode))}.")
        if self.mode == "mpc" and self.correlated is not None:
            # Real numbers would have to be combined and rounded inside; integers combined with fractions would bare
            # the residues of the sums.
            raise ValueError("correlated noise: 'mpc' draws integers and cannot make it; use 'servers' or 'masks'.")
        coarse = self.mode == "masks" and self.correlated is None and self.sigma > 0.0
        if self.ring not in ((32, 64) if coarse else (64,)):
            raise ValueError(f"ring={self.ring!r}: must be 64, or 32 for masks with independent noise.")
        # Plain numbers only: the digest must be the same for a numpy integer as for its value.
        for name in ("parties", "dimension", "colluders", "honest", "servers", "quorum", "neighbours"):
            given = vars(self)[name]
            self._set(name, None if given is None else operator.index(given))
        for name in ("bound", "sigma"):
            self._set(name, float(vars(self)[name]))
        if not 1 <= self.dimension <= 1 << 25:  # the longest message has 72d bytes and a 32-bit length
            raise ValueError(f"dimension={self.dimension!r}: must be between 1 and 2^25.")
        if not (0.0 < self.bound < math.inf and 0.0 <= self.sigma < math.inf):
            raise ValueError(
                f"bound={self.bound!r}, sigma={self.sigma!r}: must be > 0 and ≥ 0; 0 means no noise and no privacy."
            )
        fewest = 2 if self.masked else 1
        if not fewest <= self.parties <= _MOST_PARTIES:
            raise ValueError(f"parties={self.parties}: must be between {fewest} and {_MOST_PARTIES}.")
        m, c = self.parties, self.colluders
        if self.masked:
            if self.servers is not None or self.quorum is not None:
                raise ValueError("servers and quorum belong to the other modes; masks take honest and colluders.")
            h = max(1, m - c) if self.honest is None else self.honest
            if not 1 <= h <= m or not 0 <= c <= m - h:
                raise ValueError(f"honest={h}, colluders={c}: must have honest ≥ 1 and honest + colluders ≤ {m}.")
            self._set("honest", h)
            self._set("neighbours", choose_graph(m, c, m - h - c, self.neighbours).neighbours)
        else:
            if self.honest is not None or c != 1 or self.neighbours is not None:
                raise ValueError("honest, colluders, neighbours belong to masks; others take servers and quorum.")
            if self.servers is None:
                self._set("servers", 3 if self.mode == "mpc" else 2)
            if not 2 <= self.server_count <= 16 or (self.mode == "mpc" and self.servers != 3):
                raise ValueError(f"servers={self.servers}: must be between 2 and 16, and exactly 3 for 'mpc'.")
            self._set("quorum", m if self.quorum is None else self.quorum)
            if not 1 <= self.least_parties <= m:
                raise ValueError(f"quorum={self.quorum}: must be between 1 and {m}.")
        require_headroom(
            parties=self.parties, bound=self.bound, step=self.step, noise_support=self.noise_support,
            bits=self.ring,
        )  # fmt: skip

    def _set(self, name: str, value: float | None) -> None:
        object.__setattr__(self, name, value)

    @property
    def masked(self) -> bool:
        return self.mode == "masks"

    @property
    def server_count(self) -> int:
        return 1 if self.masked else int(self.servers or 0)

    @property
    def least_parties(self) -> int:
        """How few parties a sum may have before the noise or the agreement would be broken."""
        return (self.honest or 0) + self.colluders if self.masked else int(self.quorum or 0)

    @property
    def graph(self) -> CommunicationGraph:
        """Masks: mask partners and holders of shares, and the probability that they do not protect."""
        return choose_graph(self.parties, self.colluders, self.parties - self.least_parties, self.neighbours)

    @property
    def threshold(self) -> int:
        """Masks: how many shares of the k + 1 open a secret. 2T > k + 1 + c: no server can open both of one party.

        Each honest holder gives a share of only one of the two secrets of a party, a colluding one of both:
        opening both takes 2T ≤ (k + 1 − c) + 2c shares. In a large graph c is the most that are near one party.
        """
        return self.graph.threshold

    @property
    def tolerated_dropouts(self) -> int:
        """How many parties may be missing from a sum: enough noise and, with masks, enough shares must be left."""
        complete = self.masked and self.graph.complete
        return self.parties - max(self.least_parties, self.threshold if complete else 0)

    @property
    def server_may_deviate(self) -> bool:
        """Masks: whether the noise holds against a server that tells different parties different things.

        Either no party may be missing, or all hold shares of all and T is so large that no combination of lists
        opens a sum of fewer than the planned honest parties (:func:`quietgrad.federation.secure.graph.left_out`).

        >>> [SecureSumConfig("masks", 10, 1, 1.0, 1.0, honest=h).server_may_deviate for h in (9, 8, 7, 5)]
        [True, True, True, False]
        """
        m, x = self.parties, self.parties - self.least_parties
        return x == 0 or (self.graph.complete and left_out(m, self.colluders, x, self.threshold) <= x)

    def encoded(self, vector: npt.ArrayLike) -> Words:
        """One party's vector, clipped to the bound, on the grid."""
        return encode(vector, dimension=self.dimension, bound=self.bound, step=self.step)

    @property
    def words(self) -> npt.DTypeLike:
        """The type of a word on the wire."""
        return word_type(self.ring)

    def released(self, total: AnyWords) -> Vector:
        """The sum as numbers; raises if no vectors within the bound and no noise can give it."""
        numbers = decode(total, self.step)
        check_length(numbers, self.possible_length(self.parties * self.bound))
        return numbers

    def possible_length(self, data: float) -> float:
        """The largest L2 norm that a sum can have, if the data in it have at most ``data``.

        Rounding adds √d grid steps per party; the noise has variance s² = variance_factor·σ², and exceeds
        s(√d + √(2·40·ln 2)) with probability 2⁻⁴⁰ (plus :meth:`slack`): its norm is 1-Lipschitz in d normals.
        """
        d = self.dimension
        noise = self.sigma * math.sqrt(self.variance_factor) if self.sigma > 0.0 else 0.0
        if self.correlated is not None:
            noise *= self.correlated.loudness / self.correlated.factor
        tail = math.sqrt(d) + math.sqrt(2.0 * IMPOSSIBLE_BITS * math.log(2.0))
        return (data + self.parties * math.sqrt(d) * self.step + noise * tail) * (1.0 + 1e-9)

    @property
    def noise_units(self) -> float:
        """σ in grid units, exactly as sampled."""
        if self.mode == "mpc":
            return COARSE_STEP * math.hypot(COARSE_SIGMA, SMOOTHING)
        if self.ring == 32:
            return COARSE_UNITS
        return NOISE_UNITS if self.correlated is None else CORRELATED_UNITS

    @property
    def step(self) -> float:
        """The grid's step: σ / noise_units, or bound / 2^44 for an exact sum."""
        return self.sigma / self.noise_units if self.sigma > 0.0 else self.bound / _EXACT_UNITS

    @property
    def share_sigma(self) -> float:
        """σ, in grid units, of what each of them draws: h masking parties have σ together, each server all of it.

        mpc: two honest servers together smooth the coarse noise: each adds variance (1.75c)²/2.
        """
        if self.mode == "mpc":
            return SMOOTHING * COARSE_STEP / math.sqrt(2.0)
        return self.noise_units / math.sqrt(self.honest or 1)

    @property
    def variance_factor(self) -> float:
        """Variance of the noise in the sum ÷ σ²."""
        if self.mode == "mpc":
            return 1.0 + (self.share_sigma / self.noise_units) ** 2
        return (self.parties if self.masked else self.server_count) / (self.honest or 1)

    @property
    def noise_support(self) -> int:
        """The largest magnitude of all noise together, in grid units."""
        if self.sigma == 0.0:
            return 0
        shares = self.parties if self.masked else self.server_count
        if self.correlated is not None:
            largest = 13.0 * float(np.abs(self.correlated.inverse).sum())  # normals reach 13
            return shares * math.ceil(self.share_sigma * largest + 1.0)
        coarse = COARSE_TOP * COARSE_STEP if self.mode == "mpc" else 0
        return shares * discrete_gaussian(self.share_sigma).support + coarse

    def slack(self) -> float:
        """Total variation of one release from the rounded Gaussian mechanism with this σ, from above.

        Charge it as ``events.TotalVariationSlack`` per release.
        """
        return self.distance() + math.sqrt(self.divergence() / 2.0)

    def divergence(self) -> float:
        """KL of one release's law from that of a rounded Gaussian, where :meth:`distance` leaves it out.

        Divergences of the releases of a run add up, and by Pinsker's inequality the run's distance is √(their
        sum/2): less than the sum of distances. Of a 64-bit ring the distance is counted, which is small enough.
        """
        return self.dimension * divergence(self.noise_units) if self.ring == 32 else 0.0

    def distance(self) -> float:
        """The part of a release's total variation that adds up over releases.

        d coordinates, each within the distance of a discrete from a rounded Gaussian, of the tables from discrete
        Gaussians, and of a sum of shares from one discrete Gaussian; the probability that drawn neighbours do not
        protect a party; and of a dithered sum that its shift is longer than was counted, for three pairs of points.
        """
        if self.sigma == 0.0:
            return 0.0
        graph = GRAPHS_PER_RELEASE * self.graph.failure if self.masked else 0.0
        if self.correlated is not None:
            return self.dimension * self._fractions(self.correlated) + graph
        share, honest = discrete_gaussian(self.share_sigma), self.honest or 1
        if self.mode == "mpc":
            pair = share.sigma * math.sqrt(2.0)
            distance = 2.0 * share.total_variation + smoothing_error(share.sigma, 1, share.sigma)
            distance += smoothing_error(pair, COARSE_STEP, COARSE_SIGMA) + coarse_error()
        else:
            distance = honest * share.total_variation
            # Adding share k + 1 to the sum of k: the narrower of the two smooths.
            distance += sum(smoothing_error(share.sigma, 1, share.sigma * math.sqrt(k)) for k in range(1, honest))
        if self.ring == 32:
            return self.dimension * distance + graph + 6.0 * self.parties * FAILURE
        return self.dimension * (distance + rounded_gaussian_distance(self.noise_units)) + graph

    def _fractions(self, correlated: BufferedToeplitzNoise) -> float:
        """Bound the distance that rounding every share on its own adds, per coordinate and release.

        One honest server rounds once, which is post-processing. Of h honest parties' shares v_j with sum V, the
        rounded ones add up to rint(V − Σ_{j<h} f_j), f_j the fractions: post-processing too if these were uniform
        and independent of V. Given V, the v_j of all rounds are Gaussian with no eigenvalue below
        λ = (σ²/h)/(h·‖S‖²) units², ‖S‖ ≤ Σc, with any parties present, so their fractions' density is within
        2·exp(−2π²λ) of uniform for every one of them, as the Fourier series of a wrapped Gaussian says.
        """
        if not self.masked:
            return 0.0
        spread = self.share_sigma**2 / (self.parties * float(correlated.coefficients().sum()) ** 2)
        return min(1.0, 4.0 * self.parties * math.exp(-2.0 * math.pi**2 * spread))

    def digest(self, run: bytes) -> bytes:
        """SHA-256 of the run and these terms; what every role signs."""
        agreed = {name: value for name, value in asdict(self).items() if (name, value) != ("ring", 64)}
        body = json.dumps(agreed, sort_keys=True, separators=(",", ":")).encode()
        return hashlib.sha256(b"quietgrad terms 1\0" + len(run).to_bytes(4, "big") + run + body).digest()


def coarse_reach(parties: int, honest: int) -> float:
    """The largest bound of one party's vector, in units of σ, that a 32-bit ring of so many parties has room for.

    >>> round(coarse_reach(10, 9), 1)
    200.8
    """
    support = parties * discrete_gaussian(COARSE_UNITS / math.sqrt(honest)).support
    return max(0.0, ((1 << 31) - 1 - support) / parties - 3.0) / COARSE_UNITS


def coarse_error() -> float:
    """Total variation of the table of magnitudes used inside the three-server computation."""
    return 2.0 * math.exp(-((COARSE_TOP / COARSE_SIGMA) ** 2) / 2.0) + 2.0**-COARSE_WORD_BITS


@dataclass(frozen=True)
class ThreatModel:
    """The security of a run of secure sums, as (question, answer) rows."""

    mode: str
    rows: tuple[tuple[str, str], ...]

    def text(self, width: int = 100) -> str:
        column = max(len(question) for question, _ in self.rows)
        lines = []
        for question, answer in self.rows:
            wrapped = textwrap.wrap(answer, max(20, width - column - 2))
            lines += [f"{question if i == 0 else '':<{column}}  {line}" for i, line in enumerate(wrapped)]
        return "\n".join(lines)


def threat_model(terms: SecureSumConfig) -> ThreatModel:
    """Describe the protection of a configuration, its adversaries, and its cost in noise."""
    rows = _masks(terms) if terms.masked else _rows(_SHARES[terms.mode] + _ALL_SHARES, terms)
    if terms.sigma == 0.0:
        rows.insert(1, ("noise", "NONE: the exact sum is released. This run is not differentially private."))
    else:
        rows += _rows(_NOISE, terms, deviation=terms.variance_factor**0.5, slack=terms.slack(),
                      rounding=terms.step * terms.dimension**0.5)  # fmt: skip
    return ThreatModel(terms.mode, tuple(rows + _rows(_ALWAYS, terms)))


def _rows(text: str, t: SecureSumConfig, **words: str | float) -> list[tuple[str, str]]:
    """The rows of a text: each begins a line with its question; further lines of it are indented."""
    rows = [" ".join(row.split()) for row in re.split(r"\n(?! )", text.strip().format(t=t, **words))]
    return [(question, answer) for question, _, answer in (row.partition(" | ") for row in rows)]


_NOISE = """
noise in the sum | variance {t.variance_factor:.4g} times that of a trusted curator (standard deviation
    {deviation:.4g} times); the part that the adversary does not know has variance 1.0 times
discrete noise | total variation {slack:.2g} per release, charged to δ; rounding adds {rounding:.2g} to the L2
    sensitivity
"""
_ALWAYS = """
outsiders | messages are encrypted and authenticated (X25519, Ed25519, AES-256-GCM); an altered, repeated,
    reordered or misdirected message aborts the round and names its sender. Which roles talk, when and how much is
    visible
not covered | a party that sends false data or ignores the clipping bound can falsify the sum (its vector is never
    seen); any role can stop a round; all see the released sums, whose cost is in the ledger
"""
_MASKS = """
setting | one server, {t.parties} parties, pairwise masks; each party adds 1/{t.honest} of the noise variance
server | sees uniformly random vectors and the noisy sum; it {server}
to weaken the noise | more than {t.colluders} of {t.parties} parties pool their noise shares (a party always knows
    its own); up to {t.colluders} of them, with or without the server, still face the full noise of {t.honest}
    honest parties
to see one party's vector | the server and {others} work together{lying}; the vector then still carries the party's
    own share, 1/{t.honest} of the variance
parties that drop | up to {t.tolerated_dropouts} per round may be missing from the sum; once it is sent,
    {t.threshold} of {holders} must stay to open it. With fewer the round is aborted by name and nothing is
    released
false shares | a false share identifies its holder; shares that open nothing identify their dealer; a complaint
    identifies two parties. A sum longer than data and noise can be is not used, and identifies no party
on restart | new keys; no stream or round key is ever used again
"""
_STRICT = "may deviate from the protocol: every party insists on all members, so it can only spoil or stop a sum"
_MAY_DEVIATE = (
    "may deviate: whatever it says to the parties, it opens no sum of fewer than {t.honest} honest parties"
)
_SEMI_HONEST = (
    "must report the same true survivors to all parties (semi-honest); it can never open both masks of a party, "
    "and two different lists are found out in the next round by its own signatures"
)
_NEIGHBOURS = """
neighbours | each party draws {t.graph.neighbours} holders and {t.graph.partners} mask partners by itself and
    signs them; against {t.colluders} parties corrupted beforehand and {dropped} that drop by themselves privacy
    fails with probability {t.graph.failure:.2g} (charged to δ, eight times per release), and a round is lost for
    lack of holders with {t.graph.lost:.2g}
"""
_SHARES = {
    "servers": """
setting | {t.servers} servers, additive shares; each server adds the full noise
servers | all but one of {t.servers} may be malicious and work with any parties: honest data stay under the honest
    server's full noise. A malicious server can falsify or stop a sum
to learn raw data | all {t.servers} servers must work together; then they see every vector""",
    "mpc": """
setting | three servers, noise sampled inside replicated secret sharing; no server knows it
servers | one of three may be curious and work with any parties. It is assumed to FOLLOW the protocol
    (semi-honest): a server that deviates can spoil the noise unnoticed. If that is not acceptable choose servers
    or masks
to learn raw sums | two of the three servers must work together; they then see the sum almost without noise. Single
    vectors take all three""",
}
_ALL_SHARES = """
parties | add no noise and know none; any number of them may be curious
parties that drop | up to {t.tolerated_dropouts} per round before sending; the noise does not depend on them. All
    servers are needed: without one the round is aborted by name
on restart | new keys; no seed, share or noise stream is ever used again
"""


def _masks(terms: SecureSumConfig) -> list[tuple[str, str]]:
    m, graph, strict = terms.parties, terms.graph, terms.least_parties == terms.parties
    server = _STRICT if strict else _MAY_DEVIATE if terms.server_may_deviate else _SEMI_HONEST
    others, lying = f"{min(terms.threshold, m - 1)} other parties", "the server alone"
    if graph.complete:
        holders, lying = f"{m} parties", f"{2 * terms.threshold - m}"
    else:
        holders, others = f"the {graph.neighbours} that she drew", f"{others} among her holders"
    lying = "" if strict else f", or {lying} if {'the server' if graph.complete else 'it'} lies about who dropped"
    rows = _rows(_MASKS, terms, server=server.format(t=terms), others=others, holders=holders, lying=lying)
    if not graph.complete:
        rows[1:1] = _rows(_NEIGHBOURS, terms, dropped=m - terms.least_parties)
    return rows
