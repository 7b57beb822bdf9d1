"""The paged KV cache: who owns which page, what a page holds, and the memory itself."""
