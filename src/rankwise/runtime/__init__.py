"""Inside a rank: who am I, with whom do I speak."""
