"""Steps of a model on a CPU that run again without Python."""
