"""`proxima data`: `data_command` has its arguments, `prepare_action` and `inspect_actions` what they do."""
