"""Which samples each rank sees, and when: orders, samplers, loaders, evaluation."""
