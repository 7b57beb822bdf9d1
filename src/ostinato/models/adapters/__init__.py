"""LoRA adapters as PEFT saves them: read, checked against a model, written into its stacks."""
