"""Who must work together to learn what, in words and rows, for the terms of a run."""

from __future__ import annotations

from dataclasses import dataclass

from quietgrad.secure.terms import Terms


@dataclass(frozen=True)
class ThreatModel:
    """The security of a run of secure sums, as (question, answer) rows.

    >>> terms = Terms("servers", parties=5, dimension=123, bound=1.0, sigma=1.0)
    >>> "variance" in threats(terms).text()
    True
    """

    mode: str
    rows: tuple[tuple[str, str], ...]

    def text(self, width: int = 100) -> str:
        """The rows as plain text, wrapped."""
        import textwrap

        column = max(len(question) for question, _ in self.rows)
        lines = []
        for question, answer in self.rows:
            wrapped = textwrap.wrap(answer, max(20, width - column - 2))
            lines.append(f"{question:<{column}}  {wrapped[0]}")
            lines += [f"{'':<{column}}  {line}" for line in wrapped[1:]]
        return "\n".join(lines)


def threats(terms: Terms) -> ThreatModel:
    """Describe what a run with these terms protects, against whom, and at what price.

    >>> threats(Terms("mpc", parties=3, dimension=9, bound=1.0, sigma=1.0)).rows[0]
    ('setting', 'three servers, noise sampled inside replicated secret sharing; nobody knows it')
    """
    rows = {"masks": _masks, "servers": _servers, "mpc": _mpc}[terms.mode](terms)
    if terms.sigma == 0.0:
        rows.insert(1, ("noise", "NONE: the exact sum is released. This run is not differentially private."))
    else:
        rows += [
            (
                "noise in the sum",
                f"variance {terms.variance_factor:.4g} times that of a trusted curator (standard deviation "
                f"{terms.variance_factor**0.5:.4g} times); what the adversary does not know is 1.0 times",
            ),
            (
                "price of integers",
                f"total variation {terms.slack():.2g} per release, charged to δ; rounding adds "
                f"{terms.step * terms.dimension**0.5:.2g} to the L2 sensitivity",
            ),
        ]
    rows += [
        (
            "outsiders",
            "messages are encrypted and authenticated (X25519, Ed25519, AES-256-GCM); an altered, repeated, "
            "reordered or misdirected message aborts the round and names its sender. Who talks to whom, when "
            "and how much is visible",
        ),
        (
            "not covered",
            "a party who lies about her own data or ignores the clipping bound can falsify the sum (her vector "
            "is never seen); anyone can stop a round; everyone sees the released sums, whose cost is in the ledger",
        ),
    ]
    return ThreatModel(terms.mode, tuple(rows))


def _masks(terms: Terms) -> list[tuple[str, str]]:
    m, h, c, graph = terms.parties, terms.honest or 1, terms.colluders, terms.graph
    strict = terms.least_parties == m
    if strict:
        server = (
            "may deviate from the protocol: every party insists on all members, so it can only spoil or stop a sum"
        )
    elif terms.server_may_deviate:
        server = f"may deviate: whatever it tells whom, it opens no sum of fewer than {h} honest parties"
    else:
        server = (
            "must report the same true survivors to everyone (semi-honest); it can never open both masks of a "
            "party, and two different lists are found out in the next round by its own signatures"
        )
    holders = f"{m} parties" if graph.complete else f"the {graph.neighbours} that she drew"
    others = min(terms.threshold, m - 1)
    rows = [
        ("setting", f"one server, {m} parties, pairwise masks; each party adds 1/{h} of the noise variance"),
        ("server", f"sees uniformly random vectors and the noisy sum; it {server}"),
        (
            "to weaken the noise",
            f"more than {c} of {m} parties pool their noise shares (a party always knows her own); up to {c} "
            f"of them, with or without the server, still face the full noise of {h} honest parties",
        ),
        (
            "to see one party's vector",
            f"the server and {others} other parties{'' if graph.complete else ' among her holders'} work together"
            + ("" if strict else _by_lying(terms))
            + f"; the vector then still carries the party's own share, 1/{h} of the variance",
        ),
        (
            "parties that drop",
            f"up to {terms.tolerated_dropouts} per round may be missing from the sum; once it is sent, "
            f"{terms.threshold} of {holders} must stay to open it. With fewer the round is aborted by name and "
            "nothing is released",
        ),
        (
            "who lied",
            "a false share names its holder, shares that open nothing their dealer; a complaint names two; a sum "
            "longer than data and noise can be names nobody and is not used",
        ),
        ("on restart", "new keys; no stream or round key is ever used again"),
    ]
    if not graph.complete:
        drawn = (
            f"each party draws {graph.neighbours} holders and {graph.partners} mask partners by herself and signs "
            f"them; against {c} parties corrupted beforehand and {m - terms.least_parties} that drop by themselves "
            f"privacy fails with probability {graph.failure:.2g} (charged to δ, eight times per release), and a "
            f"round is lost for lack of holders with {graph.lost:.2g}"
        )
        rows.insert(1, ("neighbours", drawn))
    return rows


def _by_lying(terms: Terms) -> str:
    if terms.graph.complete:
        return f", or {2 * terms.threshold - terms.parties} if the server lies about who dropped"
    return ", or nobody but the server if it lies about who dropped"


def _servers(terms: Terms) -> list[tuple[str, str]]:
    k = terms.server_count
    return [
        ("setting", f"{k} servers, additive shares; each server adds the full noise"),
        (
            "servers",
            f"any {k - 1} of {k} may be malicious and work with any parties: honest data stay under the honest "
            "server's full noise. A malicious server can falsify or stop a sum",
        ),
        ("to learn raw data", f"all {k} servers must work together; then they see every vector"),
        ("parties", "add no noise and know none; any number of them may be curious"),
        (
            "parties that drop",
            f"up to {terms.tolerated_dropouts} per round before sending; the noise does not depend on "
            "them. All servers are needed: without one the round is aborted by name",
        ),
        ("on restart", "new keys; no seed or noise stream is ever used again"),
    ]


def _mpc(terms: Terms) -> list[tuple[str, str]]:
    return [
        ("setting", "three servers, noise sampled inside replicated secret sharing; nobody knows it"),
        (
            "servers",
            "one of three may be curious and work with any parties. It is assumed to FOLLOW the protocol "
            "(semi-honest): a server that deviates can spoil the noise unnoticed. If that is not acceptable "
            "choose servers or masks",
        ),
        (
            "to learn raw sums",
            "two of the three servers must work together; they then see the sum almost without noise. Single "
            "vectors take all three",
        ),
        ("parties", "add no noise and know none; any number of them may be curious"),
        (
            "parties that drop",
            f"up to {terms.tolerated_dropouts} per round before sending; the noise does not depend on "
            "them. All three servers are needed: without one the round is aborted by name",
        ),
        ("on restart", "new keys; no share or noise stream is ever used again"),
    ]
