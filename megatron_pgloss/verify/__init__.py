"""The invariance harness: small real models with weights that do not depend on the layout, and what they yield."""
