"""Neighbours of large masked sums: probabilities are right, sums exact, and the attacks that remain are known."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import combinations, product

import numpy as np
import pytest

from quietgrad.federation import (
    DropoutError,
    MaskingParty,
    MaskingServer,
    ProtocolError,
    SecureSession,
    SecureSumConfig,
)
from quietgrad.federation.secure.channel import FrameType
from quietgrad.federation.secure.graph import (
    CommunicationGraph,
    choose_graph,
    left_out,
    log2_cut,
    log2_tail,
    masking_neighbours,
)
from quietgrad.federation.secure.identity import SurvivorAttestation, pack_members, write_hello
from tests.federation.test_secure_faults import Masked

M = 80


def large(dropouts: int = 8) -> Masked:
    """Eighty parties with drawn neighbours, driven message by message."""
    return Masked(honest=M - 1 - dropouts, parties=M)


# --- the numbers ------------------------------------------------------------------------------------------------


def test_the_bound_on_a_cut_holds_in_drawn_graphs() -> None:
    """Nine parties of whom three are gone draw two partners: cuts are frequent and must not exceed the bound.

    4000 graphs: the rate may be above its bound by 5 standard errors at a false alarm of 3e-7.
    """
    graph = CommunicationGraph(9, neighbours=2, partners=2, near=0, threshold=2, failure=0.0, lost=0.0)
    left, cut, runs = set(range(6)), 0, 4000
    for _ in range(runs):
        near = masking_neighbours(graph, {i: graph.draw(i) for i in range(9)})
        seen, todo = {0}, [0]
        while todo:
            found = (set(near[todo.pop()].partners) & left) - seen
            seen |= found
            todo += found
        cut += seen != left
    bound = 2.0 ** log2_cut(9, 3, 2)
    assert 0.01 < cut / runs < bound + 5.0 * math.sqrt(bound / runs)


@pytest.mark.parametrize(("m", "c", "x"), [(80, 1, 8), (300, 15, 30), (1000, 1, 200), (1000, 50, 100)])
def test_chosen_graphs_keep_their_bounds_also_when_fewer_drop(m: int, c: int, x: int) -> None:
    graph = choose_graph(m, c, x)
    assert not graph.complete
    assert graph.failure < 2.0**-40
    assert graph.lost < 2.0**-20
    assert 2 * graph.threshold > graph.neighbours + 1 + graph.near
    for removed in {0, 1, c, c + x // 4, c + x // 2, c + x - 1}:
        assert log2_cut(m, removed, graph.partners) <= -41
    for fewer in range(c):
        assert math.log2(m) + log2_tail(m - 1, fewer, graph.neighbours, graph.near) <= -41


def test_the_failure_of_a_drawing_is_charged_to_delta() -> None:
    drawn = SecureSumConfig("masks", 1000, 1, bound=1.0, sigma=1.0, honest=899)
    everybody = SecureSumConfig("masks", 1000, 1, bound=1.0, sigma=1.0, honest=899, neighbours=999)
    assert drawn.slack() - everybody.slack() == pytest.approx(8.0 * drawn.graph.failure, rel=1e-6)


def test_too_few_neighbours_are_refused() -> None:
    with pytest.raises(ValueError, match="neighbours=10: too few for 1000 parties"):
        SecureSumConfig("masks", 1000, 1, bound=1.0, sigma=1.0, honest=899, neighbours=10)


Told = tuple[frozenset[int], frozenset[int]]  # the members and the survivors that one party was shown


def fewest(told: Sequence[Told], m: int, c: int, threshold: int) -> int:
    """The fewest honest parties in a sum that these lists open; the honest are 0 … m − c − 1.

    A secret opens with T − c honest shares, each of which is of the one or the other secret; those in a sum have
    the same list of members, and the keys of all other honest members must be open.
    """
    honest = range(m - c)
    keys = [sum(j in members and j not in alive for members, alive in told) for j in honest]
    selves = [sum(j in alive for _, alive in told) for j in honest]
    found = m
    for members in {members for members, _ in told}:
        inside = [j for j in members if j < m - c and keys[j] < threshold - c]
        if inside and all(told[j][0] == members and selves[j] >= threshold - c for j in inside):
            found = min(found, len(inside))
    return found


def all_lists(i: int, m: int, x: int) -> list[Told]:
    others, everyone = [j for j in range(m) if j != i], frozenset(range(m))
    return [
        (everyone - {*gone}, everyone - {*gone} - {*dropped})
        for e in range(x + 1)
        for gone in combinations(others, e)
        for f in range(x - e + 1)
        for dropped in combinations([j for j in others if j not in gone], f)
    ]


def test_a_lying_server_cannot_leave_out_more_than_computed() -> None:
    """All lists that five parties can be shown, one of them corrupted and one allowed to drop: 6561 ways."""
    m, c, x = 5, 1, 1
    threshold = choose_graph(m, c, x).threshold
    ways = product(*(all_lists(i, m, x) for i in range(m - c)))
    assert min(fewest(told, m, c, threshold) for told in ways) == m - c - x == m - c - left_out(m, c, x, threshold)


def test_a_lying_server_is_withstood_where_the_documentation_says_so() -> None:
    for m in range(3, 65):
        for c in (1, 2):
            for x in range(1, m - c):
                terms = SecureSumConfig("masks", m, 1, bound=1.0, sigma=0.0, honest=m - c - x, colluders=c)
                assert terms.server_may_deviate == ((x + 1) ** 2 <= m - c)


# --- sums -------------------------------------------------------------------------------------------------------


def test_sums_are_exact_whoever_drops() -> None:
    world = large()
    assert not world.terms.graph.complete
    world.run(0)
    world.run(1, {3, 4}, {10, 11, 12}, {20, 21})
    world.run(2)


def test_noise_of_a_sum_with_dropouts_is_what_the_terms_say() -> None:
    """72 shares of 1/71 are left of 80: variance 72/71 of σ² (d = 30 000, false alarm 1e-6)."""
    d, m, gone = 30_000, M, 8
    terms = SecureSumConfig("masks", m, d, bound=1.0, sigma=1.0, honest=m - 1 - gone)
    noise = SecureSession(terms, seed=5).sum([None if i < gone else np.zeros(d) for i in range(m)])
    assert abs(float((noise**2).mean()) / ((m - gone) / (m - 1 - gone)) - 1) < 4.9 * math.sqrt(2.0 / d)
    with pytest.raises(DropoutError, match="71 of 80 submitted, 72 needed"):
        SecureSession(terms).sum([None if i <= gone else np.zeros(d) for i in range(m)])


# --- attacks ----------------------------------------------------------------------------------------------------


def test_nobody_else_chooses_a_partys_neighbours() -> None:
    """Picks are signed: a relay that changes one breaks the hello, and impossible ones are refused by name."""
    world = large()
    party, server = world.parties[0], world.server
    altered = bytearray(party.hello)
    altered[-65] ^= 1
    fresh = MaskingServer(server._identity, server.roster, world.terms, b"r")
    with pytest.raises(ProtocolError):
        fresh.meet([bytes(altered)])
    for picks in (party.picks[:-1], (0, *party.picks[1:])):  # too few, and herself
        hello = write_hello(party._identity, server.roster, fresh.context, os.urandom(32), picks)
        with pytest.raises(ProtocolError, match="clinic-0: hello names impossible neighbours"):
            fresh.meet([hello])


def test_a_server_that_withholds_a_neighbours_hello_is_refused() -> None:
    """Else it could leave a party with partners of its own choice."""
    world = large()
    victim = world.parties[0]
    again = MaskingParty(victim._identity, victim.roster, world.terms, b"run")
    server = MaskingServer(world.server._identity, victim.roster, world.terms, b"run")
    others = [MaskingParty(p._identity, victim.roster, world.terms, b"run") for p in world.parties if p.me]
    server.meet([again.hello, *(p.hello for p in others)])
    hidden = again.picks[0]
    near = server.introductions()[0]
    again.meet([hello for hello in near if hello != server._hellos[hidden]])
    again.prepare(0)
    head = pack_members(tuple(range(M)), M)
    with pytest.raises(ProtocolError, match="server: names a neighbour as a member and did not pass her hello on"):
        again.deliver(0, server._seal(0, FrameType.DELIVER, 0, head))


def test_two_lists_of_survivors_convict_the_server_in_the_next_round() -> None:
    """What a lying server gains here is in the threat model; any two honest neighbours find it out."""
    world = large()
    world.server.survivors(0, world.submitted(0))
    everybody, fewer = tuple(range(M)), tuple(range(M - 8))
    for i, party in enumerate(world.parties):
        party.reveal(0, world.question(i, 0, fewer if i < M // 2 else everybody))
    with pytest.raises(ProtocolError, match=r"server: signed two lists of survivors of round 0, one for us"):
        world.submitted(1)


def test_a_neighbour_who_invents_a_second_list_convicts_herself() -> None:
    world = large()
    world.run(0)
    liar = world.parties[7]
    liar.witness = SurvivorAttestation.of(liar.context, 0, pack_members(tuple(range(9)), M), bytes(64))
    delivery = world.server.relay(1, {party.me: party.prepare(1) for party in world.parties})
    near = [i for i, party in enumerate(world.parties) if 7 in party._near.source]
    assert near
    for i, party in enumerate(world.parties):
        if i in near:
            with pytest.raises(ProtocolError, match="clinic-7: shows survivors of round 0 that the server never"):
                party.deliver(1, delivery[i])
        elif party is not liar:  # what her own client says is nobody's finding
            party.deliver(1, delivery[i])


def test_both_secrets_of_one_party_are_never_opened() -> None:
    """The server tells one half that clinic-0 dropped and the other half that she did not: neither opens."""
    world = large()
    world.server.survivors(0, world.submitted(0))
    holders = sorted(world.parties[0].picks)
    everybody = tuple(range(M))
    without = tuple(i for i in everybody if i != 0)
    state = world.server._round(0)
    answers: dict[int, bytes] = {}
    for k, i in enumerate(holders):
        answers[i] = world.parties[i].reveal(0, world.question(i, 0, without if k % 2 else everybody))
    found = {"self": 0, "key": 0}
    for i, frame in answers.items():
        payload = world.server._open(i, FrameType.REVEAL, 0, frame)
        dealers = sorted([i, *world.server._near[i].dealers])
        share = payload[33 * dealers.index(0) : 33 * dealers.index(0) + 33]
        rank = world.terms.graph.rank(0, i, world.parties[0].picks)
        for kind in ("self", "key"):
            found[kind] += state.statements[0].has(rank, kind=kind.encode(), share=share)
    assert sum(found.values()) == len(holders)  # each gave one of the two
    assert min(found.values()) + world.terms.graph.near < world.terms.threshold
