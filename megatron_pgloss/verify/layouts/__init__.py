"""Which layouts there are, and real models on them, with weights and gradients that do not depend on the layout."""
