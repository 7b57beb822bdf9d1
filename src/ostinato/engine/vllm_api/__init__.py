"""What scripts written for vLLM expect around `LLM` and `AsyncLLM`.

`module_paths` is the table of vLLM's module paths; `llm_engine`, `engine_args`, `argument_parser`, `pooling`,
`prompt_outcomes`, `beam_search`, `metrics` and `config_objects` are what stands behind them.
"""
