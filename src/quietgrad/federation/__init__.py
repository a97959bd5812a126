"""Many parties: secure sums with noise that nobody knows.

The protocols are written as roles that take and give frames of bytes, so they run over any transport: ``masking``
(one server, pairwise masks), ``servers`` (K servers, additive shares), ``mpc`` (three servers that sample the
noise together). ``secure`` runs all roles of one of them in one process. What people call to train (in one
process, or as real members of a consortium) lives in :mod:`quietgrad.consortium`; `simulate` and `deal` are found
here too.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quietgrad.consortium.dealing import deal
    from quietgrad.consortium.simulation import simulate
    from quietgrad.federation.channel import View
    from quietgrad.federation.encoding import sensitivity_growth
    from quietgrad.federation.faults import DropoutError, ProtocolError
    from quietgrad.federation.identity import Identity, Roster
    from quietgrad.federation.masking import MaskingParty
    from quietgrad.federation.masking_server import MaskingServer
    from quietgrad.federation.mpc import NoiseServer
    from quietgrad.federation.parties import Party
    from quietgrad.federation.plan import FederatedPlan, Shape
    from quietgrad.federation.planning import federate
    from quietgrad.federation.secure import SecureSession, secure_sum
    from quietgrad.federation.servers import SharingParty, SumServer
    from quietgrad.federation.terms import Terms, slack
    from quietgrad.federation.threat_model import ThreatModel, threats

# Where each public name lives, here or in the room above that drives this one; imported when first used.
_HOMES = {
    "simulate": "quietgrad.consortium.simulation",
    "Party": "parties",
    "deal": "quietgrad.consortium.dealing",
    "federate": "planning",
    "FederatedPlan": "plan",
    "Shape": "plan",
    "secure_sum": "secure",
    "SecureSession": "secure",
    "Terms": "terms",
    "slack": "terms",
    "sensitivity_growth": "encoding",
    "Identity": "identity",
    "Roster": "identity",
    "MaskingParty": "masking",
    "MaskingServer": "masking_server",
    "SharingParty": "servers",
    "SumServer": "servers",
    "NoiseServer": "mpc",
    "View": "channel",
    "ProtocolError": "faults",
    "DropoutError": "faults",
    "ThreatModel": "threat_model",
    "threats": "threat_model",
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
    home = _HOMES[name]
    return getattr(import_module(home if "." in home else f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return __all__
