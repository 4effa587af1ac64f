"""What can be told of ranks that still run: a rule a file, or a few that are one but for their words; each with its page in docs/rules."""
