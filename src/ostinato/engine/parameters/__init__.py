"""What a request may ask for: sampling parameters, their checks, and the names that the peers have for it."""
