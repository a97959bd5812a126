"""Secure sums: cryptography that knows no plan and no loss; it imports `privacy` and nothing else of quietgrad."""
