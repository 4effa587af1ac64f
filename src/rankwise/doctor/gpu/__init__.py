"""What NVIDIA's tools say of the GPUs, read from their text."""
