"""`proxima data`: `data_command` lists its actions; `prepare_action`, `card_action`, `episode_action` run them."""
