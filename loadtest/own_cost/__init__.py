"""The parts of `bench_own_cost`: what a step costs beside the model, by who does it."""
