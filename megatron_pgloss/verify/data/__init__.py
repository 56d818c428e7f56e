"""Rows to train on, made from a seed, and the batches of each rank."""
