"""What completion pruning saves in the update."""
