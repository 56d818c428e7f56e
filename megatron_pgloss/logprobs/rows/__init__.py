"""The two passes over the logits of a shard, row by row: their inputs and outputs, and the backends that run them."""
