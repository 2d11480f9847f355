"""Execute a plan: training steps, their time and memory, and the check against one device."""
