"""Tables for the terminal, figures, and the report as one page. No torch."""
