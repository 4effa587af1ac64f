"""Shell text as the rules see it: commands with what is known of their words, and the launches among them."""
