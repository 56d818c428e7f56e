"""Log-probs from given logits: the public function, its autograd nodes, and log-probs at ids that a teacher chose."""
