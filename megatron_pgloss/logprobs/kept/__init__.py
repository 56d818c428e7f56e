"""Log-probs on the set of tokens that the sampler could draw from, and the search for that set."""
