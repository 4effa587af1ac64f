"""A run of the user's program on paper: what each of four imagined ranks would do, as far as the text tells."""
