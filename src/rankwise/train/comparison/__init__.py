"""Where two runs diverge, and what is likely behind it; torch is needed for checkpoints only."""
