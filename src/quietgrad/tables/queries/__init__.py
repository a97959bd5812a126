"""Queries: what one record contributes to a release, and how much of it at most."""
