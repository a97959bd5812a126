"""Plans: what a run will release, decided and accounted before any data."""
