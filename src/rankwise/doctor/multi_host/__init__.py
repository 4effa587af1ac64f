"""Several hosts look at each other: they meet without torch, try all links, and one of them judges."""
