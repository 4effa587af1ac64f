"""How a model spreads over the ranks: one ``apply_*`` a file."""
