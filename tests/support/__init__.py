"""What tests share: worlds of processes, data, models, oracles and the choice of what is visited."""
