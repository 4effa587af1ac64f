"""What the environment says of the job: who this process is, where it stands, what contradicts what. Nothing here prints a secret."""
