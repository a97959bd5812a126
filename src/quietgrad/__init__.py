"""quietgrad: differentially private optimisation that proves what privacy it spent."""
