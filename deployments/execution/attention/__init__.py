"""Attention over the paged KV cache: the function transformers calls, and the backends behind
it.
"""
