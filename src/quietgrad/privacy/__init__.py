"""Privacy: budgets, events, accountants, calibration, the ledger, noise and its random source."""
