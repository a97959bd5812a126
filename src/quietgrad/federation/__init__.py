"""Many parties: plans they agree on, rounds, transports, and runs in one process or between institutions.

The secure sums themselves are in :mod:`quietgrad.secure`; its public names are found here too.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quietgrad.federation.dealing import deal
    from quietgrad.federation.parties import Party
    from quietgrad.federation.plan import FederatedPlan, Shape
    from quietgrad.federation.planning import federate
    from quietgrad.federation.simulation import simulate
    from quietgrad.secure.channel import View
    from quietgrad.secure.encoding import sensitivity_growth
    from quietgrad.secure.faults import DropoutError, ProtocolError
    from quietgrad.secure.identity import Identity, Roster
    from quietgrad.secure.masking import MaskingParty
    from quietgrad.secure.masking_server import MaskingServer
    from quietgrad.secure.mpc import NoiseServer
    from quietgrad.secure.servers import SharingParty, SumServer
    from quietgrad.secure.sums import SecureSession, secure_sum
    from quietgrad.secure.terms import Terms, slack
    from quietgrad.secure.threat_model import ThreatModel, threats

# Where each public name lives; imported when first used.
_HOMES = {
    "simulate": "federation.simulation",
    "Party": "federation.parties",
    "deal": "federation.dealing",
    "federate": "federation.planning",
    "FederatedPlan": "federation.plan",
    "Shape": "federation.plan",
    "secure_sum": "secure.sums",
    "SecureSession": "secure.sums",
    "Terms": "secure.terms",
    "slack": "secure.terms",
    "sensitivity_growth": "secure.encoding",
    "Identity": "secure.identity",
    "Roster": "secure.identity",
    "MaskingParty": "secure.masking",
    "MaskingServer": "secure.masking_server",
    "SharingParty": "secure.servers",
    "SumServer": "secure.servers",
    "NoiseServer": "secure.mpc",
    "View": "secure.channel",
    "ProtocolError": "secure.faults",
    "DropoutError": "secure.faults",
    "ThreatModel": "secure.threat_model",
    "threats": "secure.threat_model",
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
