"""Start ranks, watch them, stop or restart them. The parent process: plain Python, never torch."""
