"""Where two runs part, and what is likely behind it; torch is needed for checkpoints only."""
