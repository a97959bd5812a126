"""Torch modules as objectives: per-example clipped sums at about the price of an ordinary gradient."""
