"""From what the ranks left behind to who left first, where, why, and what to do. Pure functions."""
