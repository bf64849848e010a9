"""Runs a model on what the scheduler decided: tensors, attention over paged KV, sampling."""
