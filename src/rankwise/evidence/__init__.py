"""What a rank records while it runs, and how the launcher reads it: `in_rank` writes, `reader` reads, `offline_setup` prepares a rank that has no launcher of ours."""
