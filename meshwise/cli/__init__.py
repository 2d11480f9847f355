"""The command line: one thin module per verb parses, calls the verb and prints."""
