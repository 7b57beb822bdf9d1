"""Linear layers of few tokens, fused with their neighbours: chosen by measurement, cuBLAS elsewhere."""
