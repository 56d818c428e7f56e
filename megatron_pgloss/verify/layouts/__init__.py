"""The table of layouts, and real models on them, whose weights and gradients are compared as whole tensors."""
