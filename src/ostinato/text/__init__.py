"""Text in and out of token ids: the tokenizer, its chat template, and incremental detokenisation."""
