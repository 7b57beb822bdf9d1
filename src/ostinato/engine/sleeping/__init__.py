"""Sleep: what an engine can do while its memory is released."""
