"""Models, losses and data of the brute-force tables: what people write, and what was written to break a bound."""
