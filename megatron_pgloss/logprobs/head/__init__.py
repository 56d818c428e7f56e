"""Log-probs from hidden states and the LM head's weight, by a fused head that computes its gradient in the backward
pass or already in the forward pass.
"""
