"""Oracles: how releases become an estimate of the gradient of the data term."""
