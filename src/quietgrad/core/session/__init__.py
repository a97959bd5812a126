"""Sessions: the queries, the curator that pays for a plan, and the session that answers its releases."""
