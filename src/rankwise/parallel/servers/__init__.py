"""Parts of the parameter server: layout, links, shards, and the loop that serves them."""
