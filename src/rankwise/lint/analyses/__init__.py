"""What several rules ask of a script: who makes a call, which sampler feeds which loader, what a name is bound to."""
