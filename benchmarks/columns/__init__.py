"""What numpy columns save against a Python object per token."""
