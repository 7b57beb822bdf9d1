"""vLLM's and SGLang's options under their own names, and what Ostinato does with each."""
