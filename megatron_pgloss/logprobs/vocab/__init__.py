"""The vocabulary over tensor-parallel ranks: which columns a rank holds, how rows lie in memory, and how the shards'
numbers become those of the whole vocabulary.
"""
