"""The ledger: who pays, the hash-chained file that records it, and the keys that protect it."""
