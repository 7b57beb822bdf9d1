"""The OpenAI API: request and response bodies, and the way from the one to the other."""
