"""Models as plain torch modules: single-device mathematics only."""
