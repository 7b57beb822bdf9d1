"""What a request may specify: sampling parameters, their checks, and vLLM's names for them."""
