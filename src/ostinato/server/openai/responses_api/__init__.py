"""`/v1/responses`: items in, items out; underneath it is a chat."""
