"""FP8 as Transformer Engine computes it, emulated bit for bit: scales, casts, blocks, and products of what they give.

The reference for FP8 GEMMs, in plain torch on any device. No head of this package runs in FP8 so far: see docs/fp8.md.
"""
