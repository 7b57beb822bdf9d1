"""Which graphs there are, and which one serves a batch."""
