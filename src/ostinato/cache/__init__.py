"""The paged KV cache: which request owns which page, what a page holds, and the memory itself."""
