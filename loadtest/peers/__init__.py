"""The service beside what a user would take instead, on one machine and in one run."""
