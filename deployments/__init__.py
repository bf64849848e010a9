"""The engine replicas: what crosses processes, the scheduler core, its execution, and the Serve
deployments.
"""
