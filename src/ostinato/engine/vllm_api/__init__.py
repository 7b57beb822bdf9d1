"""What scripts written for vLLM expect around `LLM` and `AsyncLLM`.

`module_paths` is the table of vLLM's module paths; the other files implement what it names.
"""
