"""Many parties: plans they agree on, rounds, transports, and runs in one process or between institutions.

The secure sums themselves are in :mod:`quietgrad.secure`; its public names are found here too.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quietgrad.federation.parties import Party, deal
    from quietgrad.federation.plan import FederatedPlan, Shape
    from quietgrad.federation.planning import federate
    from quietgrad.federation.simulation import simulate
    from quietgrad.secure.channel import View
    from quietgrad.secure.discrete_gaussian import sensitivity_growth
    from quietgrad.secure.identity import DropoutError, Identity, ProtocolError, Roster
    from quietgrad.secure.local_session import SecureSession, secure_sum
    from quietgrad.secure.masking import MaskingParty, MaskingServer
    from quietgrad.secure.servers import SharingParty, SumServer
    from quietgrad.secure.terms import Terms, ThreatModel, slack, threats
    from quietgrad.secure.three_party import NoiseServer

# Where each public name lives; imported when first used.
_HOMES = {
    "simulate": "federation.simulation",
    "Party": "federation.parties",
    "deal": "federation.parties",
    "federate": "federation.planning",
    "FederatedPlan": "federation.plan",
    "Shape": "federation.plan",
    "secure_sum": "secure.local_session",
    "SecureSession": "secure.local_session",
    "Terms": "secure.terms",
    "slack": "secure.terms",
    "sensitivity_growth": "secure.discrete_gaussian",
    "Identity": "secure.identity",
    "Roster": "secure.identity",
    "MaskingParty": "secure.masking",
    "MaskingServer": "secure.masking",
    "SharingParty": "secure.servers",
    "SumServer": "secure.servers",
    "NoiseServer": "secure.three_party",
    "View": "secure.channel",
    "ProtocolError": "secure.identity",
    "DropoutError": "secure.identity",
    "ThreatModel": "secure.terms",
    "threats": "secure.terms",
}

__all__ = [
    "simulate",
    "Party",
    "deal",
    "federate",
    "FederatedPlan",
    "Shape",
    "secure_sum",
    "SecureSession",
    "Terms",
    "slack",
    "sensitivity_growth",
    "Identity",
    "Roster",
    "MaskingParty",
    "MaskingServer",
    "SharingParty",
    "SumServer",
    "NoiseServer",
    "View",
    "ProtocolError",
    "DropoutError",
    "ThreatModel",
    "threats",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"quietgrad.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
