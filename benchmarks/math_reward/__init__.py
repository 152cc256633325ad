"""The reward `math` under ten thousand answers, one in a hundred of them hostile."""
