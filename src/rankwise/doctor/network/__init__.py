"""What several probes ask of a host's network: interfaces, names, and which of them Gloo and NCCL will use."""
