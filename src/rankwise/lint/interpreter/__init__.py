"""A simulated run of the user's program: what each of four virtual ranks would do, as far as the text tells."""
