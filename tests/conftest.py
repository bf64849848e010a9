"""Puts this folder on the import path, so that every layer of tests finds `doubles`."""
