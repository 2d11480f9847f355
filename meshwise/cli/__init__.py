"""The command line: thin modules that parse the flags, call the verb and print its result."""
