"""The communication graph of masked sums: complete for few parties, about log m neighbours for many.

In a large masked sum every party draws k neighbours by herself, from her own randomness, and signs them in her
hello (Bell, Bonawitz, Gascón, Lepoint and Raykova 2020, their protocol for a server that deviates). All k hold
shares of her two secrets; with the first l she also exchanges pairwise masks, and with those who drew her among
their first l. No other role influences what an honest party draws, so for any c parties that were corrupted
before, and any x that drop for reasons of their own, the numbers below are exact hypergeometric probabilities
or union bounds over them:

* **shares**: some party has more than ``near`` of the c among her k holders: ≤ m·P(Hyp(m − 1, c, k) > near) ≤ 2⁻⁴¹.
  Otherwise 2t > k + 1 + near shares are never had of both secrets of one party, whatever the server says.
* **cut**: the honest parties who stay are not connected by masks, so that a partial sum is opened. For the sets
  A of a of them without an edge to the n − a others, n = m − c − x, Σ_a C(n, a)·[C(a − 1 + c + x, l)/C(m − 1,
  l)]^a·[C(m − 1 − a, l)/C(m − 1, l)]^(n−a) ≤ 2⁻⁴¹.
* **lost**: of some party fewer than t holders stay: ≤ m·P(Hyp(m − 1, x, k) > k − t) ≤ 2⁻²⁰, with x at least
  m/20 here, for those who leave after the sum is sent. Only the round is lost.

The first two are about privacy: their sum is charged to δ, for every release
(:meth:`quietgrad.federation.secure.terms.SecureSumConfig.slack`).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

PRIVACY_BITS = 41  # of either event about privacy
LOSS_BITS = 20
ALWAYS_COMPLETE = 64  # up to here the graph is complete unless fewer are asked for
GRAPHS_PER_RELEASE = 8
"""How often a party draws neighbours for one release at most; δ pays for all of them."""


@dataclass(frozen=True)
class CommunicationGraph:
    """The sizes of the parties' neighbourhoods, and what can go wrong with which probability.

    >>> graph = choose_graph(parties=1000, colluders=50, dropouts=100)
    >>> graph.neighbours, graph.partners, graph.near, graph.threshold
    (78, 13, 24, 52)
    >>> graph.failure < 2**-40, graph.lost < 2**-20
    (True, True)
    >>> choose_graph(parties=20, colluders=1, dropouts=4).complete
    True
    """

    parties: int
    neighbours: int
    partners: int
    near: int
    threshold: int
    failure: float
    lost: float

    @property
    def complete(self) -> bool:
        """Whether all are neighbours of all; nothing is then left to chance."""
        return self.neighbours == self.parties - 1

    def draw(self, me: int) -> tuple[int, ...]:
        """Draw a party's own neighbours, uniform and in random order. A complete graph needs none: all are."""
        if self.complete:
            return ()
        others = [j for j in range(self.parties) if j != me]
        return tuple(secrets.SystemRandom().sample(others, self.neighbours))

    def is_drawn(self, me: int, picks: tuple[int, ...]) -> bool:
        """Whether ``picks`` is what :meth:`draw` can give."""
        if self.complete:
            return not picks
        good = len(picks) == len(set(picks)) == self.neighbours
        return good and me not in picks and all(j < self.parties for j in picks)

    def rank(self, dealer: int, holder: int, picks: tuple[int, ...]) -> int:
        """Which of the k + 1 shares of ``dealer`` is ``holder``'s: 0 is her own."""
        if dealer == holder:
            return 0
        if self.complete:
            return holder + 1 if holder < dealer else holder
        return picks.index(holder) + 1


@dataclass(frozen=True)
class MaskingNeighbours:
    """One party's neighbours who said hello: who holds her shares, whose she holds, and her mask partners."""

    holders: tuple[int, ...]
    dealers: tuple[int, ...]
    partners: tuple[int, ...]

    @property
    def to(self) -> tuple[int, ...]:
        """Parties to which she sends envelopes."""
        return tuple(sorted({*self.holders, *self.partners}))

    @property
    def source(self) -> tuple[int, ...]:
        """Parties that send envelopes to her."""
        return tuple(sorted({*self.dealers, *self.partners}))


def masking_neighbours(
    graph: CommunicationGraph, picks: Mapping[int, tuple[int, ...]]
) -> dict[int, MaskingNeighbours]:
    """Return the neighbourhoods of parties with known ``picks``, right where all neighbours of one are known.

    >>> graph = CommunicationGraph(4, neighbours=2, partners=1, near=0, threshold=2, failure=0.0, lost=0.0)
    >>> masking_neighbours(graph, {0: (1, 2), 1: (3, 0), 2: (1, 0), 3: (0, 2)})[1]
    MaskingNeighbours(holders=(0, 3), dealers=(0, 2), partners=(0, 2, 3))
    """
    if graph.complete:
        others = {i: tuple(j for j in sorted(picks) if j != i) for i in picks}
        return {i: MaskingNeighbours(rest, rest, rest) for i, rest in others.items()}
    holders, dealers, partners = ({i: set[int]() for i in picks} for _ in range(3))
    for i, chosen in picks.items():
        for rank, j in enumerate(chosen):
            if j in picks:
                holders[i].add(j)
                dealers[j].add(i)
                if rank < graph.partners:
                    partners[i].add(j)
                    partners[j].add(i)
    kinds = holders, dealers, partners
    return {i: MaskingNeighbours(*(tuple(sorted(each[i])) for each in kinds)) for i in picks}


@lru_cache(maxsize=256)
def choose_graph(parties: int, colluders: int, dropouts: int, neighbours: int | None = None) -> CommunicationGraph:
    """Choose the smallest neighbourhoods that keep the bounds; all parties if they are few.

    A given number of ``neighbours`` is refused when the bounds are not kept.
    """
    if neighbours is not None and neighbours != parties - 1:
        graph = _sparse(parties, colluders, dropouts, neighbours) if 1 <= neighbours < parties else None
        if graph is None:
            raise ValueError(
                f"neighbours={neighbours}: too few for {parties} parties of which {colluders} collude and "
                f"{dropouts} drop; leave it out, or take all: {parties - 1}."
            )
        return graph
    if neighbours is None and parties > ALWAYS_COMPLETE:
        for k in range(2, (parties - 1) // 2 + 1):
            if (graph := _sparse(parties, colluders, dropouts, k)) is not None:
                return graph
    threshold, others = _threshold(parties, colluders, dropouts), parties - 1
    return CommunicationGraph(parties, others, others, colluders, threshold, failure=0.0, lost=0.0)


def _sparse(m: int, c: int, x: int, k: int) -> CommunicationGraph | None:
    some = math.log2(m)  # a union bound over the parties
    near = next(j for j in range(k + 1) if some + log2_tail(m - 1, c, k, j) <= -PRIVACY_BITS)
    threshold = (k + 1 + near) // 2 + 1
    gone = max(x, math.ceil(m / 20))
    if threshold > k or (lost := some + log2_tail(m - 1, gone, k, k - threshold)) > -LOSS_BITS:
        return None
    for partners in range(1, k + 1):
        if (cut := log2_cut(m, c + x, partners)) <= -PRIVACY_BITS:
            failure = 2.0 ** (some + log2_tail(m - 1, c, k, near)) + 2.0**cut
            return CommunicationGraph(m, k, partners, near, threshold, failure, lost=2.0**lost)
    return None


def log2_tail(population: int, marked: int, drawn: int, above: int) -> float:
    """log₂ P(more than ``above`` of ``drawn`` are marked), drawn without replacement."""
    rest, least = population - marked, max(above + 1, drawn - (population - marked))
    terms = [_log2_choose(marked, j) + _log2_choose(rest, drawn - j) for j in range(least, min(marked, drawn) + 1)]
    return _log2_sum([term - _log2_choose(population, drawn) for term in terms])


def log2_cut(parties: int, removed: int, partners: int) -> float:
    """log₂ of the union bound on a cut among those who are left (see the module's docstring)."""
    left, all_picks, terms = parties - removed, _log2_choose(parties - 1, partners), []
    for a in range(max(1, partners + 1 - removed), left // 2 + 1):
        inside = _log2_choose(a - 1 + removed, partners) - all_picks
        outside = _log2_choose(parties - 1 - a, partners) - all_picks
        terms.append(_log2_choose(left, a) + a * inside + (left - a) * outside)
    return _log2_sum(terms)


def left_out(parties: int, colluders: int, dropouts: int, threshold: int) -> int:
    """The most honest parties that a lying server with c accomplices can leave out of a sum in a complete graph.

    It may show each party another list. A party in the sum shares one list of members with all others in it, which
    leaves out e; of each of the D further ones it must open the round key, which takes T − c honest shares. An
    honest party gives at most x − e such shares, and x if she has another list of members, which at most e + D
    have:

        D·(T − c) ≤ (m − c − b)(x − e) + b·x,    b ≤ e + D.

    The largest e + D that satisfies this is returned; it is x if T is large enough.

    >>> left_out(5, 1, 1, threshold=4), left_out(10, 1, 2, threshold=6), left_out(10, 1, 2, threshold=8)
    (1, 3, 2)
    """
    most = dropouts
    for e in range(dropouts + 1):
        room = threshold - colluders - e
        if room <= 0:
            return parties - colluders
        most = max(most, e + ((parties - colluders) * (dropouts - e) + e * e) // room)
    return min(most, parties - colluders)


def _threshold(m: int, c: int, x: int) -> int:
    """2T > m + c: no role can open both secrets of one party; more if a liar can then leave out no more than x.

    T ≤ m − x, so that the x who may drop can be done without.
    """
    least = (m + c) // 2 + 1
    return next((t for t in range(least, m - x + 1) if left_out(m, c, x, t) <= x), least)


def _log2_choose(n: int, k: int) -> float:
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2.0)


def _log2_sum(terms: list[float]) -> float:
    if not terms:
        return -math.inf
    top = max(terms)
    # 1e-6: lgamma is exact to 1e-15 of numbers below 1e5 here, so the bound stays one.
    return top + math.log2(math.fsum(2.0 ** (term - top) for term in terms)) + 1e-6
