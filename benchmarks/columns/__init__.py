"""Savings of numpy columns over one Python object per token."""
