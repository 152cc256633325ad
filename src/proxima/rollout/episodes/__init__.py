"""Episodes: what a model and an environment say to each other over several turns, as the tokens of one sample.

`turn_template.py` renders and encodes a chat that grows, `conversation.py` keeps the tokens of one, turn by turn, and
never encodes what was sampled.
Imports: `data`, `model`. Imported by `rollout` and the rooms above.
"""
