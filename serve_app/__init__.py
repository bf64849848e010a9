"""The ingress process: text in, token ids to a pool of engine replicas, text back."""
