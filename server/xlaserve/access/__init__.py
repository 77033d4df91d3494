"""Who may come in, and what each may do. Knows no protocol."""
