"""The public functions, one file each: the only room where rooms of one level are combined."""
