"""Speculation: drafted tokens that the model verifies several at a time, on the device."""
