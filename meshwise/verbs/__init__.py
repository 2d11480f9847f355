"""The public functions, one file each. Only this room combines rooms of one level."""
