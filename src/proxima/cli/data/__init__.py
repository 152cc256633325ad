"""`proxima data`: `data_command` lists its actions; `prepare_action`, `check_action`, `episode_action` run them."""
