"""Reads what ranks have recorded: of ranks that run now, and of a job that has ended. It needs no torch."""
