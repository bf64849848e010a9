"""Small servers of others' kinds, which run in the environments of those others."""
