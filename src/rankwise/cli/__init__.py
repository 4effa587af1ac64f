"""argparse and glue: each command is a short module."""
