"""Options of vLLM and SGLang under their own names, and what becomes of each here."""
