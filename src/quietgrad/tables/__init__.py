"""Linear models of tables: one declaration per loss, compiled sums, private moments."""
