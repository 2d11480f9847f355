"""Carries out transfer lists: the moves of ``reshard.transfer`` between the buffers of ranks."""
