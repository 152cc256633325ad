"""`proxima data`: `data_command` lists its actions; `prepare_action`, `inspect_actions`, `episode_action` run them."""
