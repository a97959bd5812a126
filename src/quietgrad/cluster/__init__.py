"""Work on a cluster: pieces of a table are summed where they lie, and only sums come back.

Nothing here knows losses, noise or budgets. The session that asked adds the noise, once, to the sum it is given.
"""
