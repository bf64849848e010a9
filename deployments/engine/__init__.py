"""The scheduler core: pure Python that knows neither torch nor Ray; the same objects run in tests,
simulator and service.
"""
