"""What keeps graphs honest: addresses, stale outputs, verification against eager."""
