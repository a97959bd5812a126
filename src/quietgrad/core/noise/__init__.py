"""Noise: the random source, the compiled samplers, and the mechanisms that add noise to a sum."""
