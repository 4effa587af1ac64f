"""Is it the host, the network, the variables? Probes of one host or of several, each with a verdict and the fix."""
