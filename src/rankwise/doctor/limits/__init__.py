"""What the system allows a job: its control groups, and the processes that are there."""
