"""Log-probs from hidden states and the LM head's weight, by one fused head that takes its gradient in backward or in
forward.
"""
