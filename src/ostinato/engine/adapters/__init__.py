"""LoRA adapters of an engine: which are known, which are on the device, and who uses them."""
