"""Who may ask, and how much at once."""
