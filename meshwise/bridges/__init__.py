"""Meshwise inside the stacks that people have: layouts read off their own loaders."""
