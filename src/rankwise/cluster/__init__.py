"""The same job on Slurm, Kubernetes, Ray, over ssh or on this machine: what is submitted, and what has become of it."""
