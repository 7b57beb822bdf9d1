"""Text to token ids and back: the tokenizer, its chat template, and incremental detokenisation."""
