"""Assurance: audits that attack the claims, certificates that others check, and reports that people read."""
