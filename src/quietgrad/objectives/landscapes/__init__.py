"""Landscapes: risks with known saddles, where claims about second-order points can be checked exactly."""
