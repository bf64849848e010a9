"""The rule from priority class to pools, free of Ray.

class 0 ─► chat ──── full, or no replica ───► batch
class 1 ─► batch     (spills_to: batch)
others  ─► the default pool
"""

from __future__ import annotations

from deployments.config import ServiceConfig


class PoolRoutes:
    """Which pools a priority class may use, in which order.

    Args:
        config: of the service; without `pools` there is one, named "engine".
    """

    def __init__(self, config: ServiceConfig) -> None:
        self.names = list(config.pools) or ["engine"]
        self._default = config.default_pool or self.names[0]
        self._by_priority = {
            priority: name for name, pool in config.pools.items() for priority in pool.priorities
        }
        self._next = {name: pool.spills_to for name, pool in config.pools.items()}

    def find_route(self, priority: int) -> list[str]:
        """The class's own pool, then where it spills to, each pool once."""
        route: list[str] = []
        name: str | None = self._by_priority.get(priority, self._default)
        while name is not None and name not in route:
            route.append(name)
            name = self._next.get(name)
        return route
