"""LoRA adapters in PEFT's format: read, checked against a model, written into its stacks."""
