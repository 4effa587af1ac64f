"""What is known of libraries: which calls are collectives, what they return, which names say a rank. Tables, no logic."""
