"""What an engine may do while its memory is away."""
