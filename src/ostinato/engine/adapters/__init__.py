"""An engine's LoRA adapters: which are known, which are on the device, and who uses them."""
