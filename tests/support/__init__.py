"""Code that tests share: worlds of processes, the oracle's stored answers, and the choice of the cases to visit."""
