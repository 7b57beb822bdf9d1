"""The next token of each request, by its sampling parameters, and log-probabilities."""
