"""Custom training loops: private batches, loops that own their program, and the recorded loop of Opacus' verbs."""
