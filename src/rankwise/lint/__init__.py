"""The static check: mistakes of distributed programs, found in the text before it runs; no user code is imported."""
