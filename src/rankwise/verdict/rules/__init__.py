"""What can be told of ranks that still run: one rule a file, each with its page in docs/rules."""
