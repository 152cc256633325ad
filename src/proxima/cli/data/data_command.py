"""Prepare and check data sets for training and evaluation. Inspect the episodes of a recipe.

proxima data prepare gsm8k     # from the hub or its cache into data/gsm8k
proxima data prepare dapo-math --from dapo.parquet --against data/aime24 data/math500
proxima data check data/gsm8k  # do the files match the card?
proxima data inspect my.yaml   # an episode of its environment, token by token"""

from proxima.cli.data.card_action import check_folders
from proxima.cli.data.episode_action import inspect_episode
from proxima.cli.data.prepare_action import prepare_source

COMMAND = {"prepare": prepare_source, "check": check_folders, "inspect": inspect_episode}
