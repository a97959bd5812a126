"""Many parties: plans they agree on, rounds, transports, and runs in one process or between institutions.

The secure sums themselves are in :mod:`quietgrad.federation.secure`; its public names are found here too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quietgrad.core.exports import lazy_names

if TYPE_CHECKING:
    from quietgrad.federation.clients import Clients
    from quietgrad.federation.plan import FederatedPlan, Shape
    from quietgrad.federation.planning import Party, deal, federate
    from quietgrad.federation.secure.channel import TranscriptRecorder
    from quietgrad.federation.secure.discrete_gaussian import sensitivity_growth
    from quietgrad.federation.secure.identity import DropoutError, Identity, ProtocolError, Roster
    from quietgrad.federation.secure.local_session import SecureSession, secure_sum
    from quietgrad.federation.secure.masking import MaskingParty, MaskingServer
    from quietgrad.federation.secure.servers import NoiseServer, SharingParty, SumServer
    from quietgrad.federation.secure.terms import SecureSumConfig, ThreatModel, threat_model
    from quietgrad.federation.simulation import simulate

__all__ = [
    "simulate", "Party", "Clients", "deal", "federate", "FederatedPlan", "Shape", "secure_sum", "SecureSession",
    "SecureSumConfig", "ThreatModel", "threat_model", "sensitivity_growth", "Identity", "Roster",
    "ProtocolError", "DropoutError", "MaskingParty", "MaskingServer", "SharingParty", "SumServer", "NoiseServer",
    "TranscriptRecorder",
]  # fmt: skip


__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "federation.simulation": "simulate",
        "federation.clients": "Clients",
        "federation.planning": "Party deal federate",
        "federation.plan": "FederatedPlan Shape",
        "federation.secure.local_session": "secure_sum SecureSession",
        "federation.secure.terms": "SecureSumConfig ThreatModel threat_model",
        "federation.secure.discrete_gaussian": "sensitivity_growth",
        "federation.secure.identity": "Identity Roster ProtocolError DropoutError",
        "federation.secure.masking": "MaskingParty MaskingServer",
        "federation.secure.servers": "SharingParty SumServer NoiseServer",
        "federation.secure.channel": "TranscriptRecorder",
    },
)
