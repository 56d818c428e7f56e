"""The two passes over the logits of a shard, row by row: what they need and give, and the backends that run them."""
