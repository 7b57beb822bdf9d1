"""Which graphs exist, and which one serves a batch."""
