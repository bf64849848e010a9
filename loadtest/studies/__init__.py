"""What the simulator shows, each a command whose result is kept: `fidelity` beside a measured run,
`capacity` of batching policies, `fleet` at 1,000 requests/s, `prefixes` found in caches.
"""
