"""The reward `math` on ten thousand answers, one in a hundred of them hostile."""
