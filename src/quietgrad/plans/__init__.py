"""Plans: what a run will release, decided and priced before any data."""
