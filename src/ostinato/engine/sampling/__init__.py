"""The next token of each request, by what it asks for, and log-probabilities."""
