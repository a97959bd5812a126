"""Accounting: budgets, the events that releases are, and the accountants that prove their ε."""
