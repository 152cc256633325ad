"""Savings of completion pruning in the update."""
