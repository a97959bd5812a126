"""The errors and warnings of quietgrad; they are declared in :mod:`quietgrad.core.errors`."""

from quietgrad.core.errors import (
    BudgetError,
    ChangedError,
    ClusterError,
    DataError,
    DeclaredWarning,
    DeltaWarning,
    ExhaustedError,
    LedgerError,
    LedgerWarning,
    QuietgradError,
    TooNoisyError,
    TooNoisyWarning,
    UnprovableError,
)

__all__ = [
    "BudgetError",
    "ChangedError",
    "ClusterError",
    "DataError",
    "DeclaredWarning",
    "DeltaWarning",
    "ExhaustedError",
    "LedgerError",
    "LedgerWarning",
    "QuietgradError",
    "TooNoisyError",
    "TooNoisyWarning",
    "UnprovableError",
]
