"""How the nodes of a job meet, and which ranks this node gets."""
