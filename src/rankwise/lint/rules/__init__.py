"""What the check finds: one rule a file; the file's docstring is the rule's page in docs/rules."""
