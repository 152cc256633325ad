"""Prepare, show, check and list data sets for training and evaluation. Inspect the episodes of a recipe.

proxima data prepare gsm8k     # from the hub or its cache into data/gsm8k
proxima data prepare dapo-math --from dapo.parquet --against data/aime24 data/math500
proxima data show data/gsm8k   # the card and a few rows
proxima data check data/gsm8k  # do the files match the card?
proxima data inspect my.yaml   # an episode of its environment, token by token"""

from proxima.cli.data.episode_action import inspect_episode
from proxima.cli.data.inspect_actions import check_folders, list_sources, show_folder
from proxima.cli.data.prepare_action import prepare_source
from proxima.cli.parameters import Actions

COMMAND = Actions(
    {
        "prepare": prepare_source,
        "show": show_folder,
        "check": check_folders,
        "list": list_sources,
        "inspect": inspect_episode,
    }
)
