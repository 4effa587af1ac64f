"""What is looked at: one probe a file, whose docstring is its page."""
